"""Sequence cache: the block tables of one sequence, its computed length, and the layout of its slots.

A `SlotLayout` maps slots to positions: runs of slots, ranges that were dropped, and the next slot. A key stays as it was rotated; where it has moved to another position its run holds the shift, and attention rotates the query back by it instead (the product of a rotated query and a rotated key depends only on the difference of their angles). Only modules of `engine.cache` modify a `SequenceCache`. The block manager knows whether a block is free, shared or cached.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

from windlass.engine.cache.cache_operations import NO_TABLE_CHANGES, TableChange, TableChanges
from windlass.engine.cache.prefix_cache import HashChain, second_keys_root, shifted_digest
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES
from windlass.engine.rotary.rope_scaling import RotarySpec

UNBOUNDED = 2**62  # beyond any slot, position or distance

OPEN_END = UNBOUNDED  # end of the run that tokens still join


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots [first_slot, end_slot), whose keys were rotated at consecutive positions.

    position: of the key in first_slot, as it was rotated. shift: what its keys stand further on than that now.
    """

    first_slot: int
    end_slot: int
    position: int
    shift: int = 0

    @property
    def offset(self) -> int:
        """What to add to a slot for the position that its key stands at."""
        return self.position + self.shift - self.first_slot


@dataclass(frozen=True, slots=True)
class HeldPassage:
    """A cached passage that a sequence takes up once all tokens before it are computed.

    first, end: its tokens. num_repeated: tokens right before `first` that are computed although the cache has them.
    blocks: per KV group, those it stands in. digests: theirs. offset: of token `first` in the first of them. position: at which
    its key was rotated.
    """

    first: int
    end: int
    num_repeated: int
    blocks: tuple[tuple[int, ...], ...]
    digests: tuple[bytes, ...]
    offset: int
    position: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The runs of a sequence, by slot; the last is open. Between two of them may lie slots that hold nothing.

    slot_offset: what to add to the index of a token that is still to be computed for its slot. num_dropped: tokens that were
    computed and are held no more; num_gap_closed: those of them over whose place the tokens before them have closed up.
    """

    runs: tuple[SlotRun, ...]
    slot_offset: int = 0
    num_dropped: int = 0
    num_gap_closed: int = 0

    @classmethod
    def starting_at(cls, position: int) -> SlotLayout:
        """Of a sequence whose first token stands at this position."""
        return cls((SlotRun(0, OPEN_END, position),))

    @property
    def is_plain(self) -> bool:
        """Whether every token lies in the slot of its own index, rotated where it stands."""
        return len(self.runs) == 1 and not self.runs[0].shift and not self.slot_offset

    @property
    def first_position(self) -> int:
        """What to add to the index of a token that is still to be computed for its position."""
        last = self.runs[-1]
        return last.position - last.first_slot + self.slot_offset

    @property
    def digest_numbers(self) -> tuple[int, ...]:
        """What tells it from every other layout of the same tokens: which of them are held, and where they stand."""
        runs = [number for run in self.runs for number in (run.first_slot, run.position, run.shift)]
        return self.num_dropped, self.num_gap_closed, *runs

    def is_no_wider_than(self, other: SlotLayout) -> bool:
        """Whether queries meet it in no more ranges than another, and turned in no more ways, by whichever rule of turning."""
        mine, others = self._widths(), other._widths()
        return all(one <= another for one, another in zip(mine, others, strict=True))

    def _widths(self) -> tuple[int, int, int]:
        """Runs and holes between them; ways to turn a query, where tokens that have closed up turn nothing and where they do."""
        ends = [0, *(run.end_slot for run in self.runs)]
        holes = sum(run.first_slot > end for run, end in zip(self.runs, ends, strict=False))
        shifts = {run.shift for run in self.runs}
        return len(self.runs) + holes, len(shifts | {0}), len({self.num_gap_closed - shift for shift in shifts} | {0})

    def spans(self, start: int, end: int) -> abc.Iterator[tuple[int, int, int]]:
        """(first slot, end slot, position of the first key as it was rotated) of the runs within slots [start, end)."""
        for run in self.runs:
            first, stop = max(start, run.first_slot), min(end, run.end_slot)
            if first < stop:
                yield first, stop, run.position + first - run.first_slot

    def stored_position(self, slot: int) -> int:
        """The position at which the key in a slot was rotated."""
        (_, _, position), *_ = self.spans(slot, slot + 1)
        return position

    def first_visible_slot(self, num_slots: int, window: int) -> int:
        """The first slot that the token for slot `num_slots` sees, and no later one sees before it, under a window in tokens."""
        lowest = num_slots + self.runs[-1].offset - window + 1  # position of the last key that is seen
        for run in self.runs:
            if run.end_slot + run.offset > lowest:
                return max(run.first_slot, lowest - run.offset)
        raise AssertionError("the last run is open")

    def with_range_removed(self, first: int, end: int, *, close_gap: bool) -> SlotLayout:
        """The same with slots [first, end) cut out; those behind move up.

        closing: the tokens before them move on in position to where those cut out stood; else every token stays where it
        stands.
        """
        dropped = sum(min(end, run.end_slot) - max(first, run.first_slot) for run in self._runs_within(first, end))
        width, runs = end - first, list[SlotRun]()
        for run in self.runs:
            if run.first_slot < first:
                runs.append(
                    replace(run, end_slot=min(run.end_slot, first), shift=run.shift + (dropped if close_gap else 0))
                )
            if run.end_slot > end:
                skipped = max(0, end - run.first_slot)
                stop = OPEN_END if run.end_slot == OPEN_END else run.end_slot - width
                runs.append(
                    replace(
                        run, first_slot=run.first_slot + skipped - width, end_slot=stop, position=run.position + skipped
                    )
                )
        closed = self.num_gap_closed + (dropped if close_gap else 0)
        return SlotLayout(_merge_runs(runs), self.slot_offset - width, self.num_dropped + dropped, closed)

    def with_passage(self, num_slots: int, passage: HeldPassage, block_size: int) -> SlotLayout:
        """The same with a passage behind the `num_slots` slots taken so far, in blocks of its own.

        The next token's slot begins a block as well; what is left over of the blocks before holds nothing.
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

    def _runs_within(self, first: int, end: int) -> list[SlotRun]:
        return [run for run in self.runs if run.first_slot < end and run.end_slot > first]


def _merge_runs(runs: list[SlotRun]) -> tuple[SlotRun, ...]:
    """Neighbours that are one run made one."""
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
    """Where the keys of one KV group stand as they were computed, once they have been re-rotated.

    Every re-rotation starts from these, so that a key is rounded once however often the frequencies change.
    blocks: parallel to the leading entries of the block table. origins: ends of consecutive spans of slots, and the specs
    they were computed under.
    """

    blocks: list[int] = field(default_factory=list)
    origins: list[tuple[int, tuple[RotarySpec, ...]]] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return self.origins[-1][0] if self.origins else 0

    def remove(self, first: int, end: int, block_size: int) -> list[int]:
        """Cut out entries first .. end - 1; returns the blocks that were there."""
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        low, high = first * block_size, end * block_size
        self.origins = [(stop - max(0, min(stop, high) - low), specs) for stop, specs in self.origins]
        return removed

    def drop(self, first: int, end: int) -> list[int]:
        """The blocks of entries first .. end - 1, as far as there are any; they are -1 from now on."""
        dropped = self.blocks[first:end]
        self.blocks[first:end] = [-1] * len(dropped)
        return dropped


class BlockTable:
    """The physical block of each logical block in one KV group; -1 where a window has left it behind.

    It remembers what has changed since its change was last taken, at a cost that does not grow with the table.
    """

    __slots__ = ("_num_sent", "_removed", "_replaced", "blocks", "changed", "num_dropped")

    def __init__(self, blocks: abc.Iterable[int] = (), num_dropped: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_dropped = num_dropped  # leading entries that are -1
        self.changed = True
        self._num_sent = 0  # leading entries that whoever took the last change has, but for those replaced
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
        """Cut off the last entry, which no window has left behind."""
        block = self.blocks.pop()
        self._replaced.pop(len(self.blocks), None)
        self._num_sent = min(self._num_sent, len(self.blocks))
        self.changed = True
        return block

    def drop(self, num_dropped: int) -> list[int]:
        """The blocks of the entries up to `num_dropped` that were still there; they are -1 from now on."""
        first, self.num_dropped = self.num_dropped, num_dropped
        blocks = self.blocks[first:num_dropped]
        for index in range(first, num_dropped):
            self.blocks[index] = -1
            self._replaced.pop(index, None)
        self.changed = True
        return blocks

    def remove(self, first: int, end: int) -> list[int]:
        """Cut out entries first .. end - 1, those behind move up; returns the blocks that no window had left behind."""
        count = end - first
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        self.num_dropped -= max(0, min(self.num_dropped, end) - first)
        known = min(self._num_sent, end) - min(self._num_sent, first)
        if known:
            self._removed.append((first, known))
            self._num_sent -= known
        self._replaced = {
            index - count if index >= end else index: block
            for index, block in self._replaced.items()
            if not first <= index < end
        }
        self.changed = True
        return removed

    def resend_all(self) -> None:
        """Let the next change bring the whole table."""
        self._num_sent = 0
        self._replaced.clear()
        self._removed.clear()

    def take_change(self) -> TableChange:
        """What has changed since this was last called, or since the beginning."""
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
    """The digests of blocks behind moved keys. index: the logical block that comes next. digest: of the one before it. layout:
    under which that next block is computed, None for that of the moment."""

    index: int
    digest: bytes
    layout: SlotLayout | None = None


@dataclass(frozen=True, slots=True)
class LatestState:
    """A state that was left at the end of a block of tokens. index: of the block. drawn: while tokens were drawn."""

    index: int
    digest: bytes
    while_decoding: bool


class SequenceCache:
    """One per sample, for its whole life; it holds nothing while the sample waits.

    tables: per KV group; none while nothing is held. num_computed_tokens: leading tokens whose keys were computed and stand
    in the cache, but for those dropped. layout: which slot holds which position. num_shifts: times that tokens were dropped.
    floor: slots that dropping never brings it below, so that what it leaves behind a window beyond them stays behind.
    sinks_window: see `window_in`.
    specs: what the cached keys stand under, one per rotary group.
    originals: per KV group the keys as computed; none before the first re-rotation. num_rerotations: of the keys held now
    or last. private: what is computed from now on is no prompt's prefix. unhashed: nor is it found as a passage. chain,
    num_committed_blocks: digests of the full blocks before, and how many of them were offered to later prompts. passages:
    those that it holds and will take up, in order. num_reused_passages, num_reused_tokens: those it has.
    latest_state: the last state that it left in the cache, if that is worth little once there is another. is_second_keys: it is the far
    keys of another handle.
    far: where the specs have keys stand a second time, as they seem from far away: what holds those, slot by slot the same
    tokens; None elsewhere. The block manager does to it what it does to this.
    """

    __slots__ = (
        "_chain",
        "_layout",
        "_num_committed_blocks",
        "_num_computed_tokens",
        "_num_rerotations",
        "_num_reused_passages",
        "_num_reused_tokens",
        "_num_shifts",
        "_originals",
        "_passages",
        "_private",
        "_restarted",
        "_shifted_chain",
        "_specs",
        "_swapped_out",
        "_tables",
        "floor",
        "is_second_keys",
        "latest_state",
        "second_keys",
        "sinks_window",
    )

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
        self._chain = chain
        self._specs = specs
        self._private = private
        self._layout = SlotLayout.starting_at(first_position)
        self._tables: list[BlockTable] = []
        self._originals: list[OriginalKeys] = []
        self._num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._num_rerotations = 0
        self._num_shifts = 0
        self._num_reused_passages = self._num_reused_tokens = 0
        self._passages: list[HeldPassage] = []
        self._shifted_chain: ShiftedChain | None = None
        self._swapped_out: tuple[int, list[tuple[int, int]]] | None = None
        self._restarted = True
        self.latest_state: LatestState | None = None
        self.is_second_keys = is_second_keys
        self.second_keys = self._new_second_keys()

    # -- read by everybody -----------------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    @property
    def tables(self) -> abc.Sequence[BlockTable]:
        return self._tables

    @property
    def all_tables(self) -> abc.Sequence[BlockTable]:
        """Its own, and behind them those of its far keys."""
        return self._tables if self.second_keys is None else [*self._tables, *self.second_keys.tables]

    @property
    def block_tables(self) -> list[list[int]]:
        """The blocks alone, per KV group; shared by reference."""
        return [table.blocks for table in self._tables]

    @property
    def originals(self) -> abc.Sequence[OriginalKeys]:
        return self._originals

    @property
    def chain(self) -> HashChain:
        return self._chain

    @property
    def specs(self) -> tuple[RotarySpec, ...]:
        return self._specs

    @property
    def private(self) -> bool:
        return self._private

    @property
    def unhashed(self) -> bool:
        return self._private and self._shifted_chain is None

    @property
    def passages(self) -> abc.Sequence[HeldPassage]:
        return self._passages

    @property
    def num_reused_passages(self) -> int:
        return self._num_reused_passages

    @property
    def num_reused_tokens(self) -> int:
        return self._num_reused_tokens

    @property
    def final_slot_offset(self) -> int:
        """`layout.slot_offset` once all its passages are taken up."""
        layout = self._layout
        for passage in self._passages:
            layout = layout.with_passage(passage.first + layout.slot_offset, passage, self._chain.block_size)
        return layout.slot_offset

    @property
    def num_rerotations(self) -> int:
        return self._num_rerotations

    @property
    def num_shifts(self) -> int:
        return self._num_shifts

    @property
    def layout(self) -> SlotLayout:
        """Another object whenever anything about it has changed."""
        return self._layout

    @property
    def num_slots(self) -> int:
        """Slots taken so far: that of the next token."""
        return self._num_computed_tokens + self._layout.slot_offset

    @property
    def is_swapped_out(self) -> bool:
        """Whether it holds nothing but will be as it was once its pages are back."""
        return self._swapped_out is not None

    def held_or_swapped_out(self) -> list[int]:
        """Blocks of its tables, per KV group, held or parked."""
        if self._swapped_out is not None:
            return [length - dropped for length, dropped in self._swapped_out[1]]
        return [len(table.blocks) - table.num_dropped for table in self._tables]

    def window_in(self, window: int | None) -> int | None:
        """By which window it gives blocks up in a KV group of this one; None where all stay until they are cut out.

        In a window that is wider than `sinks_window` sinks stay in sight, as they stand nearer than they lie.
        """
        return None if window is None or window > self.sinks_window else window

    def take_changes(self, *, whole: bool = False) -> TableChanges:
        """What has happened to the tables since this was last called; everything if it is new, held nothing since, or `whole`.

        Those of its far keys come behind its own. Whoever applies every answer to its copies of the tables
        has exactly the tables.
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

    # -- written by engine.cache alone -----------------------------------------------------------------------------

    def hold(self, tables: list[BlockTable], num_computed_tokens: int, num_committed_blocks: int) -> None:
        """Begin to hold blocks."""
        if self._tables:
            raise RuntimeError("the sequence already holds blocks")
        self._tables = tables
        self._restarted = True
        self._num_computed_tokens = num_computed_tokens
        self._num_committed_blocks = num_committed_blocks

    def set_computed(self, num_tokens: int) -> None:
        self._num_computed_tokens = num_tokens

    def take_full_blocks(self, token_ids: abc.Sequence[int]) -> list[tuple[int, bytes, bytes]]:
        """(logical index, digest of the block before, digest) of the blocks that have become full since the last call."""
        size, full = self._chain.block_size, self.num_slots // self._chain.block_size
        found: list[tuple[int, bytes, bytes]] = []
        if not self._private:
            self._chain.extend(token_ids, full * size)
            digests = self._chain.digests
            for index in range(self._num_committed_blocks, full):
                found.append((index, digests[index - 1] if index else self._chain.root, digests[index]))
            self._num_committed_blocks = max(full, self._num_committed_blocks)
        while self._shifted_chain is not None and self._shifted_chain.index < full:
            index, parent = self._shifted_chain.index, self._shifted_chain.digest
            start = index * size - self._layout.slot_offset
            layout = self._shifted_chain.layout or self._layout
            digest = shifted_digest(parent, layout.digest_numbers, token_ids[start : start + size])
            found.append((index, parent, digest))
            self._shifted_chain = ShiftedChain(index + 1, digest)
        return found

    def hold_passages(self, passages: abc.Sequence[HeldPassage]) -> None:
        """Hold what will be taken up, in order."""
        self._passages = list(passages)

    def attach_passage(self, token_ids: abc.Sequence[int]) -> HeldPassage:
        """Let the first of the passages, which begins with the next token, be the keys and values of its tokens.

        All full blocks before have been taken by `take_full_blocks`. What comes from here on is nobody else's prefix.
        """
        passage, size = self._passages.pop(0), self._chain.block_size
        if passage.first != self._num_computed_tokens or self._chain.scope is None:
            raise RuntimeError(f"token {self._num_computed_tokens} does not begin a passage")
        trail = self._shifted_chain_start()
        tail = token_ids[trail.index * size - self._layout.slot_offset : passage.first]
        where = passage.first, passage.end, passage.offset, passage.position
        digest = shifted_digest(trail.digest, where, tail, passage.digests)
        self._layout = self._layout.with_passage(self.num_slots, passage, size)
        for table, blocks in zip(self._tables, passage.blocks, strict=True):
            for block in blocks:
                table.append(block)
        self._num_computed_tokens = passage.end
        self._num_reused_passages += 1
        self._num_reused_tokens += passage.num_tokens
        self._private = True
        self._shifted_chain = ShiftedChain(self.num_slots // size, digest)
        return passage

    def _shifted_chain_start(self) -> ShiftedChain:
        """The first block that is not full and hashed yet, and the digest of the one before it."""
        if self._shifted_chain is not None:
            return self._shifted_chain
        count = self.num_slots // self._chain.block_size
        return ShiftedChain(count, self._chain.digests[count - 1] if count else self._chain.root)

    def start_originals(self) -> list[OriginalKeys]:
        """Those of every KV group, empty at first."""
        if not self._originals:
            self._originals = [OriginalKeys() for _ in self._tables]
        return self._originals

    def remove_range(self, first_slot: int, end_slot: int, *, close_gap: bool, num_inflight_tokens: int = 0) -> None:
        """Slots [first_slot, end_slot) are held no more, see `SlotLayout.with_range_removed`; what comes from here on is nobody else's.

        num_inflight_tokens: tokens that are being computed while they are still there, less than a block.
        """
        if self._chain.scope is not None and not self.unhashed:
            trail, size = self._shifted_chain_start(), self._chain.block_size
            fills_block = self.num_slots % size + num_inflight_tokens >= size
            before = self._layout if fills_block else None
            self._shifted_chain = ShiftedChain(trail.index - (end_slot - first_slot) // size, trail.digest, before)
        self._layout = self._layout.with_range_removed(first_slot, end_slot, close_gap=close_gap)
        self._private = True
        self._num_shifts += 1

    def set_rerotated_specs(self, specs: tuple[RotarySpec, ...]) -> None:
        """The cached keys stand under other specs now; what is computed from here on is nobody else's."""
        self._specs = specs
        self._private = True
        self._shifted_chain = None
        self._num_rerotations += 1

    def release(self) -> None:
        """Hold nothing any more."""
        self._tables = []
        self._originals = []
        self._passages = []
        self._num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._restarted = True

    def swap_out(self) -> None:
        """Hold nothing, and remember what it was."""
        shapes = [(len(table.blocks), table.num_dropped) for table in self._tables]
        self._swapped_out = self._num_computed_tokens, shapes
        self.release()

    def swap_in(self, take: abc.Callable[[int], int]) -> None:
        """Be as before, in blocks that `take` finds for a KV group."""
        if self._swapped_out is None:
            raise RuntimeError("the sequence is not parked")
        num_computed, shapes = self._swapped_out
        tables = [
            BlockTable([-1] * dropped + [take(group) for _ in range(length - dropped)], dropped)
            for group, (length, dropped) in enumerate(shapes)
        ]
        self.hold(tables, num_computed, 0)
        self._swapped_out = None

    def copy(self, parent: SequenceCache) -> None:
        """Hold what `parent` holds, and stand for the same."""
        tables = [BlockTable(table.blocks, table.num_dropped) for table in parent._tables]
        self.hold(tables, parent._num_computed_tokens, parent._num_committed_blocks)
        self._chain = parent._chain.fork()
        self._specs = parent._specs
        self._private = parent._private
        self._layout = parent._layout
        self._shifted_chain = parent._shifted_chain
        self._num_shifts = parent._num_shifts
        self._num_reused_passages, self._num_reused_tokens = parent._num_reused_passages, parent._num_reused_tokens
        self.second_keys = self._new_second_keys()

    def reset(self, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Stand for keys under other specs, of which none is computed yet."""
        if self._tables:
            raise RuntimeError("a sequence that starts over still holds blocks")
        self._swapped_out = self._shifted_chain = None
        self._num_reused_passages = self._num_reused_tokens = 0
        self._chain, self._specs, self._private = chain, specs, private
        if not self._layout.is_plain:  # what was dropped comes again
            self._layout, self._num_shifts = SlotLayout.starting_at(self._layout.first_position), 0
        self._num_rerotations = 0
        self.second_keys = self._new_second_keys()

    def _new_second_keys(self) -> SequenceCache | None:
        """Of its chain and specs, holding nothing."""
        if not any(spec.distances.has_second_keys for spec in self._specs):
            return None
        specs = tuple(replace(spec, distances=PLAIN_DISTANCES) for spec in self._specs)
        chain = HashChain(second_keys_root(self._chain.root), self._chain.block_size)
        first = self._layout.first_position
        return SequenceCache(chain, specs, private=self._private, first_position=first, is_second_keys=True)
