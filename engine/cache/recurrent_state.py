"""Recurrent state blocks: one block per sequence, independent of its length and modified by every token.

Cached states are copies. At the end of a full block of tokens the state block is offered to later prompts under that
block's digest, and it is copied before the next token modifies it. With proposed tokens, a sequence holds one extra block
per token until verification. With async scheduling, the copy is made between the two steps. Of the states cached while
tokens are sampled only the last is retained; of those of a prompt the last, and one every `_STRIDE` tokens.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.block_pool import BlockListener, BlockPool
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.cache.sequence_cache import BlockTable, LatestState, SequenceCache

_STRIDE = 1024  # tokens


class RecurrentStateManager:
    """State blocks of all sequences. block_size: tokens per block of keys."""

    def __init__(self, pools: abc.Sequence[BlockPool], block_size: int, listener: BlockListener | None) -> None:
        self._pools, self._block_size, self._listener = pools, block_size, listener
        self.groups = [group for group, pool in enumerate(pools) if pool.holds_states]

    def num_missing(self, cache: SequenceCache, group: int) -> int:
        """Blocks that a sequence must take from a group before it computes another token."""
        blocks = cache.tables[group].blocks if cache.tables else []
        return int(not cache.is_second_keys and (not blocks or self._pools[group].needs_copy(blocks, 0)))

    def make_writable(self, cache: SequenceCache) -> list[BlockCopy]:
        """Give the sequence a block that is not shared and cannot be matched; returns the copies to apply first."""
        copies: list[BlockCopy] = []
        if cache.is_second_keys:
            return copies
        for group in self.groups:
            pool, table = self._pools[group], cache.tables[group]
            if not table.blocks:
                table.append(pool.take(cache.private))
            elif pool.needs_copy(table.blocks, 0):
                source = table.blocks[0]
                target = pool.take(cache.private)  # before the source is released, so that the two differ
                table.replace(0, target)
                pool.release(source)
                copies.append(BlockCopy(group, source, target))
        return copies

    def capacity(self, num_proposed: int) -> int:
        """How many of the proposed tokens can get a block now, if no other block is missing."""
        return min([num_proposed, *(self._pools[group].num_available for group in self.groups)])

    def allocate_for_proposals(self, cache: SequenceCache, num_proposed: int) -> None:
        """Take a block for the state after each token of a step except the last; `num_proposed` of them are proposed."""
        for group in self.groups:
            for _ in range(num_proposed):
                cache.tables[group].append(self._pools[group].take(cache.private))

    def checkpoint(self, cache: SequenceCache, num_inflight_tokens: int) -> list[BlockCopy]:
        """Copy the state after the in-flight tokens before later tokens modify it, if a block of tokens ends there.

        Returns the copies to apply between the two steps; none if no block is available.
        """
        if (cache.num_slots + num_inflight_tokens) % self._block_size or not self._offers(cache):
            return []
        if any(self._pools[group].num_available < 1 for group in self.groups):
            return []
        copies = []
        for group in self.groups:
            table = cache.tables[group]
            table.append(self._pools[group].take(cache.private))
            copies.append(BlockCopy(group, *table.blocks))
        return copies

    def mark_computed(self, cache: SequenceCache, advanced: int, num_inflight_tokens: int) -> None:
        """Release all blocks except one: with in-flight tokens the block that they modify, else the block with the state
        after the first `advanced` tokens of the step."""
        for group in self.groups:
            pool, table = self._pools[group], cache.tables[group]
            if len(table.blocks) < 2:
                continue
            held, chosen = list(table.blocks), table.blocks[0] if num_inflight_tokens else _block_after(table, advanced)
            table.replace(0, chosen)
            while len(table.blocks) > 1:
                table.pop()
            pool.release_all([block for block in held if block != chosen])

    def cache_latest(self, cache: SequenceCache, advanced: int, num_inflight_tokens: int) -> None:
        """Offer the state at the end of the last full block of tokens to later prompts, if the sequence holds it.

        advanced: accepted tokens of the step. num_inflight_tokens: tokens that modify the sequence's first block meanwhile.
        Superseded states are evicted first and the listener is not notified of them.
        """
        if not self._offers(cache):
            return
        index, since = cache.num_slots // self._block_size - 1, cache.num_slots % self._block_size
        has_several = len(cache.tables[self.groups[0]].blocks) > 1
        if index < 0 or since >= (advanced if has_several else 1) or (num_inflight_tokens and not has_several):
            return
        slots, decoding = cache.num_slots - since, has_several or advanced < self._block_size
        digest, previous = cache.chain.digests[index], cache.latest_state
        is_superseded = previous is not None and previous.while_decoding == decoding
        for group in self.groups:
            pool = self._pools[group]
            pool.register(_block_after(cache.tables[group], advanced - since), digest)
            if previous is not None and is_superseded and previous.digest in pool.cached:
                pool.evict_first(pool.cached[previous.digest])
        if previous is not None and not is_superseded:
            self._notify_listener(previous)
        cache.latest_state = LatestState(index, digest, decoding)
        if not decoding and slots // _STRIDE > (slots - advanced) // _STRIDE:
            self.flush_latest(cache)

    def _offers(self, cache: SequenceCache) -> bool:
        """Whether later prompts may find states of a sequence."""
        return bool(self.groups) and not cache.private and not cache.is_second_keys

    def flush_latest(self, cache: SequenceCache) -> None:
        """Retain the sequence's latest cached state: it is not superseded by a later one, and the listener is notified."""
        if cache.latest_state is not None:
            self._notify_listener(cache.latest_state)
            cache.latest_state = None

    def _notify_listener(self, state: LatestState) -> None:
        for group in self.groups:
            block = self._pools[group].cached.get(state.digest)
            if self._listener is not None and block is not None:
                self._listener.offer(BlockKey(group, state.digest), block, state.index)


def _block_after(table: BlockTable, count: int) -> int:
    """The block with the state after the first `count` tokens of the step; the first block if none is held for them."""
    return table.blocks[count] if count < len(table.blocks) else table.blocks[0]


def holds_blocks_of(pool: BlockPool, cache: SequenceCache) -> bool:
    """Whether a sequence holds blocks of a pool: a second key copy has no states."""
    return not (pool.holds_states and cache.is_second_keys)


def eviction_window(pool: BlockPool, cache: SequenceCache) -> int | None:
    """The window outside which a sequence releases blocks of a pool; None: none are released before they are removed.

    Attention sinks stay visible in a window wider than `sinks_window`, as their positions are nearer than their slots.
    """
    is_kept = pool.window is not None and pool.window > cache.sinks_window and not pool.holds_states
    return None if is_kept else pool.window
