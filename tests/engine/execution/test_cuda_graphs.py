"""Captured decode steps on a simulated device; the oracle is the same engine without graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.played_engines import device_of, graphed, played_device, texts
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, same, small_models, traffic

from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.rope_scaling import RopeScaling

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 96}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return small_models(tmp_path_factory)


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_answers_are_those_without(model: str, directory_of: Callable[[str], Path]) -> None:
    """All kinds of requests in one step, also with windows and a scaled embedding."""
    want = run(make_core(directory_of(model), cuda_graphs=False, **OPTIONS), traffic())
    core, device = graphed(directory_of(model), **OPTIONS)
    same(run_checked(core, traffic(), every_logit=False), want, 0.0)
    assert core.runner.graphs is not None and core.runner.graphs.captured == [1, 2, 4, 8]
    assert device.replays > 50


def test_requests_without_graphs_beside_those_with(directory_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Adapters, moved retained keys, distance rules; each scaling uses its own frequencies."""
    directory = directory_of("llama")
    source = AdapterSource(1, "a", str(save_adapter(tmp_path / "a", directory, seed=1, strength=0.4)))
    kinds = [None, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 2.0}]
    kinds += [{"rope_type": "dual_chunk", "chunk_size": 32}]
    sent = [
        greedy(f"{i}", prompt(i, 9), 60 - 10 * i, rope_scaling=None if kind is None else RopeScaling.from_dict(kind))
        for i, kind in enumerate(kinds)
    ]
    sent.append(greedy("adapter", prompt(7, 9), 30, adapter=1))
    sent.append(
        greedy("window", prompt(5, 30), 30, context=ContextRule("stop", attention_window=16, attention_sinks=2))
    )
    options = {**OPTIONS, "lora": (source,), "burst_seconds": 1.0}
    want = run(make_core(directory, cuda_graphs=False, **options), sent, every_logit=False)
    core, device = graphed(directory, **options)
    assert texts(run_checked(core, sent, every_logit=False)) == texts(want)
    assert device.replays > 20


def test_rows_that_are_none_touch_nothing(directory_of: Callable[[str], Path]) -> None:
    """Three streams in a graph of eight rows."""
    sent = [greedy(f"{i}", prompt(i, 9), 12) for i in range(3)]
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), sent)
    core = make_core(directory_of("llama"), **OPTIONS)
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture([8])
    written = {}
    for plane in itertools.chain.from_iterable(core.runner.cache.planes):
        plane.fill_(7)
        written[id(plane)] = plane
    assert texts(run(core, sent, every_logit=False)) == texts(want)
    assert graphs.num_replayed == 11
    held = 3 * 2  # blocks of 21 tokens
    for plane in written.values():
        touched = (plane != 7).flatten(2).any(2).any(0).sum()
        assert int(touched) == held


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "no memory is left for it"),
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "not permitted"),
    ],
    ids=["memory", "what cannot be captured"],
)
def test_what_is_not_captured_takes_the_ordinary_way(
    error: Exception, said: str, directory_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(directory_of("llama"), **OPTIONS)
    device, calls = device_of(core.runner.decoder), itertools.count()

    def fails() -> None:
        if next(calls) == 2:
            raise error

    device.fails = fails
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture(graphs.sizes)
    assert graphs.captured == [4, 8]
    assert graphs.obstacle is not None and said in graphs.obstacle
    assert graphs.obstacle + "; those of 4, 8 rows were" in caplog.text
    sent = [greedy("a", prompt(1, 9), 12)]
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), sent)
    assert texts(run(core, sent, every_logit=False)) == texts(want)


def test_time_for_capturing_is_bounded(directory_of: Callable[[str], Path]) -> None:
    core = make_core(directory_of("llama"), **OPTIONS)
    graphs = core.runner.graphs
    assert graphs is not None
    assert graphs.sizes == [8, 4, 2, 1]
    graphs.capture(graphs.sizes, max_seconds=-1.0)
    assert graphs.captured == [] and graphs.obstacle is not None
    core.warm_up()
    assert graphs.captured[-1] == 8, "the largest is the first"
    assert make_core(directory_of("llama"), max_num_seqs=6, **OPTIONS).runner.graphs.sizes == [6, 4, 2, 1]  # type: ignore[union-attr]


def test_none_where_they_are_not_wanted(directory_of: Callable[[str], Path]) -> None:
    core = make_core(directory_of("llama"), cuda_graphs=False)
    core.warm_up()
    assert core.runner.graphs is None
