"""Engines on a played device with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.engines import make_core
from helpers.every_request import Results
from helpers.played_graphs import PlayedBackend, PlayedGraphs

from windlass.engine.core.engine_core import EngineCore
from windlass.kernels import binding


@pytest.fixture(autouse=True)
def played_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for such a device."""
    own = binding._Own(lambda options: None, PlayedBackend, narrow=False)
    monkeypatch.setattr(binding, "_OWN_KERNELS", {"cpu": own})


def graphed(directory: Path, **options: Any) -> tuple[EngineCore, PlayedGraphs]:
    """An engine that has captured its decode steps, and its device."""
    core = make_core(directory, **options)
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture(graphs.sizes)
    return core, device_of(core)


def device_of(core: EngineCore) -> PlayedGraphs:
    backend = core.runner.decoder.backend
    assert isinstance(backend, PlayedBackend)
    return backend.played


def texts(results: Results) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """What each sample came to."""
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}
