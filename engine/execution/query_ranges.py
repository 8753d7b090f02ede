"""Slot ranges of a step's sequences, and the rotated query copies that attend to them.

A query attends unrotated to keys that are at the position at which they were rotated. For keys at another position, and for tokens at a fixed
distance (sinks, distance-based attention), the query is rotated by the difference: such a copy is an additional row of q behind the step's own
queries. This module computes numbers only. `query_ranges` describes any step; `RangeTables` describes single-token rows by numbers that stay
valid while the device advances on its own. `tests/engine/execution/test_row_ranges.py` compares both.

An example. A stream keeps its first 16 tokens and has dropped the next 48, so its slots 16, 17, ... hold tokens 64, 65, ..., whose keys were
rotated at 64, 65, ... The first 16 keys were rotated at 0 to 15 and are moved directly in front of those, to 48 to 63. A query at position 70,
in slot 22, has two spans (slots with the same treatment):

    slots      rotated at  position   offset  shift   rotation  gap
    0 to 15    0 to 15     48 to 63   48      48      -48       0
    16 to 22   64 to 70    64 to 70   48      0       0         0

* offset: position of a key minus its slot. shift: position minus the position at which it was rotated.
* rotation: positions by which the query is rotated. Slot 3 is at position 51, 19 before the query, and was rotated at 3: so the query is rotated
  as if at 22. That is a copy of the query.
* range: a span in the form of `AttentionCall`: its end slot, the row of its query copy, its reach and its gap.
* gap: distance in positions minus distance in slots. If the gap of the dropped tokens were kept (offset 0, shift 0), slot 3 would be at position
  3 and the gap 48: 67 positions from the query, 19 slots.
* reach: number of slots visible to a query, its own included: 20 under a window of 20 positions, 0 where the gap is 48.
* sink: with the first 3 tokens as sinks of a window of 20, and the gap kept, slots 0 to 2 are a span that stays visible. From position 22 on,
  where sinks and window are no longer contiguous, a query attends to them as if from there: at 70 it is rotated by -48.
* absolute scores: where scores depend on absolute positions, queries themselves are moved back by the dropped tokens, to 22 instead of 70; then
  the rotations are 0 and 48.
* second keys: keys stored a second time, rotated for distant queries (near w, group G, slope of `Distances`); they have a span of their own.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windlass.engine.cache.sequence_cache import OPEN_END, UNBOUNDED, SlotLayout
from windlass.engine.execution.input_batch import RunnerSequence
from windlass.engine.rotary.attention_distances import Distances


def second_key_positions(
    rules: abc.Sequence[Distances], counts: NDArray[np.int64], positions: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64] | None]:
    """Of T tokens whether they are kept so, at which position, and at which share of the frequencies; None: all at the whole.

    rules, counts: of every chunk, its distances and tokens. positions: [T], where the tokens stand.
    """
    has_copy = np.array([rule.has_second_keys for rule in rules]).repeat(counts)
    slopes = np.array([rule.slope if rule.has_second_keys and rule.group is None else 1.0 for rule in rules])
    groups = np.array([rule.group or 1 for rule in rules], dtype=np.int64).repeat(counts)
    return has_copy, positions // groups, slopes.repeat(counts) if (slopes != 1).any() else None


def rotation_to_second_keys(rule: Distances, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much queries at these positions are turned on before they meet far keys, at 1 - slope of the frequencies.

    With a group a query at i then stands at i // G + w - w // G, without one at w + (i - w) slope: (i - w)(1 - slope) less.
    """
    near, group = rule.near, rule.group
    if near is None:
        raise ValueError("the rule keeps no far keys")
    return near - positions if group is None else positions // group + near - near // group - positions


_NO_KEYS = -1  # the row of a range in which nothing is seen


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """A part of a sequence's slots that its queries meet alike. offset: position where a key stands minus its slot.

    sink: whether its tokens stay in sight, at the edge of the window; first_sink: which of the sinks is its first.
    chunks_back: whole chunks between it and the query's own, where keys seem as far as a rule of distances says; 2 for all older
    ones. far: its keys are kept as they seem from far away. reach: see `AttentionCall`; None: as far as windows let it.
    """

    end_slot: int
    offset: int
    shift: int
    empty: bool = False
    sink: bool = False
    chunks_back: int = 0
    second_keys: bool = False
    reach: int | None = None
    first_sink: int = 0


@dataclass(frozen=True, slots=True)
class QueryRanges:
    """B sequences of T tokens in R ranges; V versions beside the queries themselves; W kinds of windows.

    ends, rows, reaches, gaps: see `AttentionCall`; unrotated_rows: the rows for layers that do not rotate.
    sources, turns: per version the token that it is of, and by how many positions it is turned. slopes: per version by which
    share of the frequencies; None: all by the whole of them.
    """

    ends: NDArray[np.int64]  # [B, R]
    rows: NDArray[np.int64]  # [B, R]
    unrotated_rows: NDArray[np.int64]  # [B, R]
    reaches: NDArray[np.int64]  # [W, B, R]
    gaps: NDArray[np.int64]  # [B, R]
    sources: NDArray[np.int64]  # [V]
    rotations: NDArray[np.int64]  # [V]
    slopes: NDArray[np.float64] | None = None  # [V]


def needs_ranges(live: RunnerSequence) -> bool:
    """Whether a sequence's queries are to be told of ranges at all."""
    return live.window is not None or not live.layout.is_plain


def attention_chunks_of(distances: Distances, start: int, count: int) -> list[tuple[int, int]]:
    """(first index, tokens) of the parts of `count` tokens from `start` on whose queries meet all keys in the same ranges."""
    size, pieces = distances.chunk, []
    while size is not None and count:
        taken = min(count, size - start % size)
        pieces.append((start, taken))
        start, count = start + taken, count - taken
    return pieces or [(start, count)]


def query_ranges(
    chunks: abc.Sequence[tuple[RunnerSequence, int, int]],
    rules: abc.Sequence[Distances],
    windows: abc.Sequence[int | None],
    *,
    absolute_scores: bool,
    second_key_slots: abc.Sequence[int] = (),
) -> QueryRanges:
    """Ranges of chunks (sequence, position of the first query, queries), in order of their rows.

    rules: the distances of each; a chunk under dual chunk attention is one of `attention_chunks_of`. second_key_slots: of each, leading slots
    that hold its far keys; none at all where no chunk has any.
    windows: the kinds of windows that layers have, None for none. anchored: the queries stand back by the tokens dropped
    before them, so that kept tokens meet them as they are and those behind do not.
    """
    spans = [
        _spans_for_rule(rule, live, windows, position, count, second_keys)
        for (live, position, count), rule, second_keys in zip(
            chunks, rules, second_key_slots or [0] * len(chunks), strict=True
        )
    ]
    most = max(map(len, spans))
    num_tokens = sum(count for _, _, count in chunks)
    shape = len(chunks), most
    ends, rows = np.full(shape, OPEN_END, dtype=np.int64), np.full(shape, _NO_KEYS, dtype=np.int64)
    unrotated_rows, reaches = rows.copy(), np.zeros((len(windows), *shape), dtype=np.int64)
    gaps = np.zeros(shape, dtype=np.int64)
    sources: list[NDArray[np.int64]] = []
    rotations: list[NDArray[np.int64]] = []
    slopes: list[NDArray[np.float64]] = []
    token = num_copies = 0
    for b, ((live, position, count), own, rule) in enumerate(zip(chunks, spans, rules, strict=True)):
        anchor_shift = live.layout.num_gap_closed if absolute_scores else 0
        positions = np.arange(position, position + count, dtype=np.int64)
        rows_of: dict[tuple[int, bool, int, bool], int] = {}  # spans that ask for the same turns share a version
        for r, span in enumerate(own):
            ends[b, r] = span.end_slot
            if span.empty:
                continue
            gap = gaps[b, r] = own[-1].offset - span.offset
            reaches[:, b, r] = reaches_of(span, gap, live, windows)
            unrotated_rows[b, r] = token
            known = rows_of.get((span.shift, span.sink, span.chunks_back, span.second_keys))
            if known is not None:
                rows[b, r] = known
                continue
            rotation = anchor_shift - span.shift + np.minimum(last_unclamped_position(span, live) - positions, 0)
            if span.chunks_back:
                rotation += _chunk_rotation(rule, positions, span.chunks_back)
            if span.second_keys:
                rotation += rotation_to_second_keys(rule, positions)
            rows[b, r] = token
            # Sinks are a range of their own even where no query of this chunk is turned: neighbours under one turn may be summed
            # as one, and how a token is summed must not depend on the chunk that it came in.
            if span.sink or rotation.any():
                rows[b, r] = num_tokens + num_copies
                sources.append(np.arange(token, token + count, dtype=np.int64))
                rotations.append(rotation)
                slopes.append(np.full(count, 1 - rule.slope if span.second_keys else 1.0))
                num_copies += count
            rows_of[span.shift, span.sink, span.chunks_back, span.second_keys] = int(rows[b, r])
        token += count
    nothing = np.zeros(0, dtype=np.int64)
    return QueryRanges(
        ends,
        rows,
        unrotated_rows,
        reaches,
        gaps,
        np.concatenate(sources) if sources else nothing,
        np.concatenate(rotations) if rotations else nothing,
        np.concatenate(slopes) if any(rule.slope for rule in rules) and slopes else None,
    )


def reaches_of(span: SlotSpan, gap: int, live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[int]:
    """How far back the queries of each kind of window see in a span that is so many positions nearer than its slots say."""
    if span.reach is not None:
        return [span.reach] * len(windows)
    own, reaches = None if span.sink else live.window, []
    for window in windows:
        bounds = [bound for bound in (window, own) if bound is not None]
        if not bounds or (span.sink and span.first_sink >= first_permanent_sink(live, window)):
            reaches.append(UNBOUNDED)
        else:
            reaches.append(max(min(bounds) - gap, 0))
    return reaches


def first_permanent_sink(live: RunnerSequence, window: int | None) -> int:
    """The first of its sinks that layers with such a window see however far the text goes; as many as there are for none.

    Sink i comes to stand `live.window + live.sinks - 1 - i` before the query, and no further away.
    """
    assert live.window is not None
    return 0 if window is None else min(live.sinks, max(0, live.window + live.sinks - window))


def last_unclamped_position(span: SlotSpan, live: RunnerSequence) -> int:
    """The last position from which a span is met at its distance; queries behind it are turned back to there."""
    if not span.sink:
        return UNBOUNDED
    assert live.window is not None
    return live.layout.first_position + live.sinks + live.window - 1


def _spans_for_rule(
    rule: Distances,
    live: RunnerSequence,
    windows: abc.Sequence[int | None],
    position: int,
    count: int,
    second_key_slots: int,
) -> list[SlotSpan]:
    """The parts that `count` queries from a position on meet."""
    if rule.chunk is not None:
        return _chunk_spans(position // rule.chunk, rule.chunk)
    if rule.near is not None:
        return _second_key_spans(rule.near, position + count - rule.near, second_key_slots)
    return spans_of(live, windows)


def _second_key_spans(near: int, end: int, second_key_slots: int) -> list[SlotSpan]:
    """The keys as they seem from far away, up to the last that any query sees so, and behind them those nearby."""
    spans = [SlotSpan(end, 0, 0, second_keys=True, reach=-second_key_slots - near)] if end > 0 else []
    if max(end, 0) < second_key_slots:
        spans.append(SlotSpan(second_key_slots, 0, 0, empty=True))
    return [*spans, SlotSpan(OPEN_END, 0, 0, reach=near)]


def _chunk_spans(number: int, size: int) -> list[SlotSpan]:
    """The parts that queries of a chunk meet: all chunks before the last but one, that one, and their own."""
    spans = [SlotSpan((number - 1) * size, 0, 0, chunks_back=2)] if number > 1 else []
    spans += [SlotSpan(number * size, 0, 0, chunks_back=1)] if number else []
    return [*spans, SlotSpan(OPEN_END, 0, 0)]


def _chunk_rotation(rule: Distances, positions: NDArray[np.int64], chunks_back: int) -> NDArray[np.int64]:
    """By how much queries at these positions are turned on before they meet keys so many chunks before their own."""
    assert rule.chunk is not None
    within, farthest = positions % rule.chunk, rule.most - 1
    return farthest - within if chunks_back > 1 else np.minimum(within + rule.chunk, farthest) - within


def spans_of(live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[SlotSpan]:
    """The parts of a sequence's slots, in order; the last is open. They are those of every token until its layout changes.

    windows: the kinds that layers have. Sinks that one of them sees and others before them that it loses are parts of their own.
    """
    layout = live.layout
    spans: list[SlotSpan] = []
    end, sinks = 0, _sink_groups(live, windows)
    for run in layout.runs:
        if run.first_slot > end:
            spans.append(SlotSpan(run.first_slot, 0, 0, empty=True))
        first, end = run.first_slot, run.end_slot
        for first_sink, last_sink in sinks:
            edge = min(layout.first_position + last_sink - run.offset, end)  # the first slot behind them
            if edge > first:
                spans.append(SlotSpan(edge, run.offset, run.shift, sink=True, first_sink=first_sink))
                first = edge
        if first < end:
            spans.append(SlotSpan(end, run.offset, run.shift))
    return spans


def _sink_groups(live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[tuple[int, int]]:
    """First and end of the sinks that all kinds of windows see alike, in order; none where a sequence has none."""
    if live.window is None or not live.sinks:
        return []
    edges = sorted({0, live.sinks, *(first_permanent_sink(live, window) for window in windows)})
    return list(pairwise(edges))


# Of each range of a row: where it ends, the version of the query that meets it (0: as it is, -1: none), what distances in it are
# more than slots. Of the row, in all of its ranges: tokens missing before it. Of the row's version n, in range n - 1: by how many
# positions it is turned, and the last position that is turned by no less. Behind these, for each kind of window, the reach.
ENDS, COPIES, GAPS, NUM_MISSING, ROTATIONS, LAST_UNCLAMPED, REACHES = range(7)


class RowRanges:
    """numbers: of each of B rows [REACHES + W, ranges] int64; ranges differ."""

    def __init__(self, numbers: abc.Sequence[NDArray[np.int64]]) -> None:
        self._numbers = numbers
        self.most = max(one.shape[1] for one in numbers)

    def padded(self, rows: int, ranges: int) -> NDArray[np.int64]:
        """[REACHES + W, rows, ranges], at least as many as there are; in those that are more nothing is seen."""
        found = _empty_ranges(len(self._numbers[0]), rows, ranges)
        for row, one in enumerate(self._numbers):
            found[:, row, : one.shape[1]] = one
        return found


class RangeTables:
    """Makes them, and keeps those of the rows that it was asked for last.

    windows: the kinds that layers have, None for none. anchored: see `query_ranges`.
    """

    def __init__(self, windows: abc.Sequence[int | None], *, absolute_scores: bool) -> None:
        self._windows, self._absolute_scores = windows, absolute_scores
        self._cached: dict[int, tuple[SlotLayout, NDArray[np.int64]]] = {}

    def of(self, rows: abc.Sequence[RunnerSequence]) -> RowRanges:
        """Those of single tokens of these sequences."""
        known, found = self._cached, []
        self._cached = {}
        for live in rows:
            seq_id = live.slot.seq_id
            earlier = known.get(seq_id) or self._cached.get(seq_id)
            if earlier is None or earlier[0] is not live.layout:
                earlier = live.layout, self._build_table(live)
            self._cached[seq_id] = earlier
            found.append(earlier[1])
        return RowRanges(found)

    def _build_table(self, live: RunnerSequence) -> NDArray[np.int64]:
        spans, layout = spans_of(live, self._windows), live.layout
        anchor_shift = layout.num_gap_closed if self._absolute_scores else 0
        copies = {(0, UNBOUNDED): 0}  # by how they are turned
        copy_and_gap: list[tuple[int, int]] = []  # version and gap of each span
        for span in spans:
            rotation = anchor_shift - span.shift, last_unclamped_position(span, live)
            version = -1 if span.empty else copies.setdefault(rotation, len(copies))
            copy_and_gap.append((version, spans[-1].offset - span.offset))
        found = _empty_ranges(REACHES + len(self._windows), 1, max(len(spans), len(copies)))[:, 0]
        found[NUM_MISSING] = layout.num_gap_closed
        for rotation, version in copies.items():
            if version:
                found[[ROTATIONS, LAST_UNCLAMPED], version - 1] = rotation
        for r, (span, (version, gap)) in enumerate(zip(spans, copy_and_gap, strict=True)):
            found[[ENDS, COPIES], r] = span.end_slot, version
            if not span.empty:
                found[GAPS, r] = gap
                found[REACHES:, r] = reaches_of(span, gap, live, self._windows)
        return found


def _empty_ranges(fields: int, rows: int, ranges: int) -> NDArray[np.int64]:
    """Ranges in which nothing is seen."""
    found = np.zeros((fields, rows, ranges), dtype=np.int64)
    found[ENDS], found[COPIES], found[LAST_UNCLAMPED] = OPEN_END, -1, UNBOUNDED
    return found
