"""Engines on a played device with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.device import DEVICE
from helpers.engines import make_core
from helpers.every_request import Results
from helpers.played_graphs import PlayedBackend, PlayedGraphs

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.execution.proposers import DraftModelProposer
from windlass.engine.model.decoder import Decoder
from windlass.kernels import backend_selector


@pytest.fixture(autouse=True)
def played_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU as a device with graphs."""
    if DEVICE != "cpu":
        pytest.skip("plays a device on a CPU")
    _play(monkeypatch)


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the GPU of the tests, or the CPU as a device with graphs."""
    if DEVICE == "cpu":
        _play(monkeypatch)


def _play(monkeypatch: pytest.MonkeyPatch) -> None:
    own = backend_selector._NativeBackend(lambda options: None, PlayedBackend, narrow=False)
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {"cpu": own})


def graphed(directory: Path, **options: Any) -> tuple[EngineCore, PlayedGraphs]:
    """Return an engine that has captured its decode steps, and its device."""
    core = make_core(directory, **options)
    proposer = core.runner.proposer
    assert core.runner.graphs is not None and (
        not isinstance(proposer, DraftModelProposer) or proposer.graphs is not None
    )
    for graphs in (core.runner.graphs, None if proposer is None else proposer.graphs):
        if graphs is not None:
            graphs.capture(graphs.sizes)
            assert graphs.obstacle is None
    return core, device_of(core.runner.decoder)


def kinds_that_stand(core: EngineCore) -> list[GraphKey]:
    """Record which captured graphs with ranges or adapters later steps use, in order."""
    found, graphs = list[GraphKey](), core.runner.graphs
    assert graphs is not None
    find = graphs.lazy_graphs.find

    def noted(kind: GraphKey, *, ahead: bool) -> Any:
        one = find(kind, ahead=ahead)
        found.extend([] if one is None else [one[0]])
        return one

    graphs.lazy_graphs.find = noted  # type: ignore[method-assign]
    return found


def device_of(decoder: Decoder) -> PlayedGraphs:
    assert isinstance(decoder.backend, PlayedBackend)
    return decoder.backend.played


def texts(results: Results) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """Return tokens and finish reason of each sample."""
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}
