"""The books of states: blocks of which a sequence has one, whatever its length, and changes it with every token.

What is cached of a prompt's states are copies: where a sequence stands at the end of a block of tokens, its block of states is
offered to later prompts under the digest of that block, and from then on belongs to nobody alone; so the next token copies it
first. Of the states that a stream leaves behind while it draws, only the last is worth its memory.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.changes import BlockCopy
from windlass.engine.cache.handle import CacheHandle
from windlass.engine.cache.persist.keys import BlockKeeper, BlockKey
from windlass.engine.cache.pool import BlockPool

_STRIDE = 1024  # tokens


class StateBlocks:
    """groups: those of `pools` that hold states."""

    def __init__(self, pools: abc.Sequence[BlockPool], groups: abc.Sequence[int]) -> None:
        self._pools, self.groups = pools, groups

    def missing(self, pool: BlockPool, blocks: list[int]) -> int:
        """Blocks that a sequence which holds `blocks` takes before it computes another token."""
        return int(not blocks or pool.needs_copy(blocks, 0))

    def make_writable(self, handle: CacheHandle) -> list[BlockCopy]:
        """Let the handle have a block that nobody else holds or may match; returns the copies to do first."""
        copies = []
        for group in self.groups:
            pool, table = self._pools[group], handle.tables[group]
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
        its answer the last; the others are the first to be evicted.
        """
        slots = handle.num_slots
        if not self.groups or not slots or slots % block_size or handle.private:
            return
        count, drew = slots // block_size, advanced < block_size
        digest, passing = handle.chain.digests[count - 1], handle.passing_state
        for group in self.groups:
            pool, block = self._pools[group], handle.tables[group].blocks[0]
            if pool.register(block, digest) and keeper is not None:
                keeper.offer(BlockKey(group, digest), block, count - 1)
            if passing is not None and passing[1] == drew and passing[0] in pool.cached:
                pool.evict_first(pool.cached[passing[0]])
        stays = not drew and slots // _STRIDE > (slots - advanced) // _STRIDE
        handle.passing_state = None if stays else (digest, drew)


def window_of(pool: BlockPool, handle: CacheHandle) -> int | None:
    """By which window a handle gives blocks of a pool up; None where all stay until they are cut out."""
    return pool.window if pool.holds_states else handle.window_in(pool.window)
