"""Which slots of a sequence hold which positions: runs of slots, what was dropped between them, where the next token goes.

A key stays as it was rotated. Where it shall stand at another position, its run says by how much: whoever attends turns
the query back by that instead (a product of a rotated query and a rotated key depends on the difference of their angles
alone). Plain data: it knows neither blocks nor tensors.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

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
