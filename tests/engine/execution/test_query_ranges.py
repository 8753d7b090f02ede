"""Query copies and ranges, against a count slot by slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.engine.cache.sequence_cache import OPEN_END, UNBOUNDED, SlotLayout, SlotRun
from windlass.engine.execution.query_ranges import (
    COPIES,
    LAST_UNCLAMPED,
    ROTATIONS,
    RangeTables,
    query_ranges,
    spans_of,
)
from windlass.engine.model.forward_batch import RotatedQueryCopies
from windlass.engine.rotary.attention_distances import PLAIN_DISTANCES


def sequence(*runs: tuple[int, int, int, int], window: int | None = None, sinks: int = 0, **kept: int) -> Any:
    """runs: (first slot, end slot, position as rotated, shift)."""
    layout = SlotLayout(tuple(SlotRun(*run) for run in runs), **kept)
    return SimpleNamespace(layout=layout, window=window, sinks=sinks)


def ranges_of(chunks: Any, rules: Any, windows: Any, *, absolute_scores: bool) -> RotatedQueryCopies:
    """`query_ranges` with the rotations, in positions, in place of their cosines."""

    def rotate(sources: Any, rotations: Any, slopes: Any) -> tuple[Tensor, Tensor]:
        assert len(rotations) == len(sources) and slopes is None
        return torch.from_numpy(rotations), torch.zeros(0)

    return query_ranges(chunks, rules, windows, rotate, absolute_scores=absolute_scores)


ALTERNATING = [(0, 16, 0, 0), (16, 32, 116, -100), (32, 40, 32, 0), (40, 64, 140, -100), (64, OPEN_END, 64, 0)]


def test_runs_moved_alike_share_a_version() -> None:
    found = ranges_of([(sequence(*ALTERNATING), 64, 3)], [PLAIN_DISTANCES], [None], absolute_scores=False)
    assert found.ends[0].tolist() == [16, 32, 40, 64, OPEN_END]
    assert found.rows[0].tolist() == [0, 3, 0, 3, 0]  # three queries, then one copy of each
    assert found.sources.tolist() == [0, 1, 2] and set(found.cos.tolist()) == {100}
    assert found.unrotated_rows[0].tolist() == [0] * 5 and (found.reaches == UNBOUNDED).all()


def test_each_sequence_has_versions_of_its_own() -> None:
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
def test_sinks_are_met_from_the_edge_and_share_nothing_with_what_follows(count: int) -> None:
    live = sequence((0, OPEN_END, 0, 0), window=8, sinks=4)
    found = ranges_of([(live, 20, count)], [PLAIN_DISTANCES], [None], absolute_scores=False)
    assert found.ends[0].tolist() == [4, OPEN_END]
    assert found.rows[0].tolist() == [count, 0]
    # A query at p attends as if at 11, the last position at which sinks and window are contiguous.
    assert found.cos.tolist() == [11 - p for p in range(20, 20 + count)]
    assert found.reaches[0, 0].tolist() == [UNBOUNDED, 8]


def test_the_example_in_the_module() -> None:
    """The values in its docstring for a query at position 70, in slot 22."""
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
