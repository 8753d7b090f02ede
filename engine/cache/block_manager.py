"""Block manager: block tables of all sequences over the block pools of all KV groups.

Allocates, shares, copies on write and frees blocks, and attaches cached prefixes and passages. Touches no tensor. Tables are released tail first, so the tail of an idle prompt is evicted before its head: a head without its tail is still a usable prefix. Blocks released together are reused in table order, since neighbouring blocks are cheaper to read.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import partial

from windlass.engine.cache.block_pool import BlockListener, BlockPool
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.kv_cache_spec import MAX_STATE_BLOCKS, KVGroupLayout
from windlass.engine.cache.non_prefix_reuse import Passage, PassageIndex, PassageRecord, passage_of
from windlass.engine.cache.prefix_cache import BlockKey, HashChain, first_visible_block, longest_hit
from windlass.engine.cache.recurrent_state import RecurrentStateManager, eviction_window, holds_blocks_of
from windlass.engine.cache.sequence_cache import OPEN_END, BlockTable, HeldPassage, SequenceCache, SlotLayout
from windlass.engine.interface.context import NonPrefixReuseParams
from windlass.engine.rotary.rope_scaling import RotarySpec


class BlockManager:
    """Block tables of all sequences over the pools of all KV groups.

    groups: one layout per KV group. block_size: tokens per block. With `enable_prefix_caching` off nothing is hashed,
    so nothing is matched. keeper: who is told of blocks that can be kept. Methods that take blocks
    never evict a held block and never raise for want of blocks if `capacity` was asked first.
    """

    def __init__(
        self,
        groups: abc.Sequence[KVGroupLayout],
        block_size: int,
        enable_prefix_caching: bool = True,
        listener: BlockListener | None = None,
    ) -> None:
        if not groups or block_size < 1 or any(g.num_blocks < 1 for g in groups):
            raise ValueError("a block manager needs at least one group, one block in each, and a positive block size")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.passages = PassageIndex(block_size)
        self._listener = listener
        self.pools = [BlockPool(layout, partial(self._on_evicted, group)) for group, layout in enumerate(groups)]
        states = [group for group, pool in enumerate(self.pools) if pool.holds_states]
        self._window_groups = [g for g, pool in enumerate(self.pools) if pool.window is not None and g not in states]
        self._states = RecurrentStateManager(self.pools, states)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def min_blocks(self, num_slots: int, *, shifts: bool = False, sinks_window: int = OPEN_END) -> list[int]:
        """Per group the blocks a lone sequence must be able to hold at once to take `num_slots` slots.

        A window of w tokens spans at most (w + block_size - 2) // block_size + 1 blocks wherever it lies. shifts: whether
        tokens are dropped, which brings others nearer by a block. sinks_window: see `SequenceCache.window_in`.
        """
        total = -(-num_slots // self.block_size)
        return [
            MAX_STATE_BLOCKS
            if p.holds_states
            else total
            if p.window is None or p.window > sinks_window
            else min(total, (p.window + self.block_size - 2) // self.block_size + 1 + shifts)
            for p in self.pools
        ]

    def blocks_still_needed(self, handle: SequenceCache, num_slots: int, chunk: int, *, rerotates: bool) -> list[int]:
        """Per group the blocks that are still taken until `num_slots` slots are, in chunks of up to `chunk` tokens.

        rerotates: whether keys are re-rotated on the way, so that they stand there twice.
        """
        total = -(-num_slots // self.block_size)
        need = []
        for group, pool in enumerate(self.pools):
            blocks = handle.tables[group].blocks if handle.tables else []
            if pool.holds_states:
                need.append(self._states.num_missing(handle, group))
                continue
            held = len(blocks)
            copy = bool(blocks) and pool.needs_copy(blocks, handle.num_slots // self.block_size)
            coming = sum(len(passage.blocks[group]) for passage in handle.passages)  # held already
            count = total - held - coming + copy
            if (window := eviction_window(pool, handle)) is not None:
                # A window gives back what it leaves behind, so the most it holds at once is window + chunk.
                held -= handle.tables[group].num_dropped if handle.tables else 0
                most = (window + chunk + self.block_size - 2) // self.block_size + 1 + (handle.floor < OPEN_END)
                count = min(count, most - held)
            if rerotates:
                count += total - (len(handle.originals[group].blocks) if handle.originals else 0)
            need.append(max(0, count))
        if handle.second_keys is not None:
            second_keys = self.blocks_still_needed(handle.second_keys, num_slots, chunk, rerotates=False)
            need = [own + other for own, other in zip(need, second_keys, strict=True)]
        return need

    def available(self) -> list[int]:
        """Per group the blocks that could be taken now, idle cached ones included."""
        return [pool.num_available for pool in self.pools]

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by live sequences; idle cached blocks do not count."""
        return sum(pool.num_blocks - pool.num_available for pool in self.pools)

    @property
    def usage(self) -> float:
        """Held share of the fullest group, 0..1."""
        return max((pool.num_blocks - pool.num_available) / pool.num_blocks for pool in self.pools)

    # -- prefix cache --------------------------------------------------------------------------------------------

    def match(self, handle: SequenceCache, token_ids: abc.Sequence[int], num_shareable: int) -> tuple[int, bool]:
        """Leading blocks that a sequence can take from the cache, and whether all of its tokens were there.

        num_shareable: leading tokens that are computed under the handle's specs. At least one token is left to compute,
        since only a forward pass gives logits: after a full hit the last block is computed again, into a block of its
        own. Changes nothing but the handle's hash chain.
        """
        if not self.enable_prefix_caching or handle.private:
            return 0, False
        most = num_shareable
        if handle.second_keys is not None:  # all of its beginnings can be taken, but not all of those with states
            second_keys, whole = self._match(handle.second_keys, token_ids, num_shareable)
            most = most if whole else second_keys * self.block_size
        return self._match(handle, token_ids, most)

    def _match(self, handle: SequenceCache, token_ids: abc.Sequence[int], num_shareable: int) -> tuple[int, bool]:
        size, digests = self.block_size, handle.chain.digests
        handle.chain.extend(token_ids, num_shareable)
        groups = [(pool.cached, eviction_window(pool, handle)) for pool in self.pools if holds_blocks_of(pool, handle)]
        hit = longest_hit(digests, num_shareable // size, groups, size)
        if hit * size < len(token_ids):
            return hit, False
        return longest_hit(digests, hit - 1, groups, size), True

    def attach(self, handle: SequenceCache, num_blocks: int) -> None:
        """Start the tables of a handle that holds nothing with the first `num_blocks` blocks from the cache.

        `num_blocks` is what `match` returned, with nothing taken in between.
        """
        num_tokens = num_blocks * self.block_size
        tables = []
        for pool in self.pools:
            if not holds_blocks_of(pool, handle):
                tables.append(BlockTable())
                continue
            low = first_visible_block(num_tokens, eviction_window(pool, handle), self.block_size)
            blocks = [pool.cached[digest] for digest in handle.chain.digests[low:num_blocks]]
            dropped = 0 if pool.holds_states else low
            tables.append(BlockTable([-1] * dropped + blocks, dropped))
        # What it takes over is offered once more where it may be found as a passage by others than those before.
        handle.hold(tables, num_tokens, num_blocks if handle.chain.scope is None else 0)
        self._share(tables)
        if handle.second_keys is not None:
            self.attach(handle.second_keys, num_blocks)

    def mark_computed(
        self,
        handle: SequenceCache,
        token_ids: abc.Sequence[int],
        num_computed_tokens: int,
        num_inflight_tokens: int = 0,
    ) -> None:
        """Book that the keys of the first `num_computed_tokens` tokens are written and final.

        Blocks that have become full are offered to the prefix cache. Those that no query still to come can see are
        released, and so is room for proposed tokens that were rejected. num_inflight_tokens: tokens behind them that are being computed.
        """
        advanced = num_computed_tokens - handle.num_computed_tokens
        handle.set_computed(num_computed_tokens)
        self.commit(handle, token_ids)
        if self.enable_prefix_caching:
            self._states.cache_latest(handle, self.block_size, self._listener, advanced, num_inflight_tokens)
        self._states.mark_computed(handle, advanced, num_inflight_tokens)
        if self._window_groups:
            self._drop_outside_window(handle)
        needed = -(-(handle.num_slots + num_inflight_tokens) // self.block_size)
        for pool, table in zip(self.pools, handle.tables, strict=True):
            while len(table.blocks) > needed:
                pool.release(table.pop())
        if handle.second_keys is not None:
            self.mark_computed(handle.second_keys, token_ids, num_computed_tokens, num_inflight_tokens)

    # -- tables --------------------------------------------------------------------------------------------------

    def capacity(self, handle: SequenceCache, num_tokens: int, reserved: abc.Sequence[int] | None = None) -> int:
        """How many of the next `num_tokens` tokens the pools have room for now.

        reserved: per group the blocks that are taken for something else first.
        """
        start, size = handle.num_slots, self.block_size
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            held = len(table.blocks)
            if pool.holds_states:
                if pool.num_available < self._states.num_missing(handle, group):
                    return 0
                continue
            alike = (
                [table.blocks]
                if handle.second_keys is None
                else [table.blocks, handle.second_keys.tables[group].blocks]
            )
            copies = sum(pool.needs_copy(blocks, start // size) for blocks in alike)
            extra = reserved[group] if reserved else 0
            if not copies and not extra and start + num_tokens <= held * size:
                continue
            spare = pool.num_available - copies - extra
            if spare < 0:
                return 0
            num_tokens = min(num_tokens, (held + spare // len(alike)) * size - start)
        return num_tokens

    def allocate(self, handle: SequenceCache, num_tokens: int) -> list[BlockCopy]:
        """Make the slots of the next `num_tokens` tokens writable; `num_tokens` is at most `capacity`.

        Returns the copies to do, in order, before the forward pass: a last block that others hold or may match is
        replaced by a copy of its own (copy on write). Targets of the copies of one step are distinct, and no source
        is the target of an earlier copy; a target may be the source of one.
        """
        start, size = handle.num_slots, self.block_size
        index, end = start // size, -(-(start + num_tokens) // size)
        needs = []  # (group, its pool and table, whether the block at `index` is to be copied)
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            if pool.holds_states:
                continue
            copy = pool.needs_copy(table.blocks, index)
            num_missing = end - len(table.blocks)
            if num_missing > 0 or copy:
                if max(0, num_missing) + copy > pool.num_available:
                    raise RuntimeError(f"no room for {num_tokens} tokens: `capacity` was not asked")
                needs.append((group, pool, table, copy))
        copies = self._states.make_writable(handle)
        for group, pool, table, copy in needs:
            if copy:
                source = table.blocks[index]
                target = pool.take(private=handle.unhashed or bool(pool.private[source]))
                table.replace(index, target)
                pool.release(source)
                copies.append(BlockCopy(group, source, target))
            for _ in range(len(table.blocks), end):
                table.append(pool.take(handle.unhashed))
        return copies if handle.second_keys is None else copies + self.allocate(handle.second_keys, num_tokens)

    def capacity_for_proposals(self, handle: SequenceCache, num_proposed: int) -> int:
        """How many of so many proposed tokens behind the next one, which has been allocated, the pools have room for now."""
        return self._states.capacity(self.capacity(handle, 1 + num_proposed) - 1)

    def allocate_for_proposals(self, handle: SequenceCache, num_proposed: int) -> list[BlockCopy]:
        """`allocate` for the next token and so many proposed ones; until these are settled, the states behind all are held."""
        copies = self.allocate(handle, 1 + num_proposed)
        self._states.allocate_for_proposals(handle, num_proposed)
        return copies

    def checkpoint_states(self, handle: SequenceCache, num_inflight_tokens: int) -> list[BlockCopy]:
        """Copies to do between the tokens under way and those planned behind them, so that a state between them can be found by
        later prompts."""
        return (
            self._states.checkpoint(handle, self.block_size, num_inflight_tokens) if self.enable_prefix_caching else []
        )

    def remove_range(
        self, handle: SequenceCache, first: int, end: int, *, close_gap: bool, num_inflight_tokens: int = 0
    ) -> None:
        """Give up logical blocks first .. end - 1, which are full: see `SequenceCache.remove_range`. Nobody else notices."""
        size = self.block_size
        if not 0 <= first < end or end * size > handle.num_slots or handle.second_keys is not None:
            raise RuntimeError(f"blocks {first} to {end} of a sequence of {handle.num_slots} slots cannot be cut out")
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            if pool.holds_states:  # it keeps what its tokens have left there
                continue
            removed = handle.originals[group].remove(first, end, size) if handle.originals else []
            for block in reversed(table.remove(first, end) + removed):
                pool.release(block)
        handle.remove_range(first * size, end * size, close_gap=close_gap, num_inflight_tokens=num_inflight_tokens)

    def fork(self, parent: SequenceCache, child: SequenceCache) -> None:
        """Let `child`, which holds nothing, hold every block of `parent`; whoever writes first copies."""
        if parent.originals:
            raise RuntimeError("a sequence with re-rotated keys cannot be forked")
        child.copy(parent)
        self._share(child.tables)
        if parent.second_keys is not None and child.second_keys is not None:
            self.fork(parent.second_keys, child.second_keys)

    def free(self, handle: SequenceCache) -> None:
        """Release everything that is held, tail first. Freeing twice does nothing the second time."""
        self._states.end(handle, self._listener)
        for passage in handle.passages:
            for pool, held in zip(self.pools, passage.blocks, strict=True):
                for block in reversed(held):
                    pool.release(block)
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=False)):
            for blocks in (table.blocks, handle.originals[group].blocks if handle.originals else []):
                for i in range(len(blocks) - 1, table.num_dropped - 1, -1):
                    pool.release(blocks[i])
        handle.release()
        if handle.second_keys is not None:
            self.free(handle.second_keys)

    def swap_out(self, handle: SequenceCache) -> tuple[tuple[int, ...], ...]:
        """Release everything, to take it up again with what it holds now; returns the blocks, per group."""
        if handle.originals or handle.second_keys is not None:
            raise RuntimeError("a sequence with re-rotated keys, or keys that stand twice, cannot be parked")
        blocks = tuple(tuple(table.blocks[table.num_dropped :]) for table in handle.tables)
        for pool, held in zip(self.pools, blocks, strict=True):
            for block in reversed(held):
                pool.release(block)
        handle.swap_out()
        return blocks

    def swap_in(self, handle: SequenceCache) -> tuple[tuple[int, ...], ...]:
        """Take as many blocks as `swap_out` gave back; returns them in the same order."""
        handle.swap_in(lambda group: self.pools[group].take(private=True))
        return tuple(tuple(table.blocks[table.num_dropped :]) for table in handle.tables)

    def reset(self, handle: SequenceCache, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Release everything that is held; the handle stands for keys under other specs now, of which none is computed."""
        self.free(handle)
        handle.reset(chain, specs, private=private)

    def _share(self, tables: abc.Iterable[BlockTable]) -> None:
        """Count one more holder of every block in the tables."""
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table.blocks[table.num_dropped :]:
                pool.share(block)

    def commit(self, handle: SequenceCache, token_ids: abc.Sequence[int]) -> None:
        """Offer the blocks that have become full to later prompts.

        Those behind moved keys get digests that no prompt's prefix has: they are found as passages alone.
        """
        if not self.enable_prefix_caching:
            return
        scope, offset = handle.chain.scope, handle.layout.slot_offset
        for index, parent, digest in handle.take_full_blocks(token_ids):
            for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
                block = -1 if pool.holds_states else table.blocks[index]
                if block >= 0 and pool.register(block, digest) and self._listener is not None:
                    self._listener.offer(BlockKey(group, digest), block, index)
            if scope is not None and all(digest in pool.cached for pool in self.pools):
                first = index * self.block_size
                tokens = token_ids[first - offset : first - offset + self.block_size]
                position = handle.layout.stored_position(first)
                self.passages.add(scope, digest, parent, tokens, position)
                if self._listener is not None:
                    record = PassageRecord(parent, position, tuple(tokens), self.passages.scopes_of(digest))
                    self._listener.offer_passage(BlockKey(0, digest), self.pools[0].cached[digest], index, record)

    def _on_evicted(self, group: int, block: int, digest: bytes) -> None:
        """A block is evicted."""
        if self._listener is not None:
            self._listener.withdraw(BlockKey(group, digest), block, passage_of(self.passages, digest))
        self.passages.remove(digest)

    def _drop_outside_window(self, handle: SequenceCache) -> None:
        """Release the blocks of window groups that no query still to come can see."""
        for group in self._window_groups:
            pool, table = self.pools[group], handle.tables[group]
            window = eviction_window(pool, handle)
            if window is None:
                continue
            visible = handle.layout.first_visible_slot(min(handle.num_slots, handle.floor), window) // self.block_size
            first, visible = table.num_dropped, min(visible, len(table.blocks))
            if first >= visible:
                continue
            dropped = handle.originals[group].drop(first, visible) if handle.originals else []
            for block in reversed(table.drop(visible) + dropped):
                pool.release(block)

    # -- integrity -----------------------------------------------------------------------------------------------

    def assert_consistent(self, handles: abc.Iterable[SequenceCache]) -> None:
        """Raise AssertionError unless the reference counts are exactly what the handles say."""
        counts = [[0] * pool.num_blocks for pool in self.pools]
        self.passages.check()
        held = [part for handle in handles for part in (handle, handle.second_keys) if part is not None]
        for handle in held:
            for group in range(len(self.pools)):
                for passage in handle.passages:
                    for block in passage.blocks[group]:
                        counts[group][block] += 1
            for group, table in enumerate(handle.tables):
                for blocks in (table.blocks, handle.originals[group].blocks if handle.originals else []):
                    for i, block in enumerate(blocks):
                        assert (block < 0) == (i < table.num_dropped), "only a leading part may be dropped"
                        if block >= 0:
                            counts[group][block] += 1
        for pool, count in zip(self.pools, counts, strict=True):
            pool.check()
            assert count == pool.ref_counts, "reference counts differ from the block tables"

    def assert_balanced(self) -> None:
        """Raise AssertionError unless nothing is held and no block is lost: what an idle engine looks like."""
        self.assert_consistent(())


MIN_PASSAGE_TOKENS = 32  # of a passage, without its head: fewer are not worth a run

MAX_RUNS = 64  # of one sequence


@dataclass(frozen=True, slots=True)
class ReuseLimits:
    """What a sequence may come to, in tokens.

    start, end: of the prompt, between which it may take passages. longest: prompt and output together. window: slots that
    it may hold, None for no bound.
    """

    start: int
    end: int
    longest: int
    window: int | None = None


def hold_passages(
    blocks: BlockManager,
    handle: SequenceCache,
    token_ids: abc.Sequence[int],
    rule: NonPrefixReuseParams,
    limits: ReuseLimits,
) -> None:
    """Find the passages that `handle`, which holds a prefix at most, will take up, and hold their blocks."""
    scope = handle.chain.scope
    if scope is None or handle.private or not rule.is_enabled:
        return
    found = blocks.passages.search(
        scope,
        token_ids,
        start=max(limits.start, handle.num_computed_tokens),
        end=limits.end,
        at_least=max(rule.at_least, MIN_PASSAGE_TOKENS),
        spans=rule.passages,
    )
    layout, held = handle.layout, list[HeldPassage]()
    for passage in found:
        taken = _skip_recomputed_head(blocks, passage, rule.recompute)
        if taken is None:
            continue
        after = layout.with_passage(taken.first + layout.slot_offset, taken, blocks.block_size)
        if len(after.runs) > MAX_RUNS or not _passages_fit(blocks, after, [*held, taken], limits):
            break
        held.append(taken)
        layout = after
    for taken in held:
        for pool, own in zip(blocks.pools, taken.blocks, strict=True):
            for block in own:
                pool.share(block)
    handle.hold_passages(held)


def attach_passage(blocks: BlockManager, handle: SequenceCache, token_ids: abc.Sequence[int]) -> list[HeldPassage]:
    """The passages, if any, that begin with the next token to compute, now taken up."""
    taken = []
    while handle.passages and handle.passages[0].first == handle.num_computed_tokens:
        blocks.commit(handle, token_ids)
        taken.append(handle.attach_passage(token_ids))
    return taken


def _skip_recomputed_head(blocks: BlockManager, passage: Passage, recompute: float) -> HeldPassage | None:
    """The passage behind the tokens that are computed anew; None if too few are left."""
    length = passage.end - passage.start
    # A share that comes to a whole number of tokens means that number, whatever its product in floating point.
    head = math.ceil((recompute if recompute >= 1 else recompute * length) - 1e-6)
    if length - head < MIN_PASSAGE_TOKENS:
        return None
    skipped, offset = divmod(passage.offset + head, blocks.block_size)
    digests = passage.digests[skipped:]
    own = tuple(tuple(pool.cached[digest] for digest in digests) for pool in blocks.pools)
    return HeldPassage(passage.start + head, passage.end, head, own, digests, offset, passage.position + head)


def _passages_fit(blocks: BlockManager, layout: SlotLayout, held: list[HeldPassage], limits: ReuseLimits) -> bool:
    """Whether a sequence of this layout, alone in the cache, has room up to its longest."""
    slots, size = limits.longest + layout.slot_offset, blocks.block_size
    if limits.window is not None:
        if limits.end + 1 + layout.slot_offset > limits.window:
            return False
        slots = min(slots, limits.window)
    for group, pool in enumerate(blocks.pools):
        need = -(-slots // size)
        if pool.window is not None:
            # Passages are held whole until they are taken up, and each may leave two blocks of a window half empty.
            in_sight = (pool.window + size - 2) // size + 2 + 2 * len(held)
            need = min(need, in_sight + sum(len(passage.blocks[group]) for passage in held))
        if need > pool.num_blocks:
            return False
    return True
