"""Who holds which KV block: reference counts, block tables, the free list and the eviction of cached blocks.

Responsible for the books only: it never touches a tensor. A block is in one of three states: held (reference count
above 0), cached (count 0, its digest known, so a later prompt may take it up again) or free.

Eviction: a block is taken from the free list first, and only when that is empty is the cached block evicted that has
been idle longest. Tables are released tail first, so of one idle prompt the tail goes before the head: a head without
its tail is still a usable prefix, a tail without its head is none.

Order of ids: a fresh pool hands out ascending ids, and blocks released together come back in table order, because
neighbouring blocks are cheaper to read.
"""

from __future__ import annotations

from collections import OrderedDict, abc, deque

from windlass.engine.cache.changes import BlockCopy
from windlass.engine.cache.handle import BlockTable, CacheHandle
from windlass.engine.cache.layout import KVGroupLayout
from windlass.engine.cache.prefix import HashChain, first_visible_block, longest_hit
from windlass.engine.cache.runs import OPEN_END
from windlass.engine.rotary.scaling import RotarySpec


class BlockPool:
    """The blocks of one KV group. `cached` maps the digest of every hashed block, held or idle, to its id."""

    __slots__ = (
        "_free",
        "_idle",
        "cached",
        "digests",
        "num_blocks",
        "private",
        "ref_counts",
        "rotary_groups",
        "window",
    )

    def __init__(self, layout: KVGroupLayout) -> None:
        self.num_blocks = layout.num_blocks
        self.window = layout.window
        self.rotary_groups = layout.rotary_groups
        self.ref_counts = [0] * layout.num_blocks
        self.digests: list[bytes | None] = [None] * layout.num_blocks
        self.private = bytearray(layout.num_blocks)
        self.cached: dict[bytes, int] = {}
        self._free = deque(range(layout.num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks nobody holds, longest idle first

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

    def register(self, block: int, digest: bytes) -> None:
        """Offer a full block to later prompts, unless another block has this digest already or this one is private."""
        if self.private[block] or self.digests[block] is not None or digest in self.cached:
            return
        self.digests[block] = digest
        self.cached[digest] = block

    def is_writable(self, block: int) -> bool:
        """Whether one holder may write here: nobody else holds it and nobody may match it."""
        return self.ref_counts[block] == 1 and self.digests[block] is None

    def needs_copy(self, blocks: list[int], index: int) -> bool:
        """Whether entry `index` of a block table, if there is one, is a block that its holder may not write to."""
        return index < len(blocks) and not self.is_writable(blocks[index])

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the digests agree with the map."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not free & idle, "a block is both free and cached"
        held = {block for block, count in enumerate(self.ref_counts) if count > 0}
        assert min(self.ref_counts, default=0) >= 0, "a reference count is negative"
        assert not held & (free | idle), "a held block is free or idle"
        assert len(held) + len(free) + len(idle) == self.num_blocks, "a block is lost"
        assert all(self.digests[block] is None for block in free), "a free block has a digest"
        assert all(self.digests[block] is not None for block in idle), "an idle block has no digest"
        known = {digest: block for block, digest in enumerate(self.digests) if digest is not None}
        assert known == self.cached, "digests and the map of cached blocks differ"
        assert not any(self.private[block] for block in self.cached.values()), "a private block is cached"


class BlockManager:
    """Block tables of all sequences over the pools of all KV groups.

    groups: one layout per KV group. block_size: tokens per block. With `enable_prefix_caching` off nothing is hashed,
    so nothing is matched. Methods that take blocks never evict a held block and never raise for want of blocks if
    `capacity` was asked first.
    """

    def __init__(
        self, groups: abc.Sequence[KVGroupLayout], block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        if not groups or block_size < 1 or any(g.num_blocks < 1 for g in groups):
            raise ValueError("a block manager needs at least one group, one block in each, and a positive block size")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [BlockPool(layout) for layout in groups]
        self._window_groups = [group for group, pool in enumerate(self.pools) if pool.window is not None]

    # -- sizes ---------------------------------------------------------------------------------------------------

    def min_blocks(self, num_slots: int, *, shifts: bool = False) -> list[int]:
        """Per group the blocks a lone sequence must be able to hold at once to take `num_slots` slots.

        A window of w tokens spans at most (w + block_size - 2) // block_size + 1 blocks wherever it lies. shifts: whether
        tokens are dropped, which brings others nearer by a block.
        """
        total = -(-num_slots // self.block_size)
        return [
            total if p.window is None else min(total, (p.window + self.block_size - 2) // self.block_size + 1 + shifts)
            for p in self.pools
        ]

    def blocks_to_come(self, handle: CacheHandle, num_slots: int, chunk: int, *, rerotates: bool) -> list[int]:
        """Per group the blocks that are still taken until `num_slots` slots are, in chunks of up to `chunk` tokens.

        rerotates: whether keys are re-rotated on the way, so that they stand there twice.
        """
        total = -(-num_slots // self.block_size)
        need = []
        for group, pool in enumerate(self.pools):
            blocks = handle.tables[group].blocks if handle.tables else []
            held = len(blocks)
            copy = bool(blocks) and pool.needs_copy(blocks, handle.num_slots // self.block_size)
            count = total - held + copy
            if pool.window is not None:
                # A window gives back what it leaves behind, so the most it holds at once is window + chunk.
                held -= handle.tables[group].num_dropped if handle.tables else 0
                most = (pool.window + chunk + self.block_size - 2) // self.block_size + 1 + (handle.floor < OPEN_END)
                count = min(count, most - held)
            if rerotates:
                count += total - (len(handle.originals[group].blocks) if handle.originals else 0)
            need.append(max(0, count))
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

    def match(self, handle: CacheHandle, token_ids: abc.Sequence[int], num_shareable: int) -> tuple[int, bool]:
        """Leading blocks that a sequence can take from the cache, and whether all of its tokens were there.

        num_shareable: leading tokens that are computed under the handle's specs. At least one token is left to compute,
        since only a forward pass gives logits: after a full hit the last block is computed again, into a block of its
        own. Changes nothing but the handle's hash chain.
        """
        if not self.enable_prefix_caching or handle.private:
            return 0, False
        size, digests = self.block_size, handle.chain.digests
        handle.chain.extend(token_ids, num_shareable)
        groups = [(pool.cached, pool.window) for pool in self.pools]
        hit = longest_hit(digests, num_shareable // size, groups, size)
        if hit * size < len(token_ids):
            return hit, False
        return longest_hit(digests, hit - 1, groups, size), True

    def attach(self, handle: CacheHandle, num_blocks: int) -> None:
        """Start the tables of a handle that holds nothing with the first `num_blocks` blocks from the cache.

        `num_blocks` is what `match` returned, with nothing taken in between.
        """
        num_tokens = num_blocks * self.block_size
        tables = []
        for pool in self.pools:
            low = first_visible_block(num_tokens, pool.window, self.block_size)
            blocks = [pool.cached[digest] for digest in handle.chain.digests[low:num_blocks]]
            tables.append(BlockTable([-1] * low + blocks, low))
        handle.hold(tables, num_tokens, num_blocks)
        self._share(tables)

    def settle(self, handle: CacheHandle, token_ids: abc.Sequence[int], num_computed_tokens: int) -> None:
        """Book that the keys of the first `num_computed_tokens` tokens are written and final.

        Blocks that have become full are offered to the prefix cache. Those that no query still to come can see are
        released, and so is room for proposed tokens that were rejected.
        """
        handle.set_computed(num_computed_tokens)
        full = num_computed_tokens // self.block_size
        if full > handle.num_committed_blocks and self.enable_prefix_caching and not handle.private:
            self._commit(handle, token_ids, full)
        if self._window_groups:
            self._drop_outside_window(handle)
        needed = -(-handle.num_slots // self.block_size)
        for pool, table in zip(self.pools, handle.tables, strict=True):
            while len(table.blocks) > needed:
                pool.release(table.pop())

    # -- tables --------------------------------------------------------------------------------------------------

    def capacity(self, handle: CacheHandle, num_tokens: int, reserved: abc.Sequence[int] | None = None) -> int:
        """How many of the next `num_tokens` tokens the pools have room for now.

        reserved: per group the blocks that are taken for something else first.
        """
        start, size = handle.num_slots, self.block_size
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            held = len(table.blocks)
            copy = pool.needs_copy(table.blocks, start // size)
            extra = reserved[group] if reserved else 0
            if not copy and not extra and start + num_tokens <= held * size:
                continue
            spare = pool.num_available - copy - extra
            if spare < 0:
                return 0
            num_tokens = min(num_tokens, (held + spare) * size - start)
        return num_tokens

    def allocate(self, handle: CacheHandle, num_tokens: int) -> list[BlockCopy]:
        """Make the slots of the next `num_tokens` tokens writable; `num_tokens` is at most `capacity`.

        Returns the copies to do, in order, before the forward pass: a last block that others hold or may match is
        replaced by a copy of its own (copy on write). Targets of the copies of one step are distinct, and no source
        is the target of an earlier copy, so copying all at once is right as well.
        """
        start, size = handle.num_slots, self.block_size
        index, end = start // size, -(-(start + num_tokens) // size)
        needs = []  # (group, its pool and table, whether the block at `index` is to be copied)
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            copy = pool.needs_copy(table.blocks, index)
            missing = end - len(table.blocks)
            if missing > 0 or copy:
                if max(0, missing) + copy > pool.num_available:
                    raise RuntimeError(f"no room for {num_tokens} tokens: `capacity` was not asked")
                needs.append((group, pool, table, copy))
        copies = []
        for group, pool, table, copy in needs:
            if copy:
                source = table.blocks[index]
                target = pool.take(private=handle.private or bool(pool.private[source]))
                table.replace(index, target)
                pool.release(source)
                copies.append(BlockCopy(group, source, target))
            for _ in range(len(table.blocks), end):
                table.append(pool.take(handle.private))
        return copies

    def cut_out(self, handle: CacheHandle, first: int, end: int, *, closing: bool) -> None:
        """Give up logical blocks first .. end - 1, which are full: see `CacheHandle.cut_out`. Nobody else notices."""
        size = self.block_size
        if not 0 <= first < end or end * size > handle.num_slots:
            raise RuntimeError(f"blocks {first} to {end} of a sequence of {handle.num_slots} slots cannot be cut out")
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=True)):
            removed = handle.originals[group].remove(first, end, size) if handle.originals else []
            for block in reversed(table.remove(first, end) + removed):
                pool.release(block)
        handle.cut_out(first * size, end * size, closing=closing)

    def fork(self, parent: CacheHandle, child: CacheHandle) -> None:
        """Let `child`, which holds nothing, hold every block of `parent`; whoever writes first copies."""
        if parent.originals:
            raise RuntimeError("a sequence with re-rotated keys cannot be forked")
        child.copy(parent)
        self._share(child.tables)

    def free(self, handle: CacheHandle) -> None:
        """Release everything that is held, tail first. Freeing twice does nothing the second time."""
        for group, (pool, table) in enumerate(zip(self.pools, handle.tables, strict=False)):
            for blocks in (table.blocks, handle.originals[group].blocks if handle.originals else []):
                for i in range(len(blocks) - 1, table.num_dropped - 1, -1):
                    pool.release(blocks[i])
        handle.release()

    def park(self, handle: CacheHandle) -> tuple[tuple[int, ...], ...]:
        """Release everything, to take it up again with what it holds now; returns the blocks, per group."""
        if handle.originals:
            raise RuntimeError("a sequence with re-rotated keys cannot be parked")
        blocks = tuple(tuple(table.blocks[table.num_dropped :]) for table in handle.tables)
        for pool, held in zip(self.pools, blocks, strict=True):
            for block in reversed(held):
                pool.release(block)
        handle.park()
        return blocks

    def unpark(self, handle: CacheHandle) -> tuple[tuple[int, ...], ...]:
        """Take as many blocks as `park` gave back; returns them in the same order."""
        handle.unpark(lambda group: self.pools[group].take(private=True))
        return tuple(tuple(table.blocks[table.num_dropped :]) for table in handle.tables)

    def start_over(
        self, handle: CacheHandle, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool
    ) -> None:
        """Release everything that is held; the handle stands for keys under other specs now, of which none is computed."""
        self.free(handle)
        handle.start_over(chain, specs, private=private)

    def _share(self, tables: abc.Iterable[BlockTable]) -> None:
        """Count one more holder of every block in the tables."""
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table.blocks[table.num_dropped :]:
                pool.share(block)

    def _commit(self, handle: CacheHandle, token_ids: abc.Sequence[int], full: int) -> None:
        """Offer the blocks that have become full, the first `full` ones, to the prefix cache."""
        first = handle.num_committed_blocks
        handle.chain.extend(token_ids, full * self.block_size)
        for pool, table in zip(self.pools, handle.tables, strict=True):
            for i in range(first, full):
                if table.blocks[i] >= 0:
                    pool.register(table.blocks[i], handle.chain.digests[i])
        handle.set_committed(full)

    def _drop_outside_window(self, handle: CacheHandle) -> None:
        """Release the blocks of window groups that no query still to come can see."""
        for group in self._window_groups:
            pool, table = self.pools[group], handle.tables[group]
            assert pool.window is not None
            visible = handle.layout.first_seen(min(handle.num_slots, handle.floor), pool.window) // self.block_size
            first, visible = table.num_dropped, min(visible, len(table.blocks))
            if first >= visible:
                continue
            dropped = handle.originals[group].drop(first, visible) if handle.originals else []
            for block in reversed(table.drop(visible) + dropped):
                pool.release(block)

    # -- integrity -----------------------------------------------------------------------------------------------

    def assert_consistent(self, handles: abc.Iterable[CacheHandle]) -> None:
        """Raise AssertionError unless the reference counts are exactly what the handles say."""
        counts = [[0] * pool.num_blocks for pool in self.pools]
        for handle in handles:
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
