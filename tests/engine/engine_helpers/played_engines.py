"""Engines on a simulated device with graphs, compared with engines without graphs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.device import DEVICE
from helpers.engines import make_core, run
from helpers.every_request import Results, run_checked, same
from helpers.played_graphs import PlayedBackend, PlayedGraphs

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.execution.proposers import DraftModelProposer
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.decoder import Decoder
from windlass.engine.scheduling.scheduler_output import SchedulerOutput
from windlass.kernels import backend_selector

# Bursts are quick where a test has no other parameter for them.
BURSTS = pytest.mark.parametrize(
    "burst_seconds", [0.0, pytest.param(1.0, marks=pytest.mark.slow)], ids=["single steps", "bursts"]
)


@pytest.fixture(autouse=True)
def played_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device with graphs on the CPU."""
    if DEVICE != "cpu":
        pytest.skip("simulates a device on a CPU")
    _play(monkeypatch)


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that tests compute on, or a simulated device on the CPU."""
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


def used_graph_keys(core: EngineCore) -> list[GraphKey]:
    """Record the keys of the graphs with ranges or adapters that run steps from now on, in order."""
    found, graphs = list[GraphKey](), core.runner.graphs
    assert graphs is not None
    find = graphs.lazy_graphs.find

    def record(kind: GraphKey, *, ahead: bool) -> Any:
        one = find(kind, ahead=ahead)
        found.extend([] if one is None else [one[0]])
        return one

    graphs.lazy_graphs.find = record  # type: ignore[method-assign]
    return found


class GraphRun(NamedTuple):
    """An engine with graphs whose results equal those without, and the keys of the graphs that ran its steps.

    last_keys: keys of the last list of requests.
    """

    core: EngineCore
    device: PlayedGraphs
    keys: list[GraphKey]
    last_keys: list[GraphKey]

    @property
    def num_replayed(self) -> int:
        return num_replayed(self.core)


def compare_graphs(directory: Path, *sent: list[EngineRequest], **options: Any) -> GraphRun:
    """Run these lists one after the other with graphs, and compare tokens and logits with an engine that has neither graphs nor
    speculation nor bursts."""
    plain = {name: value for name, value in options.items() if not name.startswith(("speculative_", "burst_seconds"))}
    oracle = make_core(directory, cuda_graphs=False, **plain)
    core, device = graphed(directory, **options)
    keys, before = used_graph_keys(core), 0
    for requests in sent:
        before = len(keys)
        same(run_checked(core, requests, every_logit=False), run(oracle, requests), 0.0)
    return GraphRun(core, device, keys, keys[before:])


def answers(directory: Path, sent: Iterable[EngineRequest], **options: Any) -> Results:
    """Results of an engine without graphs."""
    return run(make_core(directory, cuda_graphs=False, **options), sent, every_logit=False)


def num_replayed(core: EngineCore) -> int:
    assert core.runner.graphs is not None
    return core.runner.graphs.num_replayed


def record_plans(core: EngineCore) -> list[SchedulerOutput]:
    """Record the plans of steps from now on, as they are started."""
    plans: list[SchedulerOutput] = []
    start = core.runner.start

    def record(plan: SchedulerOutput) -> Any:
        plans.append(plan)
        return start(plan)

    core.runner.start = record  # type: ignore[method-assign]
    return plans


def device_of(decoder: Decoder) -> PlayedGraphs:
    assert isinstance(decoder.backend, PlayedBackend)
    return decoder.backend.played


def texts(results: Results) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """Tokens and finish reason of each sample."""
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}
