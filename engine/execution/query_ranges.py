"""Slot ranges of a step's sequences, and the rotated query copies that attend to them.

A query attends unrotated to keys that are at the position at which they were rotated. For keys at another position, and for
tokens at a fixed distance (sinks, distance-based attention), the query is rotated by the difference: such a copy is an
additional row of q behind the step's own queries. `query_ranges` describes any step. `RangeTables` describes single-token rows
by numbers that stay valid while the device advances on its own; tests compare both.

An example. A stream keeps its first 16 tokens and has dropped the next 48, so its slots 16, 17, ... hold tokens 64, 65, ...,
whose keys were rotated at 64, 65, ... The first 16 keys were rotated at 0 to 15 and are moved directly in front of those, to 48
to 63. A query at position 70, in slot 22, has two spans (slots with the same treatment):

    slots      rotated at  position   offset  shift   rotation  gap
    0 to 15    0 to 15     48 to 63   48      48      -48       0
    16 to 22   64 to 70    64 to 70   48      0       0         0

* offset: position of a key minus its slot. shift: position minus the position at which it was rotated.
* rotation: positions by which the query is rotated. Slot 3 is at position 51, 19 before the query, and was rotated at 3: so the
  query is rotated as if at 22. That is a copy of the query.
* range: a span in the form of `AttentionCall`: its end slot, the row of its query copy, its reach and its gap.
* gap: distance in positions minus distance in slots. If the gap of the dropped tokens were kept (offset 0, shift 0), slot 3
  would be at position 3 and the gap 48: 67 positions from the query, 19 slots.
* reach: number of slots visible to a query, its own included: 20 under a window of 20 positions, 0 where the gap is 48.
* sink: with the first 3 tokens as sinks of a window of 20, and the gap kept, slots 0 to 2 are a span that stays visible. From
  position 22 on, where sinks and window are no longer contiguous, a query attends to them as if from there: at 70 it is rotated
  by -48.
* absolute scores: where scores depend on absolute positions, queries themselves are moved back by the dropped tokens, to 22
  instead of 70; then the rotations are 0 and 48.
* second keys: keys stored a second time, rotated for distant queries (near w, group G, slope of `Distances`); they have a span
  of their own.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.sequence_cache import OPEN_END, UNBOUNDED, SlotLayout
from windlass.engine.execution.input_batch import RunnerSequence
from windlass.engine.model.forward_batch import RotatedQueryCopies
from windlass.engine.rotary.attention_distances import Distances
from windlass.kernels import to_device

# -- spans of one sequence -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Slots of a sequence that its queries treat alike, up to `end_slot`.

    offset: position of a key minus its slot. shift: position minus the position at which it was rotated. empty: no keys.
    sink: whether its tokens stay visible, at the edge of the window; first_sink: the index of its first one among the sinks.
    chunks_back: under dual chunk attention, how many chunks before the query's own it is; 2 for all older ones.
    second_keys: whether it reads the second key copies. reach: see `AttentionCall`; None: as far as the windows allow.
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


def needs_ranges(live: RunnerSequence) -> bool:
    """Whether a sequence's queries need ranges, apart from its distance rule."""
    return live.window is not None or not live.layout.is_plain


def attention_chunks_of(distances: Distances, start: int, count: int) -> list[tuple[int, int]]:
    """Split `count` tokens from `start` on into (first index, tokens) parts whose queries have the same ranges."""
    size, pieces = distances.chunk, []
    while size is not None and count:
        taken = min(count, size - start % size)
        pieces.append((start, taken))
        start, count = start + taken, count - taken
    return pieces or [(start, count)]


def spans_of(live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[SlotSpan]:
    """The spans of a sequence's slots, in order, the last one open-ended; valid for every token until its layout changes.

    windows: the distinct windows of the layers, None for none. Sinks are split where one window always sees them and another
    loses them.
    """
    layout = live.layout
    spans: list[SlotSpan] = []
    end, sinks = 0, _sink_groups(live, windows)
    for run in layout.runs:
        if run.first_slot > end:
            spans.append(SlotSpan(run.first_slot, 0, 0, empty=True))
        first, end = run.first_slot, run.end_slot
        for first_sink, last_sink in sinks:
            edge = min(layout.first_position + last_sink - run.offset, end)  # the first slot after them
            if edge > first:
                spans.append(SlotSpan(edge, run.offset, run.shift, sink=True, first_sink=first_sink))
                first = edge
        if first < end:
            spans.append(SlotSpan(end, run.offset, run.shift))
    return spans


def _sink_groups(live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[tuple[int, int]]:
    """First and end of the groups of sinks that every window treats alike, in order."""
    if live.window is None or not live.sinks:
        return []
    edges = sorted({0, live.sinks, *(first_permanent_sink(live, window) for window in windows)})
    return list(pairwise(edges))


def first_permanent_sink(live: RunnerSequence, window: int | None) -> int:
    """The index of the first sink that layers with this window see at any length of the text; `live.sinks` if there is none.

    Sink i ends up `live.window + live.sinks - 1 - i` positions before the query, and no further away.
    """
    assert live.window is not None
    return 0 if window is None else min(live.sinks, max(0, live.window + live.sinks - window))


def last_unclamped_position(span: SlotSpan, live: RunnerSequence) -> int:
    """The last position from which a span is at its true distance; later queries are rotated back to that position."""
    if not span.sink:
        return UNBOUNDED
    assert live.window is not None
    return live.layout.first_position + live.sinks + live.window - 1


def reaches_of(span: SlotSpan, gap: int, live: RunnerSequence, windows: abc.Sequence[int | None]) -> list[int]:
    """The reach under each window of queries into a span with this gap."""
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


# -- ranges of a step ------------------------------------------------------------------------------------------------

_NO_KEYS = -1  # the row of a range in which no key is visible


def query_ranges(
    chunks: abc.Sequence[tuple[RunnerSequence, int, int]],
    rules: abc.Sequence[Distances],
    windows: abc.Sequence[int | None],
    rotate: abc.Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64] | None], tuple[Tensor, Tensor]],
    *,
    absolute_scores: bool,
    second_key_slots: abc.Sequence[int] = (),
) -> RotatedQueryCopies:
    """The ranges of chunks (sequence, position of the first query, number of queries), in the order of their rows.

    rules: the distance rule of each chunk; under dual chunk attention a chunk is one of `attention_chunks_of`.
    windows: the distinct windows of the layers, None for none.
    rotate: returns cos and sin, [G, V, rotary_dim / 2] on the device, of V copies, given their tokens, their rotations in
    positions and the share of the frequencies by which each is rotated, None for all of them in full.
    absolute_scores: queries are moved back by the tokens dropped before them, so that retained tokens need no rotation and
    later ones do.
    second_key_slots: for each chunk, the number of leading slots that hold second key copies; empty if no chunk has any.
    """
    spans = [
        _spans_for_rule(rule, live, windows, position, count, second_keys)
        for (live, position, count), rule, second_keys in zip(
            chunks, rules, second_key_slots or [0] * len(chunks), strict=True
        )
    ]
    num_tokens = sum(count for _, _, count in chunks)
    shape = len(chunks), max(map(len, spans))
    ends, rows = np.full(shape, OPEN_END, dtype=np.int64), np.full(shape, _NO_KEYS, dtype=np.int64)
    unrotated_rows, reaches = rows.copy(), np.zeros((len(windows), *shape), dtype=np.int64)
    gaps = np.zeros(shape, dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    sources, rotations, slopes = [nothing], [nothing], [np.zeros(0)]
    token = num_copies = 0
    for b, ((live, position, count), own, rule) in enumerate(zip(chunks, spans, rules, strict=True)):
        anchor_shift = live.layout.num_gap_closed if absolute_scores else 0
        positions = np.arange(position, position + count, dtype=np.int64)
        rows_of: dict[tuple[int, bool, int, bool], int] = {}  # spans with the same rotations share a copy
        for r, span in enumerate(own):
            ends[b, r] = span.end_slot
            if span.empty:
                continue
            gap = gaps[b, r] = own[-1].offset - span.offset
            reaches[:, b, r] = reaches_of(span, gap, live, windows)
            unrotated_rows[b, r] = token
            key = span.shift, span.sink, span.chunks_back, span.second_keys
            if key in rows_of:
                rows[b, r] = rows_of[key]
                continue
            rotation = anchor_shift - span.shift + np.minimum(last_unclamped_position(span, live) - positions, 0)
            if span.chunks_back:
                rotation += _chunk_rotation(rule, positions, span.chunks_back)
            if span.second_keys:
                rotation += rotation_to_second_keys(rule, positions)
            rows[b, r] = token
            # Sinks have a range of their own even if no query of this chunk is rotated for them: adjacent ranges with the same
            # rotation may be summed as one, and the order of a token's sum must not depend on its chunk.
            if span.sink or rotation.any():
                rows[b, r] = num_tokens + num_copies
                sources.append(np.arange(token, token + count, dtype=np.int64))
                rotations.append(rotation)
                slopes.append(np.full(count, 1 - rule.slope if span.second_keys else 1.0))
                num_copies += count
            rows_of[key] = int(rows[b, r])
        token += count
    tokens = np.concatenate(sources)
    slowed = num_copies > 0 and any(rule.slope for rule in rules)
    cos, sin = rotate(tokens, np.concatenate(rotations), np.concatenate(slopes) if slowed else None)
    arrays = {"ends": ends, "rows": rows, "unrotated_rows": unrotated_rows, "reaches": reaches, "gaps": gaps}
    tensors = {name: to_device(torch.from_numpy(array), cos.device) for name, array in arrays.items()}
    return RotatedQueryCopies(**tensors, sources=to_device(torch.from_numpy(tokens), cos.device), cos=cos, sin=sin)


def _spans_for_rule(
    rule: Distances,
    live: RunnerSequence,
    windows: abc.Sequence[int | None],
    position: int,
    count: int,
    second_key_slots: int,
) -> list[SlotSpan]:
    """The spans of `count` queries from a position on."""
    if rule.chunk is not None:
        return _chunk_spans(position // rule.chunk, rule.chunk)
    if rule.near is not None:
        return _second_key_spans(rule.near, position + count - rule.near, second_key_slots)
    return spans_of(live, windows)


def _second_key_spans(near: int, end: int, second_key_slots: int) -> list[SlotSpan]:
    """The second key copies that any query is distant from, and then the keys nearby."""
    spans = [SlotSpan(end, 0, 0, second_keys=True, reach=-second_key_slots - near)] if end > 0 else []
    if max(end, 0) < second_key_slots:
        spans.append(SlotSpan(second_key_slots, 0, 0, empty=True))
    return [*spans, SlotSpan(OPEN_END, 0, 0, reach=near)]


def _chunk_spans(number: int, size: int) -> list[SlotSpan]:
    """For queries of chunk `number`: all chunks before the previous one, the previous one, and their own."""
    spans = [SlotSpan((number - 1) * size, 0, 0, chunks_back=2)] if number > 1 else []
    spans += [SlotSpan(number * size, 0, 0, chunks_back=1)] if number else []
    return [*spans, SlotSpan(OPEN_END, 0, 0)]


def _chunk_rotation(rule: Distances, positions: NDArray[np.int64], chunks_back: int) -> NDArray[np.int64]:
    """Rotations, in positions, of queries that attend to keys `chunks_back` chunks before their own."""
    assert rule.chunk is not None
    within, farthest = positions % rule.chunk, rule.most - 1
    return farthest - within if chunks_back > 1 else np.minimum(within + rule.chunk, farthest) - within


def rotation_to_second_keys(rule: Distances, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rotations, in positions, of queries that attend to second key copies, at 1 - slope of the frequencies.

    With a group a query at i is then at i // G + w - w // G; without one at w + (i - w) slope, which is (i - w)(1 - slope) less.
    """
    near, group = rule.near, rule.group
    if near is None:
        raise ValueError("the rule has no second key copies")
    return near - positions if group is None else positions // group + near - near // group - positions


def second_key_positions(
    rules: abc.Sequence[Distances], counts: NDArray[np.int64], positions: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64] | None]:
    """For T tokens: whether each has a second key copy, the position of that, and its share of the frequencies.

    rules, counts: the distance rule and number of tokens of each chunk. positions: [T]. The shares are None if all are 1.
    """
    has_copy = np.array([rule.has_second_keys for rule in rules]).repeat(counts)
    slopes = np.array([rule.slope if rule.has_second_keys and rule.group is None else 1.0 for rule in rules])
    groups = np.array([rule.group or 1 for rule in rules], dtype=np.int64).repeat(counts)
    return has_copy, positions // groups, slopes.repeat(counts) if (slopes != 1).any() else None


# -- ranges of rows that the device advances -------------------------------------------------------------------------

# Fields of a range table, int64 [REACHES + W, ranges] for a row under W windows. Per range: its end slot; its query copy (0:
# the query itself, -1: none); its gap. In every range: the row's number of dropped tokens. In range n - 1, of the row's copy
# n: its rotation in positions, and the last position that is rotated by no less. Then the reach under each window.
ENDS, COPIES, GAPS, NUM_MISSING, ROTATIONS, LAST_UNCLAMPED, REACHES = range(7)


class RangeTables:
    """Builds range tables, and caches those of the last step.

    windows: the distinct windows of the layers, None for none. absolute_scores: see `query_ranges`.
    """

    def __init__(self, windows: abc.Sequence[int | None], *, absolute_scores: bool) -> None:
        self._windows, self._absolute_scores = windows, absolute_scores
        self._cached: dict[int, tuple[SlotLayout, NDArray[np.int64]]] = {}

    def of(self, rows: abc.Sequence[RunnerSequence]) -> list[NDArray[np.int64]]:
        """The range tables of single tokens of these sequences; their numbers of ranges differ."""
        known, found = self._cached, []
        self._cached = {}
        for live in rows:
            seq_id = live.slot.seq_id
            earlier = known.get(seq_id) or self._cached.get(seq_id)
            if earlier is None or earlier[0] is not live.layout:
                earlier = live.layout, self.build(live)
            self._cached[seq_id] = earlier
            found.append(earlier[1])
        return found

    def build(self, live: RunnerSequence) -> NDArray[np.int64]:
        """The range table of a sequence, valid until its layout changes."""
        spans, layout = spans_of(live, self._windows), live.layout
        anchor_shift = layout.num_gap_closed if self._absolute_scores else 0
        copies = {(0, UNBOUNDED): 0}  # by rotation and last unclamped position
        copy_and_gap: list[tuple[int, int]] = []  # of each span
        for span in spans:
            rotation = anchor_shift - span.shift, last_unclamped_position(span, live)
            copy = -1 if span.empty else copies.setdefault(rotation, len(copies))
            copy_and_gap.append((copy, spans[-1].offset - span.offset))
        found = _empty_ranges(REACHES + len(self._windows), 1, max(len(spans), len(copies)))[:, 0]
        found[NUM_MISSING] = layout.num_gap_closed
        for rotation, copy in copies.items():
            if copy:
                found[[ROTATIONS, LAST_UNCLAMPED], copy - 1] = rotation
        for r, (span, (copy, gap)) in enumerate(zip(spans, copy_and_gap, strict=True)):
            found[[ENDS, COPIES], r] = span.end_slot, copy
            if not span.empty:
                found[GAPS, r] = gap
                found[REACHES:, r] = reaches_of(span, gap, live, self._windows)
        return found


def pad_range_tables(tables: abc.Sequence[NDArray[np.int64]], rows: int, ranges: int) -> NDArray[np.int64]:
    """[REACHES + W, rows, ranges], at least as many as there are; no key is visible in the additional ones."""
    found = _empty_ranges(len(tables[0]), rows, ranges)
    for row, table in enumerate(tables):
        found[:, row, : table.shape[1]] = table
    return found


def _empty_ranges(fields: int, rows: int, ranges: int) -> NDArray[np.int64]:
    """Ranges in which no key is visible."""
    found = np.zeros((fields, rows, ranges), dtype=np.int64)
    found[ENDS], found[COPIES], found[LAST_UNCLAMPED] = OPEN_END, -1, UNBOUNDED
    return found
