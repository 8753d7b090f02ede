"""Warmed-up engines with captured steps, steps planned ahead and blocks in main memory.

The oracle is the same engine without these. On a GPU the tests compute there. Elsewhere they run on a simulated device, which
shows only that they exercise what they are meant to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers.played_engines import BURSTS, a_device, answers, num_replayed, record_plans, texts
from helpers.adapters import save_adapter
from helpers.device import DEVICE
from helpers.engines import greedy, make_core, run
from helpers.every_request import Results, prompt, run_checked, same
from helpers.little_memory import fail_ahead
from helpers.tiny_models import make_model

from windlass.engine.cache import host_tier
from windlass.engine.core import engine_core
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest
from windlass.engine.scheduling import async_scheduling, kv_restore

__all__ = ["a_device"]
# On a CPU, other tests cover this in less time.
pytestmark = [pytest.mark.slow] if DEVICE == "cpu" else []
OPTIONS: dict[str, Any] = {"max_model_len": 160, "shift_context": 48, "max_num_seqs": 4}
NEAR = 1e-4  # of logits and log-probabilities: the order of sums depends on the other rows
DirectoryOf = Callable[..., Path]
Adapters = tuple[AdapterSource, AdapterSource]
SHIFT = ContextRule("shift", keep_tokens=16)
SINKS = ContextRule("shift", attention_window=21, attention_sinks=5)


@pytest.fixture(autouse=True)
def time_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time limit, as several test processes may compile kernels at the same time."""
    monkeypatch.setattr(engine_core, "_CAPTURE_SECONDS", math.inf)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    made: dict[str, Path] = {}

    def get(family: str, **fields: Any) -> Path:
        name = repr((family, fields))
        if name not in made:
            made[name] = make_model(family, tmp_path_factory.mktemp(family), **fields)
        return made[name]

    return get


def warmed(directory: Path, **options: Any) -> EngineCore:
    """An engine with all plain decode steps captured, also those of a draft model."""
    core = make_core(directory, **{**OPTIONS, **options})
    core.warm_up()
    proposer = core.runner.proposer
    for graphs in (core.runner.graphs, None if proposer is None else proposer.graphs):
        if graphs is not None:
            assert graphs.obstacle is None and graphs.captured == sorted(graphs.sizes)
    return core


def compare(core: EngineCore, directory: Path, sent: list[EngineRequest], replays: int = 0, **options: Any) -> Results:
    """Results equal those without graphs, and at least this many steps were replayed."""
    before = num_replayed(core)
    found = run_checked(core, sent, every_logit=False)
    same(found, answers(directory, sent, **{**OPTIONS, **options}), NEAR)
    assert num_replayed(core) - before >= replays
    return found


def streams(**fields: Any) -> list[EngineRequest]:
    """Streams that start and end at different times, so that captured steps have empty rows."""
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    return [
        greedy("short", prompt(1, 9), 12, **fields),
        greedy("long", prompt(2, 40), 50, **fields),
        greedy("drawn", prompt(3, 21), 30, **drawn, **fields),
    ]


def contexts(**fields: Any) -> list[EngineRequest]:
    """A context that shifts, windows with and without sinks, and a plain context."""
    return [
        greedy("shift", prompt(1, 40), 40, context=SHIFT, **fields),
        greedy("plain", prompt(2, 9), 15, **fields),
        greedy("sinks", prompt(4, 40), 40, context=SINKS, **fields),
        greedy("window", prompt(6, 30), 35, context=ContextRule("shift", 0, 20), **fields),
    ]


@BURSTS
def test_captured_steps(burst_seconds: float, directory_of: DirectoryOf) -> None:
    """Sampling on the device in several passes, and steps whose logits are used."""
    directory = directory_of("llama")
    core = warmed(directory, burst_seconds=burst_seconds)
    assert texts(run_checked(core, streams(), every_logit=False)) == texts(answers(directory, streams(), **OPTIONS))
    assert num_replayed(core) >= 49
    compare(core, directory, streams(logprobs=2), 49)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("gemma3", {"sliding_window": 32}), ("gemma3", {"sliding_window": 24})],
    ids=["no windows", "all sinks within those of layers", "some sinks"],
)
def test_captured_steps_with_ranges(family: str, fields: dict[str, Any], directory_of: DirectoryOf) -> None:
    directory = directory_of(family, **fields)
    core = warmed(directory)
    for sent in (contexts(), contexts(logprobs=2)):
        compare(core, directory, sent, 34)
    graphs = core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.obstacle is None
    assert 4 in {key.rows for key in graphs.lazy_graphs.captured}
    assert core.scheduler.counters.context_shifts >= 4


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite4_h", "falcon_h1"])
def test_captured_steps_of_recurrent_models(family: str, directory_of: DirectoryOf) -> None:
    """Later requests also continue the outputs, from states stored while steps were planned ahead."""
    directory = directory_of(family)
    core = warmed(directory)
    for sent in (streams(), contexts(logprobs=2)):
        compare(core, directory, sent, 34)
    first = [greedy(f"{i}", prompt(40 + i, 20 + i), 40, logprobs=1) for i in range(3)]
    found = compare(core, directory, first)
    then = [
        greedy(f"{i}+", [*one.prompt_token_ids, *found[f"{i}", 0].token_ids, 5, 6], 9, logprobs=1)
        for i, one in enumerate(first)
    ]
    assert all(one.outputs[-1].cached_tokens == 48 for one in compare(core, directory, then).values())


def test_captured_steps_with_many_ranges(directory_of: DirectoryOf) -> None:
    """Passages with gaps, next to a context that shifts and a plain one."""
    directory, documents = directory_of("llama"), [prompt(seed, 40) for seed in (11, 12, 13)]
    reuse = NonPrefixReuseParams(32, scope="me")
    first = [greedy(f"{i}", [*prompt(20 + i, 7), *document, 5], 1, reuse=reuse) for i, document in enumerate(documents)]
    mixed = [*prompt(5, 5), *documents[2], *prompt(6, 3), *documents[0], *prompt(7, 9), *documents[1], 8, 9]
    then = [
        greedy("passages", mixed, 12, reuse=reuse, logprobs=1),
        greedy("shift", prompt(1, 40), 30, context=SHIFT, logprobs=1),
        greedy("plain", prompt(2, 9), 30, logprobs=1),
    ]
    options = {"max_model_len": 192}
    core, plain = warmed(directory, **options), make_core(directory, cuda_graphs=False, **{**OPTIONS, **options})
    for sent in (first, then):
        same(run_checked(core, sent, every_logit=False), run(plain, sent, every_logit=False), NEAR)
    graphs = core.runner.graphs
    assert core.scheduler.counters.reused_passages == plain.scheduler.counters.reused_passages == 3
    assert graphs is not None and {key.ranges for key in graphs.lazy_graphs.captured} >= {2, 16}


def with_adapters(sent: list[EngineRequest]) -> list[EngineRequest]:
    """The same requests with one adapter, the other and none in turn."""
    return [replace(one, adapter=own) for one, own in zip(sent, itertools.cycle((1, 2, None)), strict=False)]


@pytest.fixture(scope="module")
def adapters(directory_of: DirectoryOf, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root, directory = tmp_path_factory.mktemp("adapters"), directory_of("llama")
    first, second = (save_adapter(root / f"{rank}", directory, rank=rank, seed=rank) for rank in (4, 16))
    return AdapterSource(1, "first", str(first)), AdapterSource(2, "second", str(second))


@pytest.mark.parametrize("speculative_ngram", [0, 3])
@pytest.mark.parametrize("asked", [streams, contexts])
def test_captured_steps_with_adapters(
    asked: Callable[..., list[EngineRequest]], speculative_ngram: int, adapters: Adapters, directory_of: DirectoryOf
) -> None:
    """Next to rows without adapters, with ranges, and of proposed tokens; the adapters are loaded at start."""
    directory, options = directory_of("llama"), {"speculative_ngram": speculative_ngram, "lora": adapters}
    core = warmed(directory, **options)
    for sent in (with_adapters(asked()), with_adapters(asked(logprobs=2))):
        compare(core, directory, sent, 15, lora=adapters)
    graphs = core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.obstacle is None
    assert {kind.rows for kind in graphs.lazy_graphs.captured if kind.adapted and not kind.ranges} == set(graphs.sizes)


def test_adapters_replaced_between_captured_steps(adapters: Adapters, directory_of: DirectoryOf) -> None:
    """Adapters replace each other in one slot repeatedly, next to a stream without."""
    directory = directory_of("llama")
    core, plain = warmed(directory, max_loras=1), make_core(directory, cuda_graphs=False, max_loras=1, **OPTIONS)
    for source in adapters * 2:
        sent = [
            greedy("adapter", prompt(1, 20), 20, adapter=source.adapter_id, logprobs=1),
            greedy("none", prompt(2, 20), 30, logprobs=1),
        ]
        for one in (core, plain):
            one.add_adapter(one.read_adapter(source).result(60))
        same(run_checked(core, sent, every_logit=False), run(plain, sent, every_logit=False), NEAR)
        for one in (core, plain):
            one.drop_adapter(source.adapter_id)
    assert num_replayed(core) >= 100 and core.runner.graphs is not None
    assert GraphKey(2, adapted=True) in core.runner.graphs.lazy_graphs.captured


@pytest.mark.parametrize("kind", ["draft model", "ngrams"])
def test_captured_steps_of_speculation(kind: str, directory_of: DirectoryOf) -> None:
    """Proposals and verification, also in a context that shifts, whose rows have ranges."""
    directory = directory_of("llama")
    options: dict[str, Any] = {"speculative_ngram": 3, "speculative_ngram_min": 1}
    if kind == "draft model":
        options = {"speculative_model": str(directory)}
    sent = [
        greedy("repeats", prompt(1, 30, period=5), 40),
        greedy("shift", prompt(3, 40, period=4), 30, context=SHIFT),
        greedy("drawn", prompt(4, 20), 25, temperature=0.8, seed=5),
    ]
    core = warmed(directory, speculative_adaptive=False, **options)
    assert texts(run_checked(core, sent, every_logit=False)) == texts(answers(directory, sent, **OPTIONS))
    stats, proposer = core.stats(), core.runner.proposer
    assert stats.spec_decode_num_accepted_tokens + stats.spec_decode_model_num_accepted_tokens > 0
    assert num_replayed(core) > 10
    assert proposer is None or (proposer.graphs is not None and proposer.graphs.num_replayed > 10)


@BURSTS
@pytest.mark.parametrize("sent", [streams, contexts])
def test_a_step_planned_ahead_without_memory_is_computed_again(
    sent: Callable[[], list[EngineRequest]],
    burst_seconds: float,
    directory_of: DirectoryOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request fails, wherever in the step the memory ends."""
    directory = directory_of("llama")
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    core = warmed(directory, burst_seconds=burst_seconds)
    failed = fail_ahead(core, monkeypatch, every=2)
    assert texts(run_checked(core, sent(), every_logit=False)) == texts(answers(directory, sent(), **OPTIONS))
    assert len(set(failed)) > 1


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "captured steps"])
def test_blocks_restored_together_give_equal_results(
    deterministic: bool, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From main memory, next to a stream, into a cache without them; no time limit, as the device may be shared."""
    monkeypatch.setattr(kv_restore, "_GRACE_SECONDS", 60.0)
    monkeypatch.setattr(host_tier, "_COPY_SECONDS", 60.0)
    directory = directory_of("llama")
    plenty = make_core(directory, cuda_graphs=False, deterministic=deterministic, **OPTIONS)
    size = plenty.info.kv_bytes_per_token * plenty.info.block_size
    core = warmed(directory, deterministic=deterministic, kv_cache_memory=40 * size, kv_host_memory=200 * size)
    plans = record_plans(core)
    text = prompt(7, 150)  # nine full blocks
    rounds = [[greedy("a", text, 8)]]
    rounds += [[greedy(f"{i}", prompt(30 + i, 150), 1)] for i in range(8)]
    rounds.append([greedy("stream", prompt(8, 20), 60), greedy("again", text, 8)])
    try:
        for sent in rounds:
            got, want = (run(one, sent, every_logit=False) for one in (core, plenty))
            if deterministic:
                same(got, want, 0.0)
            assert texts(got) == texts(want)
        assert got["again", 0].outputs[-1].cached_tokens == 144
        assert got["again", 0].token_ids == want["again", 0].token_ids
        stats = core.stats().persist
        loaded = [len(plan.loaded) for plan in plans]
        assert stats.host_read_blocks == sum(loaded) == 9 and max(loaded) > 4 and stats.host_lost_blocks == 0
        assert deterministic or num_replayed(core) > 50
    finally:
        core.close()
