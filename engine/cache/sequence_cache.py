"""Sequence cache: the block tables of one sequence, its computed length, and the layout of its slots.

A `SlotLayout` maps slots to positions: runs of slots, dropped ranges, and the next slot. A cached key is not rotated
again when it moves to another position: its run stores the shift, and attention rotates the query back by it instead
(the product of a rotated query and a rotated key depends only on the difference of their angles). Only modules of
`engine.cache` modify a `SequenceCache`. Whether a block is free, shared or cached is up to the block manager.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windlass.engine.cache.cache_operations import NO_TABLE_CHANGES, TableChange, TableChanges
from windlass.engine.cache.prefix_cache import HashChain, second_keys_root, shifted_digest
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES
from windlass.engine.rotary.rope_scaling import RotarySpec

if TYPE_CHECKING:
    from windlass.engine.cache.non_prefix_reuse import Passage  # it imports numpy, which the API process does without

UNBOUNDED = 2**62  # beyond any slot, position or distance
OPEN_END = UNBOUNDED  # end of the run to which tokens are still added


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots [first_slot, end_slot), whose keys were rotated at consecutive positions.

    position: at which the key in first_slot was rotated. shift: current position minus the position of rotation.
    """

    first_slot: int
    end_slot: int
    position: int
    shift: int = 0

    @property
    def offset(self) -> int:
        """Current position of a key minus its slot."""
        return self.position + self.shift - self.first_slot


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The runs of a sequence, by slot; the last is open. There may be empty slots between two runs.

    slot_offset: slot minus index of a token that is still to be computed. num_dropped: computed tokens that are no longer
    held. num_gap_closed: those of them whose positions were filled by moving the tokens before them.
    """

    runs: tuple[SlotRun, ...]
    slot_offset: int = 0
    num_dropped: int = 0
    num_gap_closed: int = 0

    @classmethod
    def starting_at(cls, position: int) -> SlotLayout:
        """The layout of a sequence whose first token has this position."""
        return cls((SlotRun(0, OPEN_END, position),))

    @property
    def is_plain(self) -> bool:
        """Whether the slot of every token is its index, and no key has moved."""
        return len(self.runs) == 1 and not self.runs[0].shift and not self.slot_offset

    @property
    def first_position(self) -> int:
        """Position minus index of a token that is still to be computed."""
        last = self.runs[-1]
        return last.position - last.first_slot + self.slot_offset

    @property
    def digest_numbers(self) -> tuple[int, ...]:
        """Numbers that identify the layout among all layouts of the same tokens: which are held, at which positions."""
        runs = [number for run in self.runs for number in (run.first_slot, run.position, run.shift)]
        return self.num_dropped, self.num_gap_closed, *runs

    def is_no_wider_than(self, other: SlotLayout) -> bool:
        """Whether it needs no more key ranges and no more rotated query copies than `other`, with or without rotation of
        shifted keys."""
        return all(own <= others for own, others in zip(self._widths(), other._widths(), strict=True))

    def _widths(self) -> tuple[int, int, int]:
        """Runs and gaps between them; rotations of a query by each shift; rotations relative to `num_gap_closed`."""
        ends = [0, *(run.end_slot for run in self.runs)]
        gaps = sum(run.first_slot > end for run, end in zip(self.runs, ends, strict=False))
        shifts = {run.shift for run in self.runs}
        return len(self.runs) + gaps, len(shifts | {0}), len({self.num_gap_closed - shift for shift in shifts} | {0})

    def spans(self, start: int, end: int) -> abc.Iterator[tuple[int, int, int]]:
        """(first slot, end slot, position at which the first key was rotated) of the runs within slots [start, end)."""
        for run in self.runs:
            first, stop = max(start, run.first_slot), min(end, run.end_slot)
            if first < stop:
                yield first, stop, run.position + first - run.first_slot

    def stored_position(self, slot: int) -> int:
        """The position at which the key in a slot was rotated."""
        (_, _, position), *_ = self.spans(slot, slot + 1)
        return position

    def first_visible_slot(self, num_slots: int, window: int) -> int:
        """The first slot that the token of slot `num_slots`, and so any later one, can see in a window of `window` tokens."""
        lowest = num_slots + self.runs[-1].offset - window + 1  # lowest visible position
        for run in self.runs:
            if run.end_slot + run.offset > lowest:
                return max(run.first_slot, lowest - run.offset)
        raise AssertionError("the last run is open")

    def with_range_removed(self, first: int, end: int, *, close_gap: bool) -> SlotLayout:
        """The layout with slots [first, end) cut out; later slots move up.

        close_gap: positions of earlier tokens grow by the number of removed tokens; else all positions remain.
        """
        dropped = sum(stop - start for start, stop, _ in self.spans(first, end))
        closed, width, runs = dropped if close_gap else 0, end - first, list[SlotRun]()
        for run in self.runs:
            if run.first_slot < first:
                runs.append(replace(run, end_slot=min(run.end_slot, first), shift=run.shift + closed))
            if run.end_slot > end:
                skipped = max(0, end - run.first_slot)
                start, stop = run.first_slot + skipped - width, run.end_slot - width
                stop = OPEN_END if run.end_slot == OPEN_END else stop
                runs.append(replace(run, first_slot=start, end_slot=stop, position=run.position + skipped))
        num_gap_closed = self.num_gap_closed + closed
        return SlotLayout(_merge_runs(runs), self.slot_offset - width, self.num_dropped + dropped, num_gap_closed)

    def with_passage(self, num_slots: int, passage: Passage, block_size: int) -> SlotLayout:
        """The layout with a passage after the first `num_slots` slots, in separate blocks.

        The next token's slot begins a block as well; the rest of the preceding block stays empty.
        """
        runs, last = list(self.runs[:-1]), self.runs[-1]
        if num_slots > last.first_slot:
            runs.append(replace(last, end_slot=num_slots))
        next_position = num_slots + last.offset
        first = -(-num_slots // block_size) * block_size + passage.offset
        end, position_after = first + passage.num_tokens, next_position + passage.num_tokens
        runs.append(SlotRun(first, end, passage.position, next_position - passage.position))
        following = -(-end // block_size) * block_size
        runs.append(SlotRun(following, OPEN_END, position_after))
        slot_offset = following - (num_slots - self.slot_offset + passage.num_tokens)
        return replace(self, runs=tuple(runs), slot_offset=slot_offset)


def _merge_runs(runs: list[SlotRun]) -> tuple[SlotRun, ...]:
    """Merge adjacent runs whose positions and shifts continue each other."""
    joined = runs[:1]
    for run in runs[1:]:
        last = joined[-1]
        touches = last.end_slot == run.first_slot and last.shift == run.shift
        if touches and last.position + last.end_slot - last.first_slot == run.position:
            joined[-1] = replace(last, end_slot=run.end_slot)
        else:
            joined.append(run)
    return tuple(joined)


PLAIN_LAYOUT = SlotLayout.starting_at(0)


@dataclass(slots=True)
class OriginalKeys:
    """The keys of one KV group as computed, retained once they have been re-rotated.

    Every re-rotation starts from these, so that a key is rounded only once, however often the frequencies change.
    blocks: parallel to the leading entries of the block table. origins: (end, specs) of consecutive spans of slots: the
    specs under which their keys were computed.
    """

    blocks: list[int] = field(default_factory=list)
    origins: list[tuple[int, tuple[RotarySpec, ...]]] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return self.origins[-1][0] if self.origins else 0

    def remove(self, first: int, end: int, block_size: int) -> list[int]:
        """Cut out entries first .. end - 1; returns their blocks."""
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        low, high = first * block_size, end * block_size
        self.origins = [(stop - max(0, min(stop, high) - low), specs) for stop, specs in self.origins]
        return removed

    def drop(self, first: int, end: int) -> list[int]:
        """Set entries first .. end - 1, as far as they exist, to -1; returns their blocks."""
        dropped = self.blocks[first:end]
        self.blocks[first:end] = [-1] * len(dropped)
        return dropped


class BlockTable:
    """The physical block of each logical block in one KV group; -1 for blocks that are outside the window.

    Records the changes since `take_change` was last called, at a cost that does not grow with the table.
    """

    __slots__ = ("_num_sent", "_removed", "_replaced", "blocks", "changed", "num_dropped")

    def __init__(self, blocks: abc.Iterable[int] = (), num_dropped: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_dropped = num_dropped  # leading entries that are -1
        self.changed = True
        self._num_sent = 0  # leading entries that the last change has reported, except those replaced
        self._replaced: dict[int, int] = {}
        self._removed: list[tuple[int, int]] = []  # (first, count), one after the other

    def append(self, block: int) -> None:
        self.blocks.append(block)
        self.changed = True

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        if index < self._num_sent:
            self._replaced[index] = block
        self.changed = True

    def pop(self) -> int:
        """Remove the last entry, which is not -1."""
        block = self.blocks.pop()
        self._replaced.pop(len(self.blocks), None)
        self._num_sent = min(self._num_sent, len(self.blocks))
        self.changed = True
        return block

    def drop(self, num_dropped: int) -> list[int]:
        """Set the entries up to `num_dropped` to -1; returns the blocks that they had."""
        first, self.num_dropped = self.num_dropped, num_dropped
        blocks = self.blocks[first:num_dropped]
        for index in range(first, num_dropped):
            self.blocks[index] = -1
            self._replaced.pop(index, None)
        self.changed = True
        return blocks

    def remove(self, first: int, end: int) -> list[int]:
        """Cut out entries first .. end - 1, later ones move up; returns their blocks, without those dropped before."""
        count = end - first
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        self.num_dropped -= max(0, min(self.num_dropped, end) - first)
        num_sent = min(self._num_sent, end) - min(self._num_sent, first)
        if num_sent:
            self._removed.append((first, num_sent))
            self._num_sent -= num_sent
        self._replaced = {
            index - count if index >= end else index: block
            for index, block in self._replaced.items()
            if not first <= index < end
        }
        self.changed = True
        return removed

    def resend_all(self) -> None:
        """Make the next change contain the whole table."""
        self._num_sent = 0
        self._replaced.clear()
        self._removed.clear()

    def take_change(self) -> TableChange:
        """The changes since the last call, or since the beginning."""
        replaced = tuple(self._replaced.items())
        appended, removed = tuple(self.blocks[self._num_sent :]), tuple(self._removed)
        change = TableChange(self._num_sent, replaced, appended, self.num_dropped, removed)
        self._num_sent = len(self.blocks)
        self._replaced.clear()
        self._removed.clear()
        self.changed = False
        return change


@dataclass(frozen=True, slots=True)
class ShiftedChain:
    """Digests of blocks computed after a shift or a reuse. index: of the next logical block. digest: of the block before it.
    layout: under which the next block is computed; None: the current one."""

    index: int
    digest: bytes
    layout: SlotLayout | None = None


@dataclass(frozen=True, slots=True)
class LatestState:
    """The state cached last, at the end of a block of tokens. index, digest: of that block."""

    index: int
    digest: bytes
    while_decoding: bool


class SequenceCache:
    """Cache of one sequence, for its whole life; it holds nothing while the sequence waits.

    tables: per KV group; empty while nothing is held. num_computed_tokens: leading tokens whose keys are computed and
    cached, including those dropped since. num_shifts: number of context shifts. floor: number of slots below which a
    context shift never shrinks the sequence, so that blocks outside a window beyond them stay outside.
    sinks_window: see `eviction_window`. specs: rotation of the cached keys, one per rotary group. originals: per KV group the
    keys as computed; empty before the first re-rotation. num_rerotations: of the current or last keys. private: blocks
    computed from now on never match a plain prefix. chain: digests of the full blocks before that. passages: held but
    not attached yet, in order. num_reused_passages, num_reused_tokens: attached so far. latest_state: the state cached
    last, unless it is to be retained. second_keys: the cache of the second key copy, with the same tokens in each slot;
    None if the specs need none. The block manager applies every operation to both. is_second_keys: whether this is one.
    """

    def __init__(
        self,
        chain: HashChain,
        specs: tuple[RotarySpec, ...],
        *,
        private: bool = False,
        first_position: int = 0,
        floor: int = OPEN_END,
        sinks_window: int = OPEN_END,
        is_second_keys: bool = False,
    ) -> None:
        self.floor = floor
        self.sinks_window = sinks_window
        self.chain = chain
        self.specs = specs
        self.private = private
        self.layout = SlotLayout.starting_at(first_position)
        self.tables: list[BlockTable] = []
        self.originals: list[OriginalKeys] = []
        self.num_computed_tokens = 0
        self._num_committed_blocks = 0  # blocks of `chain` that were offered to later prompts
        self.num_rerotations = 0
        self.num_shifts = 0
        self.num_reused_passages = self.num_reused_tokens = 0
        self.passages: list[Passage] = []
        self._shifted_chain: ShiftedChain | None = None
        self._swapped_out: tuple[int, list[tuple[int, int]]] | None = None
        self._restarted = True
        self.latest_state: LatestState | None = None
        self.is_second_keys = is_second_keys
        self.second_keys = self._new_second_keys()

    # -- queries ---------------------------------------------------------------------------------------------------

    @property
    def all_tables(self) -> abc.Sequence[BlockTable]:
        """The tables, followed by those of the second key copy."""
        return self.tables if self.second_keys is None else [*self.tables, *self.second_keys.tables]

    @property
    def block_tables(self) -> list[list[int]]:
        """The blocks per KV group, shared by reference."""
        return [table.blocks for table in self.tables]

    @property
    def unhashed(self) -> bool:
        """Whether new blocks get no digest, so that they are not found as passages either."""
        return self.private and self._shifted_chain is None

    @property
    def final_slot_offset(self) -> int:
        """`layout.slot_offset` after all passages are attached."""
        layout = self.layout
        for passage in self.passages:
            layout = layout.with_passage(passage.start + layout.slot_offset, passage, self.chain.block_size)
        return layout.slot_offset

    @property
    def num_slots(self) -> int:
        """Slots filled so far, which is the slot of the next token."""
        return self.num_computed_tokens + self.layout.slot_offset

    @property
    def is_swapped_out(self) -> bool:
        """Whether it holds nothing until its blocks are swapped in."""
        return self._swapped_out is not None

    def held_or_swapped_out(self) -> list[int]:
        """Number of blocks in its tables, per KV group, held or swapped out."""
        if self._swapped_out is not None:
            return [length - dropped for length, dropped in self._swapped_out[1]]
        return [len(table.blocks) - table.num_dropped for table in self.tables]

    def take_changes(self, *, whole: bool = False) -> TableChanges:
        """Changes of `all_tables` since the last call; whole tables for a new or restarted sequence, or with `whole`.

        A copy of the tables to which every result is applied equals the tables.
        """
        tables = self.all_tables
        if whole or self._restarted:
            self._restarted = False
            for table in tables:
                table.resend_all()
            return TableChanges(True, tuple([table.take_change() for table in tables]))
        for table in tables:
            if table.changed:
                return TableChanges(False, tuple([table.take_change() for table in tables]))
        return NO_TABLE_CHANGES

    # -- changes, by engine.cache only -----------------------------------------------------------------------------

    def hold(self, tables: list[BlockTable], num_computed_tokens: int, num_committed_blocks: int) -> None:
        """Begin to hold blocks. Raises RuntimeError if any are held already."""
        if self.tables:
            raise RuntimeError("the sequence already holds blocks")
        self.tables = tables
        self._restarted = True
        self.num_computed_tokens = num_computed_tokens
        self._num_committed_blocks = num_committed_blocks

    def take_full_blocks(self, token_ids: abc.Sequence[int]) -> list[tuple[int, bytes, bytes]]:
        """(logical index, digest of the block before, digest) of the blocks that have become full since the last call."""
        size, full = self.chain.block_size, self.num_slots // self.chain.block_size
        found: list[tuple[int, bytes, bytes]] = []
        if not self.private:
            self.chain.extend(token_ids, full * size)
            digests = self.chain.digests
            for index in range(self._num_committed_blocks, full):
                found.append((index, digests[index - 1] if index else self.chain.root, digests[index]))
            self._num_committed_blocks = max(full, self._num_committed_blocks)
        while self._shifted_chain is not None and self._shifted_chain.index < full:
            index, parent = self._shifted_chain.index, self._shifted_chain.digest
            start = index * size - self.layout.slot_offset
            layout = self._shifted_chain.layout or self.layout
            digest = shifted_digest(parent, layout.digest_numbers, token_ids[start : start + size])
            found.append((index, parent, digest))
            self._shifted_chain = ShiftedChain(index + 1, digest)
        return found

    def attach_passage(self, token_ids: abc.Sequence[int]) -> Passage:
        """Append the first of the passages, which begins with the next token, to the tables.

        `take_full_blocks` has been called before. Blocks computed from now on are private. Raises RuntimeError if the
        next token begins no passage.
        """
        passage, size = self.passages.pop(0), self.chain.block_size
        if passage.start != self.num_computed_tokens or self.chain.scope is None:
            raise RuntimeError(f"token {self.num_computed_tokens} does not begin a passage")
        start = self._shifted_chain_start()
        tail = token_ids[start.index * size - self.layout.slot_offset : passage.start]
        numbers = passage.start, passage.end, passage.offset, passage.position
        digest = shifted_digest(start.digest, numbers, tail, passage.digests)
        self.layout = self.layout.with_passage(self.num_slots, passage, size)
        for table, blocks in zip(self.tables, passage.blocks, strict=True):
            for block in blocks:
                table.append(block)
        self.num_computed_tokens = passage.end
        self.num_reused_passages += 1
        self.num_reused_tokens += passage.num_tokens
        self.private = True
        self._shifted_chain = ShiftedChain(self.num_slots // size, digest)
        return passage

    def _shifted_chain_start(self) -> ShiftedChain:
        """The first block that is not full and hashed yet, and the digest of the one before it."""
        if self._shifted_chain is not None:
            return self._shifted_chain
        count = self.num_slots // self.chain.block_size
        return ShiftedChain(count, self.chain.digests[count - 1] if count else self.chain.root)

    def remove_range(self, first_slot: int, end_slot: int, *, close_gap: bool, num_inflight_tokens: int = 0) -> None:
        """Remove slots [first_slot, end_slot), see `SlotLayout.with_range_removed`. Blocks computed from now on are private.

        num_inflight_tokens: tokens, less than a block, that are being computed with these slots still in place.
        """
        if self.chain.scope is not None and not self.unhashed:
            start, size = self._shifted_chain_start(), self.chain.block_size
            fills_block = self.num_slots % size + num_inflight_tokens >= size
            before = self.layout if fills_block else None
            self._shifted_chain = ShiftedChain(start.index - (end_slot - first_slot) // size, start.digest, before)
        self.layout = self.layout.with_range_removed(first_slot, end_slot, close_gap=close_gap)
        self.private = True
        self.num_shifts += 1

    def set_rerotated_specs(self, specs: tuple[RotarySpec, ...]) -> None:
        """Record that the cached keys are rotated by other specs. Nothing computed from now on is shared."""
        self.specs = specs
        self.private = True
        self._shifted_chain = None
        self.num_rerotations += 1

    def release(self) -> None:
        """Forget everything that is held."""
        self.tables = []
        self.originals = []
        self.passages = []
        self.num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._restarted = True

    def swap_out(self) -> None:
        """Forget everything that is held, except its length and the shapes of its tables."""
        shapes = [(len(table.blocks), table.num_dropped) for table in self.tables]
        self._swapped_out = self.num_computed_tokens, shapes
        self.release()

    def swap_in(self, take: abc.Callable[[int], int]) -> None:
        """Restore the tables with blocks that `take` returns for a KV group. RuntimeError if it is not swapped out."""
        if self._swapped_out is None:
            raise RuntimeError("the sequence is not swapped out")
        num_computed, shapes = self._swapped_out
        tables = [
            BlockTable([-1] * dropped + [take(group) for _ in range(length - dropped)], dropped)
            for group, (length, dropped) in enumerate(shapes)
        ]
        self.hold(tables, num_computed, 0)
        self._swapped_out = None

    def copy(self, parent: SequenceCache) -> None:
        """Hold the same blocks, chain, specs and layout as `parent`."""
        tables = [BlockTable(table.blocks, table.num_dropped) for table in parent.tables]
        self.hold(tables, parent.num_computed_tokens, parent._num_committed_blocks)
        self.chain = parent.chain.fork()
        self.specs = parent.specs
        self.private = parent.private
        self.layout = parent.layout
        self._shifted_chain = parent._shifted_chain
        self.num_shifts = parent.num_shifts
        self.num_reused_passages, self.num_reused_tokens = parent.num_reused_passages, parent.num_reused_tokens
        self.second_keys = self._new_second_keys()

    def reset(self, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Start over with other specs, with nothing computed. Raises RuntimeError if blocks are still held."""
        if self.tables:
            raise RuntimeError("a sequence that starts over still holds blocks")
        self._swapped_out = self._shifted_chain = None
        self.num_reused_passages = self.num_reused_tokens = 0
        self.chain, self.specs, self.private = chain, specs, private
        if not self.layout.is_plain:  # dropped tokens are computed again
            self.layout, self.num_shifts = SlotLayout.starting_at(self.layout.first_position), 0
        self.num_rerotations = 0
        self.second_keys = self._new_second_keys()

    def _new_second_keys(self) -> SequenceCache | None:
        """An empty cache for the second key copy, with a derived chain and specs; None if the specs need none."""
        if not any(spec.distances.has_second_keys for spec in self.specs):
            return None
        specs = tuple(replace(spec, distances=PLAIN_DISTANCES) for spec in self.specs)
        chain = HashChain(second_keys_root(self.chain.root), self.chain.block_size)
        first = self.layout.first_position
        return SequenceCache(chain, specs, private=self.private, first_position=first, is_second_keys=True)
