"""Recurrent state blocks: one block per sequence, independent of its length and modified by every token.

Cached states are copies. At the end of a full block of tokens the state block is offered to later prompts under that block's digest and is copied before the next token modifies it. With proposed tokens, a sequence holds one extra block per token until verification. With async scheduling, the copy is made between the two steps. Of the states left while tokens are sampled only the last is retained; of those of a prompt the last, and one every 1024 tokens.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.block_pool import BlockListener, BlockPool
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.cache.sequence_cache import BlockTable, LatestState, SequenceCache

_STRIDE = 1024  # tokens


class RecurrentStateManager:
    """groups: those of `pools` that hold states."""

    def __init__(self, pools: abc.Sequence[BlockPool], groups: abc.Sequence[int]) -> None:
        self._pools, self.groups = pools, groups

    def num_missing(self, handle: SequenceCache, group: int) -> int:
        """Blocks that a handle takes of a group before it computes another token."""
        pool, blocks = self._pools[group], handle.tables[group].blocks if handle.tables else []
        return int(holds_blocks_of(pool, handle) and (not blocks or pool.needs_copy(blocks, 0)))

    def make_writable(self, handle: SequenceCache) -> list[BlockCopy]:
        """Let the handle have a block that nobody else holds or may match; returns the copies to do first."""
        copies = []
        for group in self.groups:
            pool, table = self._pools[group], handle.tables[group]
            if not holds_blocks_of(pool, handle):
                continue
            if not table.blocks:
                table.append(pool.take(handle.private))
            elif pool.needs_copy(table.blocks, 0):
                source = table.blocks[0]
                target = pool.take(handle.private)  # while the source is held, so that it is another
                table.replace(0, target)
                pool.release(source)
                copies.append(BlockCopy(group, source, target))
        return copies

    def capacity(self, num_proposed: int) -> int:
        """For how many of so many proposed tokens there is a block now, where no other is missing."""
        return min([num_proposed, *(self._pools[group].num_available for group in self.groups)])

    def allocate_for_proposals(self, handle: SequenceCache, num_proposed: int) -> None:
        """Take a block for the state behind each token of a step but the last, where so many of them are proposed."""
        for group in self.groups:
            if holds_blocks_of(self._pools[group], handle):
                for _ in range(num_proposed):
                    handle.tables[group].append(self._pools[group].take(handle.private))

    def checkpoint(self, handle: SequenceCache, block_size: int, num_inflight_tokens: int) -> list[BlockCopy]:
        """Copy the state behind the tokens under way, before those to come change it, where it may be worth keeping.

        Returns the copies, which are done in between. Where no block is left it is not kept.
        """
        if (handle.num_slots + num_inflight_tokens) % block_size or not self._offers(handle):
            return []
        if any(self._pools[group].num_available < 1 for group in self.groups):
            return []
        copies = []
        for group in self.groups:
            table = handle.tables[group]
            table.append(self._pools[group].take(handle.private))
            copies.append(BlockCopy(group, *table.blocks))
        return copies

    def mark_computed(self, handle: SequenceCache, advanced: int, num_inflight_tokens: int) -> None:
        """Give up all blocks but one: that with the state behind the first `advanced` tokens of a step, of which some may have
        been proposed, or that which the tokens under way change."""
        for group in self.groups:
            pool, table = self._pools[group], handle.tables[group]
            if len(table.blocks) < 2:
                continue
            held, chosen = list(table.blocks), table.blocks[0] if num_inflight_tokens else _block_after(table, advanced)
            table.replace(0, chosen)
            while len(table.blocks) > 1:
                table.pop()
            for block in reversed(held):
                if block != chosen:
                    pool.release(block)

    def cache_latest(
        self,
        handle: SequenceCache,
        block_size: int,
        listener: BlockListener | None,
        advanced: int,
        num_inflight_tokens: int,
    ) -> None:
        """Offer the state behind the last block of tokens, where a handle has it; all of its tokens are settled.

        advanced: tokens of the step, behind the last of which it stands, or behind any where some were proposed. num_inflight_tokens: those
        that change its own block meanwhile. Of a prompt's states the last stays and one in every `_STRIDE` tokens, of those of
        its answer the last; the others are the first to be evicted, and the keeper is not told of them.
        """
        if not self._offers(handle):
            return
        index, since = handle.num_slots // block_size - 1, handle.num_slots % block_size
        has_several = len(handle.tables[self.groups[0]].blocks) > 1
        if index < 0 or since >= (advanced if has_several else 1) or (num_inflight_tokens and not has_several):
            return
        slots, decoding = handle.num_slots - since, has_several or advanced < block_size
        digest, passing = handle.chain.digests[index], handle.latest_state
        for group in self.groups:
            self._pools[group].register(_block_after(handle.tables[group], advanced - since), digest)
            if (
                passing is not None
                and passing.while_decoding == decoding
                and passing.digest in self._pools[group].cached
            ):
                self._pools[group].evict_first(self._pools[group].cached[passing.digest])
        if passing is not None and passing.while_decoding != decoding:
            self._notify_listener(passing, listener)
        handle.latest_state = LatestState(index, digest, decoding)
        if not decoding and slots // _STRIDE > (slots - advanced) // _STRIDE:
            self.end(handle, listener)

    def _offers(self, handle: SequenceCache) -> bool:
        """Whether later prompts may find states of a handle."""
        return bool(self.groups) and not handle.private and not handle.is_second_keys

    def end(self, handle: SequenceCache, listener: BlockListener | None) -> None:
        """The last state that a handle left in the cache stays, whatever comes of the handle."""
        if handle.latest_state is not None:
            self._notify_listener(handle.latest_state, listener)
            handle.latest_state = None

    def _notify_listener(self, state: LatestState, listener: BlockListener | None) -> None:
        for group in self.groups:
            block = self._pools[group].cached.get(state.digest)
            if listener is not None and block is not None:
                listener.offer(BlockKey(group, state.digest), block, state.index)


def _block_after(table: BlockTable, count: int) -> int:
    """Of a handle that has several, the block with the state behind the first `count` tokens of the step."""
    return table.blocks[count] if count < len(table.blocks) else table.blocks[0]


def holds_blocks_of(pool: BlockPool, handle: SequenceCache) -> bool:
    """Whether a handle holds blocks of a pool: what holds keys as they seem from far away has no states of its own."""
    return not (pool.holds_states and handle.is_second_keys)


def eviction_window(pool: BlockPool, handle: SequenceCache) -> int | None:
    """By which window a handle gives blocks of a pool up; None where all stay until they are cut out."""
    return pool.window if pool.holds_states else handle.window_in(pool.window)
