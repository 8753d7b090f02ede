"""The books of states: blocks of which a sequence has one, whatever its length, and changes it with every token.

What is cached of a prompt's states are copies: where a sequence stands at the end of a block of tokens, its block of states is
offered to later prompts under the digest of that block, and from then on belongs to nobody alone; so the next token copies it
first. Of the states that a stream leaves behind while it draws, only the last is worth its memory; of those of a prompt the last,
and some at long intervals for prompts that go another way.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.changes import BlockCopy
from windlass.engine.cache.handle import CacheHandle, PassingState
from windlass.engine.cache.persist.keys import BlockKeeper, BlockKey
from windlass.engine.cache.pool import BlockPool

_STRIDE = 1024  # tokens


class StateBlocks:
    """groups: those of `pools` that hold states."""

    def __init__(self, pools: abc.Sequence[BlockPool], groups: abc.Sequence[int]) -> None:
        self._pools, self.groups = pools, groups

    def missing(self, handle: CacheHandle, group: int) -> int:
        """Blocks that a handle takes of a group before it computes another token."""
        pool, blocks = self._pools[group], handle.tables[group].blocks if handle.tables else []
        return int(has_part(pool, handle) and (not blocks or pool.needs_copy(blocks, 0)))

    def make_writable(self, handle: CacheHandle) -> list[BlockCopy]:
        """Let the handle have a block that nobody else holds or may match; returns the copies to do first."""
        copies = []
        for group in self.groups:
            pool, table = self._pools[group], handle.tables[group]
            if not has_part(pool, handle):
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

    def keep(self, handle: CacheHandle, block_size: int, keeper: BlockKeeper | None, advanced: int) -> None:
        """Offer the state of a handle that stands at the end of a block of tokens, all of which are settled.

        advanced: tokens that brought it there. Of a prompt's states the last stays and one in every `_STRIDE` tokens, of those of
        its answer the last; the others are the first to be evicted, and the keeper is not told of them.
        """
        slots = handle.num_slots
        if not self.groups or not slots or slots % block_size or handle.private or handle.is_far:
            return
        index, drew = slots // block_size - 1, advanced < block_size
        digest, passing = handle.chain.digests[index], handle.passing_state
        for group in self.groups:
            self._pools[group].register(handle.tables[group].blocks[0], digest)
            if passing is not None and passing.drawn == drew and passing.digest in self._pools[group].cached:
                self._pools[group].evict_first(self._pools[group].cached[passing.digest])
        if passing is not None and passing.drawn != drew:
            self._tell(passing, keeper)
        handle.passing_state = PassingState(index, digest, drew)
        if not drew and slots // _STRIDE > (slots - advanced) // _STRIDE:
            self.end(handle, keeper)

    def end(self, handle: CacheHandle, keeper: BlockKeeper | None) -> None:
        """The last state that a handle left in the cache stays, whatever comes of the handle."""
        if handle.passing_state is not None:
            self._tell(handle.passing_state, keeper)
            handle.passing_state = None

    def _tell(self, state: PassingState, keeper: BlockKeeper | None) -> None:
        for group in self.groups:
            block = self._pools[group].cached.get(state.digest)
            if keeper is not None and block is not None:
                keeper.offer(BlockKey(group, state.digest), block, state.index)


def has_part(pool: BlockPool, handle: CacheHandle) -> bool:
    """Whether a handle holds blocks of a pool: what holds keys as they seem from far away has no states of its own."""
    return not (pool.holds_states and handle.is_far)


def window_of(pool: BlockPool, handle: CacheHandle) -> int | None:
    """By which window a handle gives blocks of a pool up; None where all stay until they are cut out."""
    return pool.window if pool.holds_states else handle.window_in(pool.window)
