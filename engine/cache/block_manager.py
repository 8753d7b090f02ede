"""Block manager: block tables of all sequences over the block pools of all KV groups.

Allocates, shares, copies on write and frees blocks, and attaches cached prefixes and passages. Touches no tensor.
Tables are released tail first, so the tail of an idle prompt is evicted before its head: a head without its tail is
still a usable prefix. Blocks released together are reused in table order, since neighbouring blocks are cheaper to read.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import replace
from functools import partial

from windlass.engine.cache.block_pool import BlockListener, BlockPool
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.kv_cache_spec import MAX_STATE_BLOCKS, KVGroupLayout
from windlass.engine.cache.non_prefix_reuse import Passage, PassageIndex, PassageSearch
from windlass.engine.cache.prefix_cache import BlockKey, HashChain, first_visible_block, longest_hit
from windlass.engine.cache.recurrent_state import RecurrentStateManager, eviction_window, holds_blocks_of
from windlass.engine.cache.sequence_cache import OPEN_END, BlockTable, SequenceCache, SlotLayout
from windlass.engine.interface.context import MIN_PASSAGE_TOKENS
from windlass.engine.rotary.rope_scaling import RotarySpec

MAX_RUNS = 64  # slot runs of one sequence


class BlockManager:
    """Block tables of all sequences over the pools of all KV groups.

    groups: one layout per KV group. block_size: tokens per block. Without `enable_prefix_caching` nothing is hashed, so
    nothing is matched. listener: notified of full and evicted blocks. Methods that take blocks never evict a held block,
    and never run out of blocks if `capacity` was checked first.
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
        self._states = RecurrentStateManager(self.pools, block_size, listener)
        self._window_groups = [
            group for group, pool in enumerate(self.pools) if pool.window is not None and not pool.holds_states
        ]

    # -- sizes ---------------------------------------------------------------------------------------------------

    def min_blocks(self, num_slots: int, *, shifts: bool = False, sinks_window: int = OPEN_END) -> list[int]:
        """Per group the blocks that a lone sequence must be able to hold at once to fill `num_slots` slots.

        A window of w tokens spans at most (w + block_size - 2) // block_size + 1 blocks at any offset. shifts: whether
        context shift is on, which can bring one more block into the window. sinks_window: see `eviction_window`.
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

    def blocks_still_needed(self, cache: SequenceCache, num_slots: int, chunk: int, *, rerotates: bool) -> list[int]:
        """Per group the blocks still to be taken until `num_slots` slots are filled, in chunks of up to `chunk` tokens.

        rerotates: whether keys will be re-rotated and therefore stored twice.
        """
        total = -(-num_slots // self.block_size)
        need = []
        for group, pool in enumerate(self.pools):
            blocks = cache.tables[group].blocks if cache.tables else []
            if pool.holds_states:
                need.append(self._states.num_missing(cache, group))
                continue
            held = len(blocks)
            copy = bool(blocks) and pool.needs_copy(blocks, cache.num_slots // self.block_size)
            in_passages = sum(len(passage.blocks[group]) for passage in cache.passages)  # held already
            count = total - held - in_passages + copy
            if (window := eviction_window(pool, cache)) is not None:
                # Blocks outside the window are released, so at most window + chunk tokens are held at once.
                held -= cache.tables[group].num_dropped if cache.tables else 0
                most = (window + chunk + self.block_size - 2) // self.block_size + 1 + (cache.floor < OPEN_END)
                count = min(count, most - held)
            if rerotates:
                count += total - (len(cache.originals[group].blocks) if cache.originals else 0)
            need.append(max(0, count))
        if cache.second_keys is not None:
            second_keys = self.blocks_still_needed(cache.second_keys, num_slots, chunk, rerotates=False)
            need = [own + other for own, other in zip(need, second_keys, strict=True)]
        return need

    def available(self) -> list[int]:
        """Per group the blocks that can be taken now, idle cached ones included."""
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

    def match(self, cache: SequenceCache, token_ids: abc.Sequence[int], num_shareable: int) -> tuple[int, bool]:
        """Number of leading blocks that a sequence can take from the cache, and whether all of its tokens were cached.

        num_shareable: leading tokens that are computed under the sequence's specs. At least one token is left to compute,
        since only a forward pass gives logits: after a full hit the last block is computed again, into a private block.
        Modifies only the sequence's hash chain.
        """
        if not self.enable_prefix_caching or cache.private:
            return 0, False
        cache.chain.extend(token_ids, num_shareable)  # all blocks that another sequence may be computing
        if cache.second_keys is not None:  # any prefix of these can be taken; with recurrent states not any prefix can
            num_second, whole = self._match(cache.second_keys, token_ids, num_shareable)
            num_shareable = num_shareable if whole else num_second * self.block_size
        return self._match(cache, token_ids, num_shareable)

    def _match(self, cache: SequenceCache, token_ids: abc.Sequence[int], num_shareable: int) -> tuple[int, bool]:
        size, digests = self.block_size, cache.chain.digests
        cache.chain.extend(token_ids, num_shareable)
        groups = [(pool.cached, eviction_window(pool, cache)) for pool in self.pools if holds_blocks_of(pool, cache)]
        hit = longest_hit(digests, num_shareable // size, groups, size)
        if hit * size < len(token_ids):
            return hit, False
        return longest_hit(digests, hit - 1, groups, size), True

    def attach(self, cache: SequenceCache, num_blocks: int) -> None:
        """Start the tables of a sequence that holds nothing with the first `num_blocks` blocks from the cache.

        `num_blocks` is the result of `match`, with no block taken since.
        """
        num_tokens = num_blocks * self.block_size
        tables = []
        for pool in self.pools:
            if not holds_blocks_of(pool, cache):
                tables.append(BlockTable())
                continue
            low = first_visible_block(num_tokens, eviction_window(pool, cache), self.block_size)
            blocks = [pool.cached[digest] for digest in cache.chain.digests[low:num_blocks]]
            dropped = 0 if pool.holds_states else low
            tables.append(BlockTable([-1] * dropped + blocks, dropped))
        # With a scope the blocks are offered again, so that they can be found as passages in that scope as well.
        cache.hold(tables, num_tokens, num_blocks if cache.chain.scope is None else 0)
        self._share(tables)
        if cache.second_keys is not None:
            self.attach(cache.second_keys, num_blocks)

    def mark_computed(
        self,
        cache: SequenceCache,
        token_ids: abc.Sequence[int],
        num_computed_tokens: int,
        num_inflight_tokens: int = 0,
    ) -> None:
        """Record that the keys of the first `num_computed_tokens` tokens are written and final.

        Full blocks are offered to the prefix cache. Blocks that no later query can see are released, and so are those of
        rejected proposals. num_inflight_tokens: tokens after the computed ones that are being computed.
        """
        advanced = num_computed_tokens - cache.num_computed_tokens
        cache.num_computed_tokens = num_computed_tokens
        self.commit(cache, token_ids)
        if self.enable_prefix_caching:
            self._states.cache_latest(cache, advanced, num_inflight_tokens)
        self._states.mark_computed(cache, advanced, num_inflight_tokens)
        if self._window_groups:
            self._drop_outside_window(cache)
        needed = -(-(cache.num_slots + num_inflight_tokens) // self.block_size)
        for pool, table in zip(self.pools, cache.tables, strict=True):
            while len(table.blocks) > needed:
                pool.release(table.pop())
        if cache.second_keys is not None:
            self.mark_computed(cache.second_keys, token_ids, num_computed_tokens, num_inflight_tokens)

    def commit(self, cache: SequenceCache, token_ids: abc.Sequence[int]) -> None:
        """Offer the blocks that have become full to later prompts.

        Blocks computed after a shift or a reuse get digests that no prompt's prefix has: they are found only as passages.
        """
        if not self.enable_prefix_caching:
            return
        scope, offset = cache.chain.scope, cache.layout.slot_offset
        for index, parent, digest in cache.take_full_blocks(token_ids):
            for group, (pool, table) in enumerate(zip(self.pools, cache.tables, strict=True)):
                block = -1 if pool.holds_states else table.blocks[index]
                if block >= 0 and pool.register(block, digest) and self._listener is not None:
                    self._listener.offer(BlockKey(group, digest), block, index)
            if scope is not None and all(digest in pool.cached for pool in self.pools):
                first = index * self.block_size
                tokens = token_ids[first - offset : first - offset + self.block_size]
                position = cache.layout.stored_position(first)
                self.passages.add(scope, digest, parent, tokens, position)
                if self._listener is not None and (record := self.passages.record_of(digest)) is not None:
                    self._listener.offer(BlockKey(0, digest), self.pools[0].cached[digest], index, record)

    def _on_evicted(self, group: int, block: int, digest: bytes) -> None:
        if self._listener is not None:
            self._listener.withdraw(BlockKey(group, digest), block, self.passages.record_of(digest))
        self.passages.remove(digest)

    def _drop_outside_window(self, cache: SequenceCache) -> None:
        """Release the blocks of window groups that no later query can see."""
        for group in self._window_groups:
            pool, table = self.pools[group], cache.tables[group]
            window = eviction_window(pool, cache)
            if window is None:
                continue
            visible = cache.layout.first_visible_slot(min(cache.num_slots, cache.floor), window) // self.block_size
            first, visible = table.num_dropped, min(visible, len(table.blocks))
            if first >= visible:
                continue
            dropped = cache.originals[group].drop(first, visible) if cache.originals else []
            pool.release_all(table.drop(visible) + dropped)

    # -- tables --------------------------------------------------------------------------------------------------

    def capacity(self, cache: SequenceCache, num_tokens: int, reserved: abc.Sequence[int] | None = None) -> int:
        """How many of the next `num_tokens` tokens the pools have blocks for now.

        reserved: per group the number of blocks that are reserved for other purposes.
        """
        start, size = cache.num_slots, self.block_size
        for group, (pool, table) in enumerate(zip(self.pools, cache.tables, strict=True)):
            held = len(table.blocks)
            if pool.holds_states:
                if pool.num_available < self._states.num_missing(cache, group):
                    return 0
                continue
            tables = [table.blocks]
            if cache.second_keys is not None:
                tables.append(cache.second_keys.tables[group].blocks)
            copies = sum(pool.needs_copy(blocks, start // size) for blocks in tables)
            extra = reserved[group] if reserved else 0
            if not copies and not extra and start + num_tokens <= held * size:
                continue
            spare = pool.num_available - copies - extra
            if spare < 0:
                return 0
            num_tokens = min(num_tokens, (held + spare // len(tables)) * size - start)
        return num_tokens

    def allocate(self, cache: SequenceCache, num_tokens: int) -> list[BlockCopy]:
        """Make the slots of the next `num_tokens` tokens writable; `num_tokens` is at most `capacity`.

        Returns the copies to apply, in order, before the forward pass: a last block that is shared or can be matched is
        replaced by a copy (copy on write). Targets of the copies of one step are distinct, and no source is the target
        of an earlier copy; a target may be the source of one. Raises RuntimeError if there are too few blocks.
        """
        start, size = cache.num_slots, self.block_size
        index, end = start // size, -(-(start + num_tokens) // size)
        needs = []  # (group, its pool and table, whether the block at `index` must be copied)
        for group, (pool, table) in enumerate(zip(self.pools, cache.tables, strict=True)):
            if pool.holds_states:
                continue
            copy = pool.needs_copy(table.blocks, index)
            num_missing = end - len(table.blocks)
            if num_missing > 0 or copy:
                if max(0, num_missing) + copy > pool.num_available:
                    raise RuntimeError(f"no free blocks for {num_tokens} tokens: call `capacity` first")
                needs.append((group, pool, table, copy))
        copies = self._states.make_writable(cache)
        for group, pool, table, copy in needs:
            if copy:
                source = table.blocks[index]
                target = pool.take(private=cache.unhashed or bool(pool.private[source]))
                table.replace(index, target)
                pool.release(source)
                copies.append(BlockCopy(group, source, target))
            for _ in range(len(table.blocks), end):
                table.append(pool.take(cache.unhashed))
        return copies if cache.second_keys is None else copies + self.allocate(cache.second_keys, num_tokens)

    def capacity_for_proposals(self, cache: SequenceCache, num_proposed: int) -> int:
        """How many of `num_proposed` tokens after the next one the pools have blocks for now."""
        return self._states.capacity(self.capacity(cache, 1 + num_proposed) - 1)

    def allocate_for_proposals(self, cache: SequenceCache, num_proposed: int) -> list[BlockCopy]:
        """Call `allocate` for the next token and the proposed ones; the states after all of them are held until
        verification."""
        copies = self.allocate(cache, 1 + num_proposed)
        self._states.allocate_for_proposals(cache, num_proposed)
        return copies

    def checkpoint_states(self, cache: SequenceCache, num_inflight_tokens: int) -> list[BlockCopy]:
        """Copies to apply between the in-flight tokens and the next step, so that later prompts can find the state
        between them."""
        if not self.enable_prefix_caching:
            return []
        return self._states.checkpoint(cache, num_inflight_tokens)

    def remove_range(
        self, cache: SequenceCache, first: int, end: int, *, close_gap: bool, num_inflight_tokens: int = 0
    ) -> None:
        """Release logical blocks first .. end - 1, which are full: see `SequenceCache.remove_range`.

        Other holders of the blocks are unaffected. Raises RuntimeError for a range that cannot be removed.
        """
        size = self.block_size
        if not 0 <= first < end or end * size > cache.num_slots or cache.second_keys is not None:
            raise RuntimeError(f"blocks {first} to {end} of a sequence of {cache.num_slots} slots cannot be cut out")
        for group, (pool, table) in enumerate(zip(self.pools, cache.tables, strict=True)):
            if pool.holds_states:  # the state still depends on the removed tokens
                continue
            removed = cache.originals[group].remove(first, end, size) if cache.originals else []
            pool.release_all(table.remove(first, end) + removed)
        cache.remove_range(first * size, end * size, close_gap=close_gap, num_inflight_tokens=num_inflight_tokens)

    def fork(self, parent: SequenceCache, child: SequenceCache) -> None:
        """Let `child`, which holds nothing, share every block of `parent`; the first of the two to write copies."""
        if parent.originals:
            raise RuntimeError("a sequence with re-rotated keys cannot be forked")
        child.copy(parent)
        self._share(child.tables)
        if parent.second_keys is not None and child.second_keys is not None:
            self.fork(parent.second_keys, child.second_keys)

    def free(self, cache: SequenceCache) -> None:
        """Release everything that is held, tail first. A second call does nothing."""
        self._states.flush_latest(cache)
        for passage in cache.passages:
            for pool, held in zip(self.pools, passage.blocks, strict=True):
                pool.release_all(held)
        for group, (pool, table) in enumerate(zip(self.pools, cache.tables, strict=False)):
            for blocks in (table.blocks, cache.originals[group].blocks if cache.originals else []):
                pool.release_all(blocks[table.num_dropped :])
        cache.release()
        if cache.second_keys is not None:
            self.free(cache.second_keys)

    def swap_out(self, cache: SequenceCache) -> tuple[tuple[int, ...], ...]:
        """Release everything until `swap_in`; returns the blocks whose content must be copied, per group."""
        if cache.originals or cache.second_keys is not None:
            raise RuntimeError("a sequence with re-rotated keys or a second key copy cannot be swapped out")
        blocks = tuple(tuple(table.blocks[table.num_dropped :]) for table in cache.tables)
        for pool, held in zip(self.pools, blocks, strict=True):
            pool.release_all(held)
        cache.swap_out()
        return blocks

    def swap_in(self, cache: SequenceCache) -> tuple[tuple[int, ...], ...]:
        """Take as many blocks as `swap_out` released; returns them in the same order."""
        cache.swap_in(lambda group: self.pools[group].take(private=True))
        return tuple(tuple(table.blocks[table.num_dropped :]) for table in cache.tables)

    def reset(self, cache: SequenceCache, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Release everything that is held; the sequence now represents keys under other specs, none of them computed."""
        self.free(cache)
        cache.reset(chain, specs, private=private)

    def _share(self, tables: abc.Iterable[BlockTable]) -> None:
        """Count one more holder of every block in the tables."""
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table.blocks[table.num_dropped :]:
                pool.share(block)

    # -- non-prefix reuse ----------------------------------------------------------------------------------------

    def hold_passages(self, cache: SequenceCache, token_ids: abc.Sequence[int], search: PassageSearch) -> None:
        """Find the passages that `cache`, which holds at most a prefix, will attach, and hold their blocks."""
        scope = cache.chain.scope
        if scope is None or cache.private:
            return
        search = replace(search, start=max(search.start, cache.num_computed_tokens))
        layout, held = cache.layout, list[Passage]()
        for passage in self.passages.search(scope, token_ids, search):
            taken = self._without_recomputed_head(passage, search.recompute)
            if taken is None:
                continue
            extended = layout.with_passage(taken.start + layout.slot_offset, taken, self.block_size)
            if len(extended.runs) > MAX_RUNS or not self._passages_fit(extended, [*held, taken], search):
                break
            held.append(taken)
            layout = extended
        for taken in held:
            for pool, blocks in zip(self.pools, taken.blocks, strict=True):
                for block in blocks:
                    pool.share(block)
        cache.passages = held

    def attach_passages(self, cache: SequenceCache, token_ids: abc.Sequence[int]) -> list[Passage]:
        """Attach the held passages that begin with the next token to compute, if any; returns them."""
        attached = []
        while cache.passages and cache.passages[0].start == cache.num_computed_tokens:
            self.commit(cache, token_ids)
            attached.append(cache.attach_passage(token_ids))
        return attached

    def _without_recomputed_head(self, passage: Passage, recompute: float) -> Passage | None:
        """The part of a passage after the tokens that are computed again; None if too few tokens are left."""
        # A share that gives a whole number of tokens means that number, whatever rounding does to the product.
        head = math.ceil((recompute if recompute >= 1 else recompute * passage.num_tokens) - 1e-6)
        if passage.num_tokens - head < MIN_PASSAGE_TOKENS:
            return None
        skipped, offset = divmod(passage.offset + head, self.block_size)
        digests = passage.digests[skipped:]
        return Passage(
            passage.start + head,
            passage.end,
            digests,
            offset,
            passage.position + head,
            blocks=tuple(tuple(pool.cached[digest] for digest in digests) for pool in self.pools),
            num_repeated=head,
        )

    def _passages_fit(self, layout: SlotLayout, held: list[Passage], search: PassageSearch) -> bool:
        """Whether a sequence of this layout, alone in the cache, can grow to its longest."""
        slots, size = search.longest + layout.slot_offset, self.block_size
        if search.window is not None:
            if search.end + 1 + layout.slot_offset > search.window:
                return False
            slots = min(slots, search.window)
        for group, pool in enumerate(self.pools):
            need = -(-slots // size)
            if pool.window is not None:
                # Passages are held whole until they are attached; each may leave two blocks of a window half empty.
                in_sight = (pool.window + size - 2) // size + 2 + 2 * len(held)
                need = min(need, in_sight + sum(len(passage.blocks[group]) for passage in held))
            if need > pool.num_blocks:
                return False
        return True
