"""The estimated memory of all graphs, given the measured memory of some."""

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
from windlass.engine.execution.cuda_graphs import MAX_RANGED_GRAPHS
from windlass.engine.execution.dummy_runs import profile_graph_memory
from windlass.kernels import Graphs

__all__ = ["played_device"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def counted(core: EngineCore, taken: Sequence[int], *, adapted: bool = False) -> int:
    """taken: memory used before and after each capture. adapted: whether there may be adapters."""
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


def test_the_largest_and_another_tell_what_all_take(directory: Path) -> None:
    """Four steps without ranges, and the maximum number of steps with ranges."""
    core = make_core(directory, max_model_len=96)
    assert counted(core, [10, 110, 112, 112, 142, 145]) == 100 + 3 * 2 + 30 + (MAX_RANGED_GRAPHS - 1) * 3


def test_those_with_adapters_count_besides(directory: Path) -> None:
    """As many as without adapters, although none is loaded yet."""
    core = make_core(directory, max_model_len=96)
    taken = [10, 110, 112, 112, 119, 124, 124, 154, 157]
    assert counted(core, taken, adapted=True) == 100 + 3 * 2 + 7 + 3 * 5 + 30 + (MAX_RANGED_GRAPHS - 1) * 3


@pytest.mark.parametrize(
    ("captured", "taken", "want"),
    [
        (1, [10, 110], 4 * 100),
        (2, [10, 110, 112, 112], 100 + 3 * 2),
        (3, [10, 110, 112, 112, 142], 100 + 3 * 2 + MAX_RANGED_GRAPHS * 30),
    ],
)
def test_what_cannot_be_captured_ends_the_count(captured: int, taken: list[int], want: int, directory: Path) -> None:
    core = make_core(directory, max_model_len=96)
    backend = core.runner.decoder.backend
    make, left = backend.make_graph_runner, [None] * captured

    def fails() -> None:
        if not left:
            raise RuntimeError("it cannot be captured")
        left.pop()

    def limited() -> Graphs | None:
        made = make()
        device_of(core.runner.decoder).fails = fails
        return made

    with mock.patch.object(backend, "make_graph_runner", limited):
        assert counted(core, taken) == want


def test_rows_without_room_for_ranges_are_captured_without(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two largest steps, of eight and four rows, have no ranges."""
    monkeypatch.setattr(cuda_graphs, "MAX_RANGE_CELLS", 5)
    core = make_core(directory, max_model_len=96)
    assert counted(core, [10, 110, 112, 120, 150, 153]) == 100 + 3 * 2 + 30 + (MAX_RANGED_GRAPHS - 1) * 3
