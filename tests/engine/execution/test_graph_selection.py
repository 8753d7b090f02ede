"""Choice of the decode steps to capture, and the estimated memory of their graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_helpers.played_engines import device_of, played_device
from helpers.engines import make_core
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution import cuda_graphs
from windlass.engine.execution.cuda_graphs import MAX_RANGED_GRAPHS, GraphKey, LazyGraphs
from windlass.engine.execution.dummy_runs import profile_graph_memory
from windlass.kernels import Graphs


def graphs_of(captured: list[GraphKey]) -> LazyGraphs[str]:
    return LazyGraphs(lambda kind: captured.append(kind) or f"{kind.rows} x {kind.ranges}")


def test_a_step_is_captured_after_a_few_requests() -> None:
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    assert [graphs.find(GraphKey(2, 1), ahead=False) for _ in range(3)] == [None, None, (GraphKey(2, 2), "2 x 2")]
    assert (
        graphs.find(GraphKey(2, 2), ahead=False) == graphs.find(GraphKey(1, 2), ahead=True) == (GraphKey(2, 2), "2 x 2")
    )
    assert graphs.find(GraphKey(2, 3), ahead=False) is None
    assert all(graphs.find(GraphKey(1, 2), ahead=True) for _ in range(9)) and captured == [GraphKey(2, 2)], (
        "no graph is captured for a step planned ahead"
    )


def test_a_wider_graph_is_used_unless_it_is_far_wider() -> None:
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


def test_number_and_size_of_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    for _ in range(4):
        assert graphs.find(GraphKey(cuda_graphs.MAX_RANGE_CELLS // 2, 3), ahead=False) is None
    monkeypatch.setattr(cuda_graphs, "MAX_RANGED_GRAPHS", 2)
    for ranges in (2, 4, 8, 16):
        for _ in range(4):
            graphs.find(GraphKey(512 // ranges, ranges), ahead=False)
    assert captured == graphs.captured == [GraphKey(256, 2), GraphKey(128, 4)]


def test_graphs_with_adapters_run_steps_without() -> None:
    """Steps with adapters need graphs with adapters. Some graph runs each step that is planned ahead."""
    captured: list[GraphKey] = []
    graphs, wanted = graphs_of(captured), GraphKey(4, 3, adapted=True)
    graphs.capture(GraphKey(8, 8))
    assert [graphs.find(wanted, ahead=False) for _ in range(2)] == [None, None] and captured == [(8, 8, False)]
    found = graphs.find(wanted, ahead=False)
    assert found is not None and found[0] == (4, 4, True) and captured[1:] == [(4, 0, True), (4, 4, True)]
    for kind, used in (
        (GraphKey(2, 2, adapted=True), (4, 4, True)),
        (GraphKey(2, 2), (4, 4, True)),
        (GraphKey(2, adapted=True), (4, 0, True)),
    ):
        later = graphs.find(kind, ahead=True)
        assert later is not None and later[0] == used
    assert graphs.find(GraphKey(8, adapted=True), ahead=True) is None


def test_graphs_with_adapters_and_without_ranges_are_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_RANGED_GRAPHS", 0)
    captured: list[GraphKey] = []
    graphs = graphs_of(captured)
    for rows in (1, 2, 4, 4096):
        for _ in range(3):
            graphs.find(GraphKey(rows, adapted=True), ahead=False)
    assert [kind.rows for kind in captured] == [1, 2, 4, 4096]


def test_no_graph_is_captured_after_a_failure() -> None:
    def capture(kind: GraphKey) -> str:
        raise RuntimeError("no\nmore")

    graphs = LazyGraphs(capture)
    for _ in range(9):
        assert graphs.find(GraphKey(2, adapted=True), ahead=False) is None
    assert graphs.obstacle == "a decode step of 2 rows with adapters was not captured: no"
    graphs.capture(GraphKey(4, 2))
    assert graphs.obstacle == "a decode step of 2 rows with adapters was not captured: no"


__all__ = ["played_device"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def estimate(core: EngineCore, taken: Sequence[int], *, adapted: bool = False) -> int:
    """Estimated memory of all graphs.

    taken: memory used before and after each capture. adapted: whether there may be adapters.
    """
    memory = mock.Mock()
    memory.used_by_process.side_effect = taken
    found = profile_graph_memory(
        core.runner.decoder,
        memory,
        cache_dtype=torch.float32,
        block_size=16,
        max_rows=8,
        max_blocks=6,
        adapters=core.adapters.loaded if adapted else None,
    )
    assert memory.used_by_process.call_count == len(taken)
    return found


def test_graph_memory_is_extrapolated_from_two_graphs(directory: Path) -> None:
    """Four steps without ranges, and the maximum number of steps with ranges."""
    core = make_core(directory, max_model_len=96)
    assert estimate(core, [10, 110, 112, 112, 142, 145]) == 100 + 3 * 2 + 30 + (MAX_RANGED_GRAPHS - 1) * 3


def test_graph_memory_counts_graphs_with_adapters(directory: Path) -> None:
    """As many as graphs without adapters, although no adapter is loaded yet."""
    core = make_core(directory, max_model_len=96)
    taken = [10, 110, 112, 112, 119, 124, 124, 154, 157]
    assert estimate(core, taken, adapted=True) == 100 + 3 * 2 + 7 + 3 * 5 + 30 + (MAX_RANGED_GRAPHS - 1) * 3


@pytest.mark.parametrize(
    ("captured", "taken", "want"),
    [
        (1, [10, 110], 4 * 100),
        (2, [10, 110, 112, 112], 100 + 3 * 2),
        (3, [10, 110, 112, 112, 142], 100 + 3 * 2 + MAX_RANGED_GRAPHS * 30),
    ],
)
def test_graph_memory_is_counted_until_a_capture_fails(
    captured: int, taken: list[int], want: int, directory: Path
) -> None:
    core = make_core(directory, max_model_len=96)
    backend = core.runner.decoder.backend
    make, left = backend.make_graph_runner, [None] * captured

    def fails() -> None:
        if not left:
            raise RuntimeError("not permitted")
        left.pop()

    def limited() -> Graphs | None:
        made = make()
        device_of(core.runner.decoder).fails = fails
        return made

    with mock.patch.object(backend, "make_graph_runner", limited):
        assert estimate(core, taken) == want


def test_graph_memory_of_rows_without_ranges(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two largest steps, of eight and four rows, have no ranges."""
    monkeypatch.setattr(cuda_graphs, "MAX_RANGE_CELLS", 5)
    core = make_core(directory, max_model_len=96)
    assert estimate(core, [10, 110, 112, 120, 150, 153]) == 100 + 3 * 2 + 30 + (MAX_RANGED_GRAPHS - 1) * 3
