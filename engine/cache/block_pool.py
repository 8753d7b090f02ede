"""Block pool of one KV group: reference counts, the free list and eviction of cached blocks.

A block is held (reference count above 0), idle (count 0, digest known) or free. Free blocks are taken first, then the
cached block that has been idle longest. A new pool hands out ascending ids. Touches no tensor.
"""

from __future__ import annotations

from collections import OrderedDict, abc, deque
from typing import Protocol

from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey


class BlockPool:
    """The blocks of one KV group. `cached` maps the digest of every hashed block, held or idle, to its id.

    on_evicted: called with every evicted block and the digest that it had.
    """

    def __init__(self, layout: KVGroupLayout, on_evicted: abc.Callable[[int, bytes], None]) -> None:
        self.on_evicted = on_evicted
        self.num_blocks = layout.num_blocks
        self.window = layout.window
        self.rotary_groups = layout.rotary_groups
        self.holds_states = layout.holds_states
        self.ref_counts = [0] * layout.num_blocks
        self.digests: list[bytes | None] = [None] * layout.num_blocks
        self.private = bytearray(layout.num_blocks)
        self.cached: dict[bytes, int] = {}
        self._free = deque(range(layout.num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks without a holder, longest idle first

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones and idle cached ones."""
        return len(self._free) + len(self._idle)

    def take(self, private: bool = False) -> int:
        """A block with reference count 1 and no digest. The caller has checked `num_available`."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self.digests[block]
            assert digest is not None
            del self.cached[digest]
            self.digests[block] = None
            self.on_evicted(block, digest)
        self.ref_counts[block] = 1
        self.private[block] = private
        return block

    def share(self, block: int) -> None:
        """Count one more holder; an idle cached block becomes held."""
        if self.ref_counts[block] == 0:
            del self._idle[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less; the last one leaves the block cached if it is hashed, else free."""
        if self.ref_counts[block] <= 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self.digests[block] is not None:
                self._idle[block] = None
            else:
                self.private[block] = False
                self._free.appendleft(block)

    def release_all(self, blocks: abc.Sequence[int]) -> None:
        """Release the blocks of a part of a table, the last one first."""
        for block in reversed(blocks):
            self.release(block)

    def register(self, block: int, digest: bytes) -> bool:
        """Offer a full block to later prompts, unless another block has this digest already or this one is private.

        Returns whether the block was registered.
        """
        if self.private[block] or self.digests[block] is not None or digest in self.cached:
            return False
        self.digests[block] = digest
        self.cached[digest] = block
        return True

    def evict_first(self, block: int) -> None:
        """Evict this block before all others if it is idle; any other block is left as it is."""
        if block in self._idle:
            self._idle.move_to_end(block, last=False)

    def touch(self, digest: bytes) -> None:
        """Evict the block of this digest last if it is idle; any other block is left as it is."""
        block = self.cached.get(digest)
        if block is not None and block in self._idle:
            self._idle.move_to_end(block)

    def is_writable(self, block: int) -> bool:
        """Whether the holder of a block may write to it: it has no other holder and no later prompt can match it."""
        return self.ref_counts[block] == 1 and self.digests[block] is None

    def needs_copy(self, blocks: list[int], index: int) -> bool:
        """Whether entry `index` of a block table exists and is a block that its holder may not write to."""
        return index < len(blocks) and not self.is_writable(blocks[index])


class BlockListener(Protocol):
    """Notified of blocks that become full and of blocks that are evicted."""

    def offer(self, key: BlockKey, block: int, index: int, passage: PassageRecord | None = None) -> None:
        """A block has become full, or can be found as a passage, which is offered for the first KV group.

        index: number of blocks before it in its sequence.
        """

    def withdraw(self, key: BlockKey, block: int, passage: PassageRecord | None) -> None:
        """A block is evicted and may be overwritten from now on. passage: as which it could be found."""
