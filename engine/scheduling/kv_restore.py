"""KV restore before admission: blocks from the disk and host tiers, and non-prefix KV reuse.

A waiting sequence at the head of the queue is checked once: if the tiers hold more of its prefix than the cache, or passages that
it may reuse, others are admitted before it until these blocks are read. Loaded blocks enter the cache between steps, few at a
time while streams run, and belong to no sequence, like the blocks of a finished request. The sequence is then admitted with
whatever is cached, so a file that is missing, damaged or slow only costs a short delay.

Non-prefix reuse: a sequence attaches its cached prefix first, then searches for passages after it when it is admitted, computes
up to the first passage, continues after it, and so on. The last token of a prompt is always computed. A preempted sequence
returns its passages and searches again only if it has not produced output.

State of a waiting sequence, in fields of `Sequence` written only here (preemption resets `restore_checked`):

| restore_checked | fetch | num_expected_blocks | meaning |
| --- | --- | --- | --- |
| no | None | any | not checked since it began to wait, or to be checked again |
| yes | set | blocks cached at the check | waits until the fetch has ended |
| yes | None | blocks cached at the check, or loaded since | may be admitted |
| yes | set or None | `EVICTION_RETRIED` | the same, and does not wait for evicted blocks a second time |
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_store import ArrivedBlock, BlockStore, Fetch, WantedBlock
from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.cache.non_prefix_reuse import PassageSearch
from windlass.engine.cache.prefix_cache import BlockKey, first_visible_block, longest_hit
from windlass.engine.cache.recurrent_state import eviction_window, holds_blocks_of
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import MIN_PASSAGE_TOKENS
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.sequence import EVICTION_RETRIED, Sequence

_GRACE_SECONDS = 1.0  # reading is never cancelled as slow before this time

_MIN_TOKENS_PER_SECOND = 1000  # reading slower than this is cancelled: few engines compute a prompt more slowly


@dataclass(frozen=True, slots=True)
class _CachedOrStored:
    """The digests of the blocks of a KV group that are in the cache or in a tier."""

    group: int
    cached: abc.Mapping[bytes, int]
    store: BlockStore

    def __contains__(self, digest: object) -> bool:
        return digest in self.cached or (isinstance(digest, bytes) and BlockKey(self.group, digest) in self.store)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRestore:
    """num_cached: blocks of the prefix that were cached at the check. is_shared: the fetch was started for another sequence and
    may lack blocks, so the sequence is checked again after it.
    """

    seq: Sequence
    fetch: Fetch
    num_cached: int
    is_shared: bool


@dataclass(slots=True)
class KVRestorer:
    """Reads blocks of waiting sequences from `store` into the cache. clock: seconds, the same as that of `Fetch`."""

    _blocks: BlockManager
    _store: BlockStore
    _reuse: NonPrefixReuse
    _clock: abc.Callable[[], float]
    _waiting: list[_PendingRestore] = field(default_factory=list)

    @property
    def fetches(self) -> list[Fetch]:
        """The fetches that sequences wait for."""
        return [waiting.fetch for waiting in self._waiting]

    def wait(self, seconds: float) -> bool:
        """Wait until blocks have arrived or a fetch has ended. Returns False after `seconds`."""
        return self._store.reader.wait(self.fetches, seconds)

    def should_wait(self, seq: Sequence) -> bool:
        """Whether a sequence waits for blocks from the tiers instead of being admitted. Starts a fetch at the first call."""
        if not seq.restore_checked:
            seq.restore_checked = True
            cached, wanted = self._wanted(seq)
            seq.num_expected_blocks = cached
            if wanted:
                same = next((fetch for fetch in self.fetches if wanted[0].key in fetch.keys), None)
                if same is not None:
                    same.num_waiting += 1
                seq.fetch = same or self._store.reader.fetch(wanted)
                self._waiting.append(_PendingRestore(seq, seq.fetch, cached, is_shared=same is not None))
        return seq.fetch is not None

    def should_wait_again(self, seq: Sequence, hit: int) -> bool:
        """Whether a sequence that could be admitted waits once more, because blocks of its prefix have been evicted.

        hit: blocks of its prefix that are cached now.
        """
        if hit >= seq.num_expected_blocks:
            return False
        seq.restore_checked = False
        waits = self.should_wait(seq)
        seq.num_expected_blocks = EVICTION_RETRIED
        return waits

    def take_loaded_blocks(self, *, streams: bool) -> list[LoadedBlock]:
        """Allocate blocks for data that has arrived, up to a limit of bytes, and return what the next step must load.

        streams: whether streams are running, for which the limit is lower.
        """
        loaded: list[LoadedBlock] = []
        if not self._waiting:
            return loaded
        budget_bytes = self._store.transfer.load_budget_streaming if streams else self._store.transfer.load_budget_idle
        fetches = set(self.fetches)
        before = [sum(fetch.num_loaded[group] for fetch in fetches) for group in range(len(self._blocks.pools))]
        for fetch in self.fetches:
            while fetch.arrived and budget_bytes > 0:
                block = fetch.take()
                budget_bytes -= block.num_bytes
                loaded += self._load_block(fetch, block, before[block.key.group])
        # Released only now, so that no block of this step is evicted for another one and loaded twice.
        for block_load in reversed(loaded):
            self._blocks.pools[block_load.group].release(block_load.block)
        for waiting in list(self._waiting):
            self._cancel_if_slow(waiting.fetch)
            if waiting.fetch.is_over:
                self._finish_restore(waiting)
        return loaded

    def note_applied(self) -> None:
        """Record that the blocks of the last step were loaded."""
        self._store.note_applied()

    def _wanted(self, seq: Sequence) -> tuple[int, list[WantedBlock]]:
        """The number of cached blocks of its prefix, and the blocks to read."""
        if seq.cache.is_swapped_out or not self._blocks.enable_prefix_caching or not seq.can_share_prefix:
            return 0, []
        size = self._blocks.block_size
        limit = min(seq.num_shareable_tokens, seq.num_tokens - 1) // size
        parts = _parts(seq)
        for part in parts:
            part.chain.extend(seq.token_ids, limit * size)
        cached, present = self._hit(parts, limit, self._cached()), self._hit(parts, limit, self._present())
        wanted = []
        if present > cached:
            wanted = [block for part in parts for block in self._missing(part, present)]
            wanted.sort(key=lambda block: block.index or 0)
        for part in parts:
            chain = part.chain.digests[:present]
            for group in range(len(self._blocks.pools)) if chain else ():
                self._store.note_use([BlockKey(group, digest) for digest in chain])
            self._protect_chain(chain)  # so that loaded blocks do not evict those before them
        return cached, wanted + self._wanted_passages(seq, present * size)

    def _hit(self, parts: abc.Sequence[SequenceCache], limit: int, found: abc.Sequence[abc.Container[bytes]]) -> int:
        """The number of leading blocks, up to `limit`, that all parts have. found: per KV group the digests that exist."""
        pools = list(zip(found, self._blocks.pools, strict=True))
        for part in parts:
            groups = [(blocks, eviction_window(pool, part)) for blocks, pool in pools if holds_blocks_of(pool, part)]
            limit = longest_hit(part.chain.digests, limit, groups, self._blocks.block_size)
        return limit

    def _cached(self) -> list[abc.Container[bytes]]:
        return [pool.cached for pool in self._blocks.pools]

    def _present(self) -> list[abc.Container[bytes]]:
        return [_CachedOrStored(group, pool.cached, self._store) for group, pool in enumerate(self._blocks.pools)]

    def _missing(self, handle: SequenceCache, num_blocks: int) -> abc.Iterator[WantedBlock]:
        """Blocks missing in the cache among the first `num_blocks`, as far as the next token sees them."""
        size = self._blocks.block_size
        for group, pool in enumerate(self._blocks.pools):
            if not holds_blocks_of(pool, handle):
                continue
            first = first_visible_block(num_blocks * size, eviction_window(pool, handle), size)
            for index in range(first, num_blocks):
                digest = handle.chain.digests[index]
                if digest not in pool.cached:
                    yield WantedBlock(BlockKey(group, digest), index)

    def _wanted_passages(self, seq: Sequence, start: int) -> list[WantedBlock]:
        """Blocks of stored passages that are not cached. Those of group 0 come last, as they describe the passages."""
        found: dict[bytes, None] = {}
        search, scope = self._reuse.search_of(seq), seq.cache.chain.scope
        if search is not None and scope is not None:
            search = replace(search, start=max(search.start, start))
            for passage in self._store.search(scope, seq.token_ids, search):
                found |= dict.fromkeys(passage.digests)
        groups = reversed(list(enumerate(self._blocks.pools)))
        keys = [BlockKey(group, digest) for group, pool in groups for digest in found if digest not in pool.cached]
        return [WantedBlock(key, None) for key in keys]

    def _load_block(self, fetch: Fetch, block: ArrivedBlock, before: int) -> list[LoadedBlock]:
        """Register an arrived block in the cache, unless it is cached already or too few blocks are free. It stays allocated.

        before: blocks of its group that earlier steps loaded for the same fetches, which a loaded block must not evict.
        """
        (group, digest), pool = block.key, self._blocks.pools[block.key.group]
        if digest in pool.cached or pool.num_available - before <= pool.num_blocks // 16:
            self._store.transfer.drop(block.ticket)
            if digest not in pool.cached:
                fetch.cancel()
            return []
        taken = pool.take()
        pool.register(taken, digest)
        fetch.num_loaded[group] += 1
        self._store.note_loaded(group, taken)
        passage = block.passage
        if passage is not None and all(digest in other.cached for other in self._blocks.pools):
            for scope in passage.scopes:
                self._blocks.passages.add(scope, digest, passage.parent, passage.token_ids, passage.position)
        return [LoadedBlock(group, taken, block.ticket)]

    def _cancel_if_slow(self, fetch: Fetch) -> None:
        seconds = fetch.busy_seconds(self._clock()) - _GRACE_SECONDS
        if not fetch.is_done and seconds * _MIN_TOKENS_PER_SECOND > fetch.tokens_read(self._blocks.block_size):
            fetch.cancel()

    def _finish_restore(self, waiting: _PendingRestore) -> None:
        """Let the sequence of a fetch that has ended be admitted, and count the restored tokens."""
        seq, fetch = waiting.seq, waiting.fetch
        self._waiting.remove(waiting)
        seq.fetch = None
        seq.restore_checked = fetch.is_cancelled or not waiting.is_shared
        parts = _parts(seq)
        for part in parts:
            self._protect_chain(part.chain.digests)
        prefix = [block for block in fetch.wanted if block.index is not None]
        last = max((block.index or 0 for block in prefix), default=-1)
        cached = self._hit(parts, last + 1, self._cached())
        if seq.num_expected_blocks != EVICTION_RETRIED:
            seq.num_expected_blocks = cached
        restored = max(0, cached - waiting.num_cached)
        passages = [block.key for block in fetch.wanted if block.index is None and block.key.group == 0]
        restored += sum(key.digest in self._blocks.pools[0].cached for key in passages)
        self._store.counts.restored_tokens += restored * self._blocks.block_size

    def _protect_chain(self, chain: abc.Sequence[bytes]) -> None:
        """Make the unused blocks of a text the last ones to be evicted, its tail first. Of its states, only the last one."""
        for pool in self._blocks.pools:
            if pool.holds_states:
                last = next((digest for digest in reversed(chain) if digest in pool.cached), None)
                if last is not None:
                    pool.touch(last)
                continue
            for digest in reversed(chain):
                pool.touch(digest)


def _parts(seq: Sequence) -> list[SequenceCache]:
    """The caches of a sequence. The second key copies come first, because each of their prefixes can be used."""
    return [seq.cache] if seq.cache.second_keys is None else [seq.cache.second_keys, seq.cache]


@dataclass(slots=True)
class NonPrefixReuse:
    """Attaches cached passages to prompts."""

    _blocks: BlockManager
    _counters: SchedulerCounters

    def find_passages(self, seq: Sequence) -> None:
        """Let a sequence whose cached prefix was just attached, and is not complete, hold the passages that it will reuse."""
        search = self.search_of(seq)
        if search is not None:
            self._blocks.hold_passages(seq.cache, seq.token_ids, search)

    def search_of(self, seq: Sequence) -> PassageSearch | None:
        """The search for passages that a sequence may reuse.

        None if it did not request reuse, has produced output, requests prompt log-probabilities, must compute its entire
        prompt, has an attention window, or will be re-rotated.
        """
        rule, context_limits = seq.request.reuse, seq.context_limits
        if (
            rule is None
            or not rule.is_enabled
            or seq.num_output_tokens
            or seq.needs_full_prefill
            or seq.prompt_logprobs is not None
            or context_limits.attention_window is not None
            or (seq.rotation.policy == "rotate" and seq.stage.last_length is not None)
        ):
            return None
        longest = min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, context_limits.longest)
        # No passage begins within the retained tokens: `shift` requires that their slots hold one token each.
        retained = context_limits.retained_blocks * context_limits.block_size
        return PassageSearch(
            retained,
            seq.num_prompt_tokens - 1,
            max(rule.at_least, MIN_PASSAGE_TOKENS),
            rule.passages,
            rule.recompute,
            longest,
            context_limits.window,
        )

    def attach_passage(self, seq: Sequence) -> None:
        """Attach the held passage that begins with the next token, if there is one."""
        for passage in self._blocks.attach_passages(seq.cache, seq.token_ids):
            self._counters.reused_passages += 1
            self._counters.reused_tokens += passage.num_tokens
            self._counters.recomputed_tokens["cache_reuse"] += passage.num_repeated
