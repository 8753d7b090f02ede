"""Captured decode steps with adapters on a simulated device; the oracle is the same engine without graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.played_engines import device_of, graphed, kinds_that_stand, played_device
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, same, small_models, traffic
from helpers.little_memory import fail_ahead
from helpers.marks import slow_but
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest
from windlass.engine.scheduling import async_scheduling
from windlass.kernels import LowRankTable

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 96, "shift_context": 48, "max_num_seqs": 4}
SHIFT = ContextRule("shift", keep_tokens=16)
BURSTS = pytest.mark.parametrize("burst_seconds", [0.0, 1.0], ids=["a pass a step", "bursts"])
DirectoryOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    made = small_models(tmp_path_factory)
    return lambda name: made(name) if name != "lfm2" else make_model("lfm2", tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def sources(directory_of: DirectoryOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    """Three adapters of different ranks with a large effect."""
    return sources_for(directory_of("llama"), tmp_path_factory.mktemp("adapters"))


def sources_for(directory: Path, root: Path) -> tuple[AdapterSource, ...]:
    made = [
        save_adapter(root / f"{rank}", directory, rank=rank, seed=rank, strength=0.4 / rank**0.5) for rank in (2, 3, 16)
    ]
    return tuple(AdapterSource(i, f"{i}", str(path)) for i, path in enumerate(made, start=1))


def compared(directory: Path, *sent: list[EngineRequest], **options: Any) -> tuple[EngineCore, list[GraphKey]]:
    """An engine that has answered these lists in turn, with the tokens and logits of one without graphs, and the keys of the
    graphs that ran its steps."""
    options = {**OPTIONS, **options}
    plain = make_core(directory, cuda_graphs=False, **options)
    core, _ = graphed(directory, **options)
    kinds = kinds_that_stand(core)
    for requests in sent:
        same(run_checked(core, requests, every_logit=False), run(plain, requests, every_logit=False), 0.0)
    return core, kinds


def adapted(requests: list[EngineRequest], *ids: int | None) -> list[EngineRequest]:
    """The same requests, with these adapters in turn."""
    return [replace(one, adapter=own) for one, own in zip(requests, itertools.cycle(ids), strict=False)]


def replayed(core: EngineCore) -> int:
    assert core.runner.graphs is not None
    return core.runner.graphs.num_replayed


def streams(**fields: Any) -> list[EngineRequest]:
    """Streams with and without adapters that end at different times."""
    return [
        greedy("long", prompt(1, 9), 45, adapter=1, **fields),
        greedy("none", prompt(2, 12), 30, **fields),
        greedy("drawn", prompt(3, 21), 20, adapter=3, **{"temperature": 0.8, "seed": 3, **fields}),
        greedy("short", prompt(4, 9), 12, adapter=2, **fields),
    ]


def test_every_kind_of_request(directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]) -> None:
    """Several adapters and none in one step. These steps are captured at start, as adapters are loaded."""
    core, kinds = compared(directory_of("llama"), adapted(traffic(), 1, None, 2, 3), lora=sources)
    graphs = core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.captured == [GraphKey(size, adapted=True) for size in (4, 2, 1)]
    assert len(kinds) > 50 and replayed(core) > 50


def test_what_cannot_be_captured_takes_the_ordinary_way(
    directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]
) -> None:
    """If memory ends before steps with adapters, none is tried; if it ends during these, the other graphs remain."""
    want = run(make_core(directory_of("llama"), cuda_graphs=False, lora=sources, **OPTIONS), streams())
    for tried, plain, with_adapters in ((2, [2, 4], []), (4, [1, 2, 4], [GraphKey(4, adapted=True)])):
        core = make_core(directory_of("llama"), lora=sources, **OPTIONS)
        device, calls, graphs = device_of(core.runner.decoder), itertools.count(), core.runner.graphs
        assert graphs is not None

        def fails(calls: Iterator[int] = calls, tried: int = tried) -> None:
            if next(calls) >= tried:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        device.fails = fails
        graphs.capture(graphs.sizes)
        assert graphs.captured == plain and graphs.lazy_graphs.captured == with_adapters
        assert (graphs.obstacle is None) == (graphs.lazy_graphs.obstacle is not None)
        same(run_checked(core, streams(), every_logit=False), want, 0.0)
        assert (graphs.num_replayed > 0) == bool(with_adapters)


@BURSTS
def test_steps_that_are_planned_ahead(
    burst_seconds: float, directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]
) -> None:
    """The device continues rows with adapters, also if their order changes; the host waits only for sampled tokens."""
    options: dict[str, Any] = {"lora": sources, "burst_seconds": burst_seconds}
    core, kinds = compared(directory_of("llama"), streams(), **options)
    assert replayed(core) >= 44 and {kind.rows for kind in kinds} == {1, 2, 4}
    core, device = graphed(directory_of("llama"), **OPTIONS, **options)
    run(core, streams(), every_logit=False)
    assert len(set(device.waits)) <= core.stats().num_steps + 1


def test_steps_without_adapters_have_nothing_of_them(
    directory_of: DirectoryOf, sources: tuple[AdapterSource, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although adapters are loaded, and next to a stream that has ended."""
    core, kinds = compared(
        directory_of("llama"),
        [greedy("a", prompt(1, 9), 30), greedy("b", prompt(2, 9), 20)],
        [greedy("a", prompt(3, 9), 30), greedy("b", prompt(4, 9), 9, adapter=1)],
        lora=sources,
    )
    assert len(kinds) in (8, 9) and replayed(core) >= 58


def test_what_is_loaded_between_steps_is_used_by_the_next(
    directory_of: DirectoryOf, sources: tuple[AdapterSource, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are captured once adapters are used. One stream continues while another's adapter is unloaded and a third takes its
    slot, after the work that the device has been given."""
    directory, put = directory_of("llama"), LowRankTable.put
    wanted = {
        i: run(make_core(directory, lora=sources, **OPTIONS), [greedy("r", prompt(9, 9), 60, adapter=i)])["r", 0]
        for i in (1, 2, 3)
    }
    core, device = graphed(directory, max_loras=2, **OPTIONS)
    kinds, tokens, graphs = kinds_that_stand(core), dict[str, list[int]](), core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.captured == []

    def checked(self: LowRankTable, slot: int, change: Any) -> None:
        assert device.done == device.asked
        put(self, slot, change)

    monkeypatch.setattr(LowRankTable, "put", checked)

    def steps(count: int) -> None:
        for _ in range(count):
            for output in core.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)

    core.add(greedy("none", prompt(5, 9), 70))
    steps(3)
    for source in sources[:2]:
        core.add_adapter(core.read_adapter(source).result(30))
    core.add(greedy("one", prompt(9, 9), 60, adapter=1))
    core.add(greedy("two", prompt(9, 9), 60, adapter=2))
    steps(20)
    assert GraphKey(4, adapted=True) in kinds and device.done < device.asked, "a step is under way"
    core.abort("two")
    core.drop_adapter(2)
    core.add_adapter(core.read_adapter(sources[2]).result(30))
    core.add(greedy("three", prompt(9, 9), 30, adapter=3))
    while core.has_work():
        steps(1)
    assert tokens["one"] == wanted[1].token_ids and tokens["three"] == wanted[3].token_ids[:30]
    assert tokens["two"] == wanted[2].token_ids[: len(tokens["two"])] and len(tokens["two"]) > 10
    assert len(kinds) > 50


def test_rows_that_are_none_have_no_adapter(directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]) -> None:
    """So that nothing is read for them, whichever rows used the slots before."""
    core = make_core(directory_of("llama"), lora=sources, **OPTIONS)
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture([4])
    for rows in (3, 2):
        run(core, [greedy(f"{i}", prompt(i, 9), 12, adapter=i) for i in range(1, rows + 1)], every_logit=False)
        core.runner.join()
        assert graphs.rows.adapter_slots(4).tolist() == [*range(rows), *[-1] * (4 - rows)]
    graphs.rows.reset()
    core.runner.join()
    assert graphs.rows.adapter_slots(4).tolist() == [-1] * 4


def test_ranges_and_adapters_that_vanish_ahead(directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]) -> None:
    """In either order, and in one step again."""
    sent = [
        [
            greedy("shift", prompt(1, 40), first, context=SHIFT),
            greedy("window", prompt(6, 30), first + 2, context=ContextRule("shift", 0, 20), adapter=2),
            greedy("plain", prompt(2, 9), second, adapter=1),
            greedy("none", prompt(3, 9), 55),
        ]
        for first, second in ((24, 45), (40, 20))
    ]
    core, kinds = compared(directory_of("llama"), *sent, *sent, lora=sources)
    assert {(kind.ranges > 0, kind.adapted) for kind in kinds} == {(True, True), (False, True)}
    assert core.scheduler.counters.context_shifts >= 4 and replayed(core) > 150


@pytest.mark.parametrize("kind", slow_but(["ngrams", "draft model"], "ngrams"))
def test_proposed_tokens_meet_the_streams_adapter(
    kind: str, directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]
) -> None:
    """Each is a row with the adapter of its stream. A draft model has no adapters, and its steps are captured."""
    options: dict[str, Any] = {"speculative_ngram": 3, "speculative_ngram_min": 1}
    if kind == "draft model":
        options = {"speculative_model": str(directory_of("llama"))}
    sent = adapted(
        [greedy(f"{i}", prompt(i, 24, period=5), 40, temperature=0.3 * (i % 2), seed=i) for i in range(4)], 1, None
    )
    core, kinds = compared(directory_of("llama"), sent, lora=sources, speculative_adaptive=False, **options)
    stats, proposer = core.stats(), core.runner.proposer
    assert stats.spec_decode_num_accepted_tokens + stats.spec_decode_model_num_accepted_tokens > 0
    assert any(one.rows > 4 for one in kinds) and len(kinds) > 10
    assert proposer is None or (proposer.graphs is not None and proposer.graphs.num_replayed > 20)


@pytest.mark.slow
def test_layers_that_carry_states(directory_of: DirectoryOf, tmp_path: Path) -> None:
    directory = directory_of("lfm2")
    core, kinds = compared(directory, streams(), streams(), lora=sources_for(directory, tmp_path))
    assert len(kinds) > 80 and replayed(core) > 80


@pytest.mark.slow
def test_little_memory(directory_of: DirectoryOf, sources: tuple[AdapterSource, ...]) -> None:
    """Preempted streams restart with their adapters."""
    core = make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS)
    memory = 10 * 16 * core.info.kv_bytes_per_token
    sent = adapted([greedy(f"{i}", prompt(i, 20 + i), 50) for i in range(4)], 1, 2, None)
    core, kinds = compared(directory_of("llama"), sent, lora=sources, kv_cache_memory=memory)
    assert core.stats().num_preemptions and len(kinds) > 40


@pytest.mark.slow
@BURSTS
def test_steps_ahead_that_find_no_memory(
    burst_seconds: float,
    directory_of: DirectoryOf,
    sources: tuple[AdapterSource, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any point of the step."""
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    options: dict[str, Any] = {"lora": sources, "burst_seconds": burst_seconds, **OPTIONS}
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **options), streams(), every_logit=False)
    core, _ = graphed(directory_of("llama"), **options)
    failed = fail_ahead(core, monkeypatch, every=2)
    same(run_checked(core, streams(), every_logit=False), want, 0.0)
    assert len(set(failed)) > 1
