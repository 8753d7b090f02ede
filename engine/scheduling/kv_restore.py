"""KV restore before admission: blocks from the disk and host tiers, and non-prefix KV reuse.

A waiting sequence at the head of the queue is checked once: if the tiers hold more of its prefix than the cache, or passages that
it may reuse, it steps aside until they are read. Loaded blocks enter the cache between steps, few at a time while streams run, and
belong to no sequence, like the blocks of a finished request. The sequence is then admitted with whatever is cached, so a file that is
missing, damaged or slow costs a moment and nothing else.

Non-prefix reuse: a sequence attaches its cached prefix first, then searches for passages behind it when it is admitted, computes
up to the first passage, continues behind it, and so on. The last token of a prompt is always computed. A preempted sequence gives
its passages back and searches again only if it has not produced output.

State of a waiting sequence, in fields of `Sequence` written only here (preemption resets `restore_checked`):

| restore_checked | fetch | num_expected_blocks | meaning |
| --- | --- | --- | --- |
| no | None | any | not checked since it began to wait, or to be checked again |
| yes | set | blocks cached at the check | steps aside until the fetch is over |
| yes | None | blocks cached at the check, or loaded since | may be admitted |
| yes | set or None | `EVICTION_RETRIED` | the same, and does not wait for evicted blocks a second time |
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.engine.cache.block_manager import BlockManager, ReuseLimits
from windlass.engine.cache.block_store import ArrivedBlock, Fetch, WantedBlock
from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.cache.non_prefix_reuse import PassageSearch
from windlass.engine.cache.prefix_cache import BlockKey, first_visible_block, longest_hit
from windlass.engine.cache.recurrent_state import eviction_window, holds_blocks_of
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import MIN_PASSAGE_TOKENS
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.sequence import EVICTION_RETRIED, Sequence

if TYPE_CHECKING:
    from windlass.engine.cache.block_store import BlockStore


_GRACE_SECONDS = 1.0  # seconds that reading may take whatever comes of it

_MIN_TOKENS_PER_SECOND = (
    1000  # tokens a second that it has to bring from then on: few engines compute a prompt more slowly
)


@dataclass(frozen=True, slots=True)
class _CachedOrStored:
    """Blocks of a KV group that are cached or kept, by digest."""

    group: int
    cached: abc.Mapping[bytes, int]
    store: BlockStore

    def __contains__(self, digest: object) -> bool:
        return digest in self.cached or (isinstance(digest, bytes) and BlockKey(self.group, digest) in self.store)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRestore:
    """num_cached: blocks of its prefix that the cache held when it began to wait. is_shared: it waits for what another wants,
    which may not be all that it lacks: it looks once more then.
    """

    seq: Sequence
    fetch: Fetch
    num_cached: int
    is_shared: bool


class KVRestorer:
    """clock: seconds, as `Fetch` has them."""

    def __init__(
        self, blocks: BlockManager, store: BlockStore, reuse: NonPrefixReuse, clock: abc.Callable[[], float]
    ) -> None:
        self._blocks, self._store, self._reuse, self._clock = blocks, store, reuse, clock
        self._waiting: list[_PendingRestore] = []

    @property
    def fetches(self) -> list[Fetch]:
        """Those that sequences wait for."""
        return [waiting.fetch for waiting in self._waiting]

    def wait(self, seconds: float) -> bool:
        """Until there is something to do for a sequence that waits; False if that takes longer."""
        return self._store.wait(self.fetches, seconds)

    def should_wait(self, seq: Sequence) -> bool:
        """Whether `seq`, which is to be admitted, had better wait for what is being read."""
        if not seq.restore_checked:
            seq.restore_checked = True
            cached, wanted = self._wanted(seq)
            seq.num_expected_blocks = cached
            if wanted:
                same = next((fetch for fetch in self.fetches if wanted[0].key in fetch.keys), None)
                if same is not None:
                    same.num_waiting += 1
                seq.fetch = same or self._store.fetch(wanted)
                self._waiting.append(_PendingRestore(seq, seq.fetch, cached, is_shared=same is not None))
        return seq.fetch is not None

    def should_wait_again(self, seq: Sequence, hit: int) -> bool:
        """Whether `seq`, for which there is room and whose cached prefix has `hit` blocks, had better wait once more.

        It may have waited so long for room that blocks were evicted which were there when it looked; they are missed once.
        """
        if hit >= seq.num_expected_blocks:
            return False
        seq.restore_checked = False
        waits = self.should_wait(seq)
        seq.num_expected_blocks = EVICTION_RETRIED
        return waits

    def take_loaded_blocks(self, *, streams: bool) -> list[LoadedBlock]:
        """Take blocks for what has arrived, up to a bound; what to put into them comes back, for the next plan."""
        loaded: list[LoadedBlock] = []
        if not self._waiting:
            return loaded
        budget_bytes = self._store.transfer.load_budget_streaming if streams else self._store.transfer.load_budget_idle
        fetches = set(self.fetches)
        before = [sum(fetch.num_loaded[group] for fetch in fetches) for group in range(len(self._blocks.pools))]
        for waiting in self._waiting:
            fetch = waiting.fetch
            while fetch.arrived and budget_bytes > 0:
                block = fetch.take()
                budget_bytes -= block.num_bytes
                loaded += self._load_block(fetch, block, before[block.key.group])
        # Held until here, as none may be evicted for another of this plan: their rows would be put into one block.
        for one in reversed(loaded):
            self._blocks.pools[one.group].release(one.block)
        for waiting in list(self._waiting):
            self._cancel_if_slow(waiting.fetch)
            if waiting.fetch.is_over:
                self._finish_restore(waiting)
        return loaded

    def note_applied(self) -> None:
        """What the last plan had brought in lies in its blocks."""
        self._store.note_applied()

    def _wanted(self, seq: Sequence) -> tuple[int, list[WantedBlock]]:
        """Blocks of its prefix that the cache holds, and what is kept beside."""
        if (
            seq.needs_full_prefill
            or seq.cache.is_swapped_out
            or not self._blocks.enable_prefix_caching
            or seq.cache.private
        ):
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
            self._protect_chain(chain)  # what is brought in shall not evict what it follows
        return cached, wanted + self._passages(seq, present * size)

    def _hit(self, parts: abc.Sequence[SequenceCache], limit: int, there: abc.Sequence[abc.Container[bytes]]) -> int:
        """Leading blocks of all parts, given per KV group which blocks there are."""
        pools = list(zip(there, self._blocks.pools, strict=True))
        for part in parts:
            groups = [(blocks, eviction_window(pool, part)) for blocks, pool in pools if holds_blocks_of(pool, part)]
            limit = longest_hit(part.chain.digests, limit, groups, self._blocks.block_size)
        return limit

    def _cached(self) -> list[abc.Container[bytes]]:
        return [pool.cached for pool in self._blocks.pools]

    def _present(self) -> list[abc.Container[bytes]]:
        return [_CachedOrStored(group, pool.cached, self._store) for group, pool in enumerate(self._blocks.pools)]

    def _missing(self, handle: SequenceCache, num_blocks: int) -> abc.Iterator[WantedBlock]:
        """What the cache lacks of the first `num_blocks` blocks, as far as a query behind them sees them."""
        size = self._blocks.block_size
        for group, pool in enumerate(self._blocks.pools):
            if not holds_blocks_of(pool, handle):
                continue
            first = first_visible_block(num_blocks * size, eviction_window(pool, handle), size)
            for index in range(first, num_blocks):
                digest = handle.chain.digests[index]
                if digest not in pool.cached:
                    yield WantedBlock(BlockKey(group, digest), index)

    def _passages(self, seq: Sequence, start: int) -> list[WantedBlock]:
        """Blocks of the passages that are kept and not cached; the first group's last, which say what they are."""
        found: dict[bytes, None] = {}
        search = self._reuse.search_for(seq)
        if search is not None and seq.cache.chain.scope is not None:
            search = replace(search, start=max(search.start, start))
            for passage in self._store.search(seq.cache.chain.scope, seq.token_ids, search):
                found |= dict.fromkeys(passage.digests)
        groups = reversed(list(enumerate(self._blocks.pools)))
        keys = [BlockKey(group, digest) for group, pool in groups for digest in found if digest not in pool.cached]
        return [WantedBlock(key, None) for key in keys]

    def _load_block(self, fetch: Fetch, block: ArrivedBlock, before: int) -> list[LoadedBlock]:
        """Let it be a cached block, unless it has become one meanwhile or there is no room. It is held for now.

        before: blocks of its group that earlier plans have brought those that wait. None shall evict what it follows.
        """
        (group, digest), pool = block.key, self._blocks.pools[block.key.group]
        if digest in pool.cached or pool.num_available - before <= pool.num_blocks // 16:
            self._store.drop([block.ticket])
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
        """Its sequence may be admitted, or has ended."""
        seq, fetch = waiting.seq, waiting.fetch
        self._waiting.remove(waiting)
        seq.fetch = None
        seq.restore_checked = fetch.is_cancelled or not waiting.is_shared
        parts = _parts(seq)
        for part in parts:
            self._protect_chain(part.chain.digests)
        prefix = [block for block in fetch.wanted if block.index is not None]
        last = max((block.index or 0 for block in prefix), default=-1)
        there = self._hit(parts, last + 1, self._cached())
        if seq.num_expected_blocks != EVICTION_RETRIED:
            seq.num_expected_blocks = there
        restored = max(0, there - waiting.num_cached)
        passages = [key for key, index in ((b.key, b.index) for b in fetch.wanted) if index is None and key.group == 0]
        restored += sum(key.digest in self._blocks.pools[0].cached for key in passages)
        self._store.restored_tokens += restored * self._blocks.block_size

    def _protect_chain(self, chain: abc.Sequence[bytes]) -> None:
        """Let the idle blocks of a text be evicted after all others, its tail first; of its states the last alone."""
        for pool in self._blocks.pools:
            if pool.holds_states:
                last = next((digest for digest in reversed(chain) if digest in pool.cached), None)
                if last is not None:
                    pool.touch(last)
                continue
            for digest in reversed(chain):
                pool.touch(digest)


def _parts(seq: Sequence) -> list[SequenceCache]:
    """What holds its keys: its far ones too, if there are any. Those first, as all of their beginnings can be taken."""
    return [seq.cache] if seq.cache.second_keys is None else [seq.cache.second_keys, seq.cache]


class NonPrefixReuse:
    def __init__(self, blocks: BlockManager, counters: SchedulerCounters) -> None:
        self._blocks = blocks
        self._counters = counters

    def find_passages(self, seq: Sequence) -> None:
        """Let a sequence that has just got its prefix, but not all of its tokens, hold the passages it will take up.

        Nothing is taken where prompt log-probabilities are asked for, where keys will be re-rotated, where tokens see a window of
        their own, and where the answer has begun.
        """
        limits, rule = self._limits_of(seq), seq.request.reuse
        if limits is not None and rule is not None:
            self._blocks.hold_passages(seq.cache, seq.token_ids, rule, limits)

    def search_for(self, seq: Sequence) -> PassageSearch | None:
        """What `find_passages` will search for, beyond the prefix."""
        limits, rule = self._limits_of(seq), seq.request.reuse
        if limits is None or rule is None or not rule.is_enabled:
            return None
        return PassageSearch(limits.start, limits.end, max(rule.at_least, MIN_PASSAGE_TOKENS), rule.passages)

    def _limits_of(self, seq: Sequence) -> ReuseLimits | None:
        rule, context_limits = seq.request.reuse, seq.context_limits
        if (
            rule is None
            or seq.needs_full_prefill
            or seq.prompt_logprobs is not None
            or context_limits.attention_window is not None
        ):
            return None
        if seq.num_output_tokens:
            return None
        if seq.rotation.policy == "rotate" and seq.stage.last_length is not None:
            return None
        longest = min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, context_limits.longest)
        kept = (
            context_limits.retained_blocks * context_limits.block_size
        )  # that these are tokens and nothing else is what `shift` goes by
        return ReuseLimits(kept, seq.num_prompt_tokens - 1, longest, context_limits.window)

    def attach_passage(self, seq: Sequence) -> None:
        """Take up what begins with the next token, if anything does."""
        for passage in self._blocks.attach_passages(seq.cache, seq.token_ids):
            self._counters.reused_passages += 1
            self._counters.reused_tokens += passage.num_tokens
            self._counters.recomputed_tokens["cache_reuse"] += passage.num_repeated
