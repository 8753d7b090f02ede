"""Rotated query copies and key ranges: against a count slot by slot, and range tables against the ranges of each position."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.engine.cache.non_prefix_reuse import Passage
from windlass.engine.cache.sequence_cache import OPEN_END, UNBOUNDED, SlotLayout, SlotRun
from windlass.engine.execution.device_batch import DeviceQueryRanges
from windlass.engine.execution.query_ranges import (
    COPIES,
    LAST_UNCLAMPED,
    ROTATIONS,
    RangeTables,
    pad_range_tables,
    query_ranges,
    spans_of,
)
from windlass.engine.model.forward_batch import RotatedQueryCopies
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import select_backend

NUMBERS = itertools.count()


def sequence(*runs: tuple[int, int, int, int], window: int | None = None, sinks: int = 0, **kept: int) -> Any:
    """Make a sequence of runs (first slot, end slot, position as rotated, shift)."""
    layout = SlotLayout(tuple(SlotRun(*run) for run in runs), **kept)
    return SimpleNamespace(layout=layout, window=window, sinks=sinks, slot=SimpleNamespace(seq_id=next(NUMBERS)))


def ranges_of(chunks: Any, rules: Any, windows: Any, *, absolute_scores: bool) -> RotatedQueryCopies:
    """`query_ranges` with rotations in positions instead of cosines."""

    def rotate(sources: Any, rotations: Any, slopes: Any) -> tuple[Tensor, Tensor]:
        assert len(rotations) == len(sources) and slopes is None
        return torch.from_numpy(rotations), torch.zeros(0)

    return query_ranges(chunks, rules, windows, rotate, absolute_scores=absolute_scores)


ALTERNATING = [(0, 16, 0, 0), (16, 32, 116, -100), (32, 40, 32, 0), (40, 64, 140, -100), (64, OPEN_END, 64, 0)]


def test_runs_with_one_shift_share_a_query_copy() -> None:
    found = ranges_of([(sequence(*ALTERNATING), 64, 3)], [PLAIN_DISTANCES], [None], absolute_scores=False)
    assert found.ends[0].tolist() == [16, 32, 40, 64, OPEN_END]
    assert found.rows[0].tolist() == [0, 3, 0, 3, 0]  # three queries, then one copy of each
    assert found.sources.tolist() == [0, 1, 2] and set(found.cos.tolist()) == {100}
    assert found.unrotated_rows[0].tolist() == [0] * 5 and (found.reaches == UNBOUNDED).all()


def test_each_sequence_has_its_own_query_copies() -> None:
    other = sequence((0, 16, 300, -300), (16, OPEN_END, 16, 0))
    found = ranges_of(
        [(sequence(*ALTERNATING), 64, 1), (other, 16, 2)],
        [PLAIN_DISTANCES, PLAIN_DISTANCES],
        [None, 8],
        absolute_scores=False,
    )
    assert found.rows.tolist() == [[0, 3, 0, 3, 0], [4, 1, -1, -1, -1]]
    assert found.sources.tolist() == [0, 1, 2] and found.cos.tolist() == [100, 300, 300]
    assert found.reaches.shape == (2, 2, 5) and (found.reaches[1, 0] == 8).all()


@pytest.mark.parametrize("count", [1, 5])
def test_sinks_have_their_own_query_copy(count: int) -> None:
    live = sequence((0, OPEN_END, 0, 0), window=8, sinks=4)
    found = ranges_of([(live, 20, count)], [PLAIN_DISTANCES], [None], absolute_scores=False)
    assert found.ends[0].tolist() == [4, OPEN_END]
    assert found.rows[0].tolist() == [count, 0]
    # A query at p attends as if at 11, the last position at which sinks and window are contiguous.
    assert found.cos.tolist() == [11 - p for p in range(20, 20 + count)]
    assert found.reaches[0, 0].tolist() == [UNBOUNDED, 8]


def test_the_example_of_the_module_docstring() -> None:
    """Its values for a query at position 70, in slot 22."""
    closed = sequence((0, 16, 0, 48), (16, OPEN_END, 64, 0), num_gap_closed=48, slot_offset=-48)
    assert [(span.offset, span.shift) for span in spans_of(closed, [None])] == [(48, 48), (48, 0)]
    found = ranges_of([(closed, 70, 1)], [PLAIN_DISTANCES], [None, 20], absolute_scores=False)
    assert found.ends.tolist() == [[16, OPEN_END]] and found.rows.tolist() == [[1, 0]]
    assert found.cos.tolist() == [-48] and found.gaps.tolist() == [[0, 0]]
    assert found.reaches[:, 0].tolist() == [[UNBOUNDED] * 2, [20, 20]]
    absolute_scores = ranges_of([(closed, 70, 1)], [PLAIN_DISTANCES], [None], absolute_scores=True)
    assert absolute_scores.rows.tolist() == [[0, 1]] and absolute_scores.cos.tolist() == [48]

    left_open = [(0, 16, 0, 0), (16, OPEN_END, 64, 0)]
    found = ranges_of([(sequence(*left_open, slot_offset=-48), 70, 1)], [PLAIN_DISTANCES], [20], absolute_scores=False)
    assert found.gaps.tolist() == [[48, 0]] and found.reaches[0].tolist() == [[0, 20]]
    sinks = sequence(*left_open, window=20, sinks=3, slot_offset=-48)
    found = ranges_of([(sinks, 70, 1)], [PLAIN_DISTANCES], [None], absolute_scores=False)
    assert found.ends[0].tolist() == [3, 16, OPEN_END] and found.reaches[0, 0].tolist() == [UNBOUNDED, 0, 20]
    assert found.cos.tolist() == [-48] and found.rows[0].tolist() == [1, 0, 0]
    numbers = RangeTables([None], absolute_scores=False).build(sinks)
    assert numbers[COPIES].tolist() == [1, 0, 0] and (numbers[ROTATIONS, 0], numbers[LAST_UNCLAMPED, 0]) == (0, 22)
    numbers = RangeTables([None], absolute_scores=False).build(closed)
    assert numbers[COPIES].tolist() == [1, 0] and (numbers[ROTATIONS, 0], numbers[LAST_UNCLAMPED, 0]) == (
        -48,
        UNBOUNDED,
    )


WINDOWS = [None, 8, 30]


ROWS = {
    "plain": sequence((0, OPEN_END, 0, 0)),
    "shifted": sequence((0, 16, 0, 48), (16, OPEN_END, 64, 0), slot_offset=-48, num_gap_closed=48),
    "equal shifts, with holes": sequence(
        (0, 5, 0, 0), (20, 52, 116, -96), (64, 70, 52, 0), (84, 90, 200, -142), (96, OPEN_END, 64, 0), slot_offset=26
    ),
    "passages and a shift": sequence(
        (0, 16, 0, 32), (18, 40, 7, 70), (48, OPEN_END, 99, 0), slot_offset=-20, num_gap_closed=32
    ),
    "window": sequence((0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, slot_offset=-48),
    "sinks": sequence((0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, sinks=3, slot_offset=-48),
    "sinks in and outside windows": sequence(
        (0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, sinks=14, slot_offset=-48
    ),
}


@pytest.mark.parametrize("absolute_scores", [False, True])
@pytest.mark.parametrize("names", [["shifted"], ["sinks", "plain"], list(ROWS)], ids=len)
def test_range_tables_give_the_ranges_of_every_position(names: list[str], absolute_scores: bool) -> None:
    """Each row and range, at near and distant positions, padded to more rows and ranges."""
    rows = [ROWS[name] for name in names]
    base = RotaryBase(1e4, 16, 16, 4096)
    tables = RotaryTables(2, [base], select_backend("cpu"))
    rotary = tables.acquire([resolve(RopeScaling.from_dict({"rope_type": "default"}), base, 4096)])
    device = DeviceQueryRanges(tables, cells=128, windows=len(WINDOWS), absolute_scores=absolute_scores)
    numbers = RangeTables(WINDOWS, absolute_scores=absolute_scores)
    found = numbers.of(rows)
    assert numbers.of(rows)[0] is found[0]
    size, ranges = 8, 16
    assert max(table.shape[1] for table in found) <= 9
    padded = torch.from_numpy(pad_range_tables(found, size, ranges).ravel())
    device.tables[: len(padded)] = padded
    for position in (70, 85, 3000):
        positions = torch.full((size,), position)
        want = query_ranges(
            [(live, position, 1) for live in rows],
            [PLAIN_DISTANCES] * len(rows),
            WINDOWS,
            lambda sources, rotations, _: tables.angles(
                torch.full((len(sources),), rotary), torch.from_numpy(rotations)
            ),
            absolute_scores=absolute_scores,
        )
        unrotated = torch.ones(8), torch.zeros(8)
        got, context = device.query_copies(size, ranges, positions, torch.full((size,), rotary))
        assert got.cos.shape == (1, size * (ranges - 1), 8)
        for b, live in enumerate(rows):
            count = want.ends.shape[1]
            assert got.ends[b, :count].tolist() == want.ends[b].tolist()
            assert got.unrotated_rows[b, :count].tolist() == want.unrotated_rows[b].tolist()
            assert got.reaches[:, b, :count].tolist() == want.reaches[:, b].tolist()
            assert got.gaps[b, :count].tolist() == want.gaps[b].tolist()
            assert (got.rows[b, count:] == -1).all() and (got.ends[b, count:] == OPEN_END).all()
            for row, wanted in zip(got.rows[b, :count].tolist(), want.rows[b].tolist(), strict=True):
                assert (row < 0) == (wanted < 0)
                if row < 0:
                    continue
                mine = unrotated if row < size else (got.cos[0, row - size], got.sin[0, row - size])
                copy = wanted - len(rows)
                theirs = unrotated if copy < 0 else (want.cos[0, copy], want.sin[0, copy])
                assert (row if row < size else int(got.sources[row - size])) == b
                assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
            assert int(context[b]) == position - live.layout.num_gap_closed
            if absolute_scores:
                assert got.anchor_cos is not None and got.query_indices is not None
                turned = tables.angles(torch.tensor([rotary]), torch.tensor([-live.layout.num_gap_closed]))[0]
                assert torch.equal(got.anchor_cos[0, b], turned[0, 0])
        assert (got.rows[len(rows) :] == -1).all() and (got.anchor_cos is not None) == absolute_scores


def test_range_tables_are_rebuilt_after_a_shift() -> None:
    live, numbers = sequence((0, OPEN_END, 0, 0), window=20), RangeTables([None], absolute_scores=False)
    before = numbers.of([live])[0]
    live.layout = SlotLayout((SlotRun(0, 16, 0, 16), SlotRun(16, OPEN_END, 32)), -16, 16, 16)
    after = numbers.of([live])[0]
    assert before.shape[1] == 1 and after.shape[1] == 2


def random_layout(rng: random.Random) -> SlotLayout:
    """The layout after passages and shifts in random order."""
    layout, taken = SlotLayout.starting_at(0), rng.randrange(40)
    for _ in range(rng.randrange(1, 7)):
        if rng.random() < 0.6:
            passage = Passage(0, rng.randrange(1, 40), (), rng.randrange(16), rng.choice((0, 7, 16, taken)))
            layout = layout.with_passage(taken, passage, 16)
            taken = layout.runs[-1].first_slot
        elif taken >= 32:
            first = rng.randrange(taken // 16 - 1)
            layout, taken = (
                layout.with_range_removed(first * 16, first * 16 + 16, close_gap=rng.random() < 0.8),
                taken - 16,
            )
        taken += rng.randrange(30)
    return layout


@pytest.mark.parametrize("absolute_scores", [False, True])
def test_layouts_that_are_no_wider_have_no_more_ranges(absolute_scores: bool) -> None:
    rng, narrow, wide = random.Random(5), 0, 0
    for _ in range(2000):
        before = random_layout(rng)
        if before.is_plain:
            continue
        first = rng.randrange(4) * 16
        after = before.with_range_removed(first, first + 16, close_gap=True)
        ranges = []
        for layout in (before, after):
            live = SimpleNamespace(layout=layout, window=None, sinks=0, slot=SimpleNamespace(seq_id=next(NUMBERS)))
            (table,) = RangeTables(WINDOWS, absolute_scores=absolute_scores).of([live])
            ranges.append(table.shape[1])
        if after.is_no_wider_than(before):
            narrow += 1
            assert ranges[1] <= ranges[0], (before, after)
        wide += ranges[1] > ranges[0]
    assert narrow > 300 and wide > 30
