"""Range tables, which hold for every position, equal the ranges that `query_ranges` computes for each position."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.engine.cache.non_prefix_reuse import Passage
from windlass.engine.cache.sequence_cache import OPEN_END, SlotLayout, SlotRun
from windlass.engine.execution.device_batch import DeviceQueryRanges
from windlass.engine.execution.query_ranges import RangeTables, pad_range_tables, query_ranges
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import select_backend

NUMBERS = itertools.count()
WINDOWS = [None, 8, 30]


def sequence(*runs: tuple[int, int, int, int], window: int | None = None, sinks: int = 0, **kept: int) -> Any:
    """runs: (first slot, end slot, position as rotated, shift)."""
    layout = SlotLayout(tuple(SlotRun(*run) for run in runs), **kept)
    return SimpleNamespace(layout=layout, window=window, sinks=sinks, slot=SimpleNamespace(seq_id=next(NUMBERS)))


ROWS = {
    "plain": sequence((0, OPEN_END, 0, 0)),
    "shifted": sequence((0, 16, 0, 48), (16, OPEN_END, 64, 0), slot_offset=-48, num_gap_closed=48),
    "moved alike, with holes": sequence(
        (0, 5, 0, 0), (20, 52, 116, -96), (64, 70, 52, 0), (84, 90, 200, -142), (96, OPEN_END, 64, 0), slot_offset=26
    ),
    "passages and a shift": sequence(
        (0, 16, 0, 32), (18, 40, 7, 70), (48, OPEN_END, 99, 0), slot_offset=-20, num_gap_closed=32
    ),
    "window": sequence((0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, slot_offset=-48),
    "sinks": sequence((0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, sinks=3, slot_offset=-48),
    "sinks that layers lose and see": sequence(
        (0, 16, 0, 0), (16, OPEN_END, 64, 0), window=20, sinks=14, slot_offset=-48
    ),
}


@pytest.mark.parametrize("absolute_scores", [False, True])
@pytest.mark.parametrize("names", [["shifted"], ["sinks", "plain"], list(ROWS)], ids=len)
def test_a_steps_versions_follow_from_them(names: list[str], absolute_scores: bool) -> None:
    """Every row and range, at near and distant positions, padded to more rows and ranges."""
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
        still = torch.ones(8), torch.zeros(8)
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
                mine = still if row < size else (got.cos[0, row - size], got.sin[0, row - size])
                copy = wanted - len(rows)
                theirs = still if copy < 0 else (want.cos[0, copy], want.sin[0, copy])
                assert (row if row < size else int(got.sources[row - size])) == b
                assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
            assert int(context[b]) == position - live.layout.num_gap_closed
            if absolute_scores:
                assert got.anchor_cos is not None and got.query_indices is not None
                turned = tables.angles(torch.tensor([rotary]), torch.tensor([-live.layout.num_gap_closed]))[0]
                assert torch.equal(got.anchor_cos[0, b], turned[0, 0])
        assert (got.rows[len(rows) :] == -1).all() and (got.anchor_cos is not None) == absolute_scores


def test_numbers_are_made_anew_where_slots_moved() -> None:
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
def test_a_layout_that_is_no_wider_has_no_more_ranges(absolute_scores: bool) -> None:
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
