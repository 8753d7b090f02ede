"""The choice of decode steps that are captured when they recur, without capturing anything."""

from __future__ import annotations

import pytest

from windlass.engine.execution import cuda_graphs
from windlass.engine.execution.cuda_graphs import GraphKey, LazyGraphs


def graphs_of(captured: list[GraphKey]) -> LazyGraphs[str]:
    return LazyGraphs(lambda kind: captured.append(kind) or f"{kind.rows} x {kind.ranges}")  # type: ignore[func-returns-value]


def test_a_step_is_captured_when_it_was_asked_for_a_few_times() -> None:
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    assert [graphs.find(GraphKey(2, 1), ahead=False) for _ in range(3)] == [None, None, (GraphKey(2, 2), "2 x 2")]
    assert (
        graphs.find(GraphKey(2, 2), ahead=False) == graphs.find(GraphKey(1, 2), ahead=True) == (GraphKey(2, 2), "2 x 2")
    )
    assert graphs.find(GraphKey(2, 3), ahead=False) is None
    assert all(graphs.find(GraphKey(1, 2), ahead=True) for _ in range(9)) and captured == [GraphKey(2, 2)], (
        "nothing is captured ahead"
    )


def test_a_wider_one_stands_for_it_meanwhile_unless_it_is_far_wider() -> None:
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    graphs.capture(GraphKey(8, 8))
    assert (
        graphs.find(GraphKey(8, 5), ahead=False)
        == graphs.find(GraphKey(2, 2), ahead=False)
        == (GraphKey(8, 8), "8 x 8")
    )
    assert graphs.find(GraphKey(1, 8), ahead=False) is None
    assert graphs.find(GraphKey(1, 1), ahead=True) == (GraphKey(8, 8), "8 x 8")
    for _ in range(3):
        found = graphs.find(GraphKey(2, 2), ahead=False)
    assert found == (GraphKey(2, 2), "2 x 2")


def test_there_is_a_bound_on_how_many_and_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    for _ in range(4):
        assert graphs.find(GraphKey(cuda_graphs.MAX_RANGE_CELLS // 2, 3), ahead=False) is None
    monkeypatch.setattr(cuda_graphs, "MAX_RANGED_GRAPHS", 2)
    for ranges in (2, 4, 8, 16):
        for _ in range(4):
            graphs.find(GraphKey(512 // ranges, ranges), ahead=False)
    assert captured == graphs.captured == [GraphKey(256, 2), GraphKey(128, 4)]


def test_steps_with_adapters_are_captured_too_and_stand_for_those_without() -> None:
    """And not the reverse. Whatever is missing from steps that are planned ahead, some graph can run the rest."""
    captured: list[GraphKey] = []
    graphs, asked = graphs_of(captured), GraphKey(4, 3, adapted=True)
    graphs.capture(GraphKey(8, 8))
    assert [graphs.find(asked, ahead=False) for _ in range(2)] == [None, None] and captured == [(8, 8, False)]
    found = graphs.find(asked, ahead=False)
    assert found is not None and found[0] == (4, 4, True) and captured[1:] == [(4, 0, True), (4, 4, True)]
    for kind, stands in (
        (GraphKey(2, 2, adapted=True), (4, 4, True)),
        (GraphKey(2, 2), (4, 4, True)),
        (GraphKey(2, adapted=True), (4, 0, True)),
    ):
        later = graphs.find(kind, ahead=True)
        assert later is not None and later[0] == stands
    assert graphs.find(GraphKey(8, adapted=True), ahead=True) is None


def test_those_with_adapters_alone_have_no_bound_but_the_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_RANGED_GRAPHS", 0)
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    for rows in (1, 2, 4, 4096):
        for _ in range(3):
            graphs.find(GraphKey(rows, adapted=True), ahead=False)
    assert [kind.rows for kind in captured] == [1, 2, 4, 4096]


def test_nothing_more_is_captured_behind_an_obstacle() -> None:
    def capture(kind: GraphKey) -> str:
        raise RuntimeError("no\nmore")

    graphs = LazyGraphs(capture)
    for _ in range(9):
        assert graphs.find(GraphKey(2, adapted=True), ahead=False) is None
    assert graphs.obstacle == "a decode step of 2 rows with adapters was not captured: no"
    graphs.capture(GraphKey(4, 2))
    assert graphs.obstacle == "a decode step of 2 rows with adapters was not captured: no"
