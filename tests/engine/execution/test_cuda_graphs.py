"""Captured decode steps on a simulated device; the oracle is the same engine without graphs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_helpers.played_engines import (
    BURSTS,
    answers,
    compare_graphs,
    device_of,
    graphed,
    num_replayed,
    played_device,
    record_plans,
    texts,
    used_graph_keys,
)
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.every_request import Results, prompt, run_checked, same, small_models, traffic
from helpers.little_memory import fail_ahead
from helpers.marks import slow_but
from helpers.prediction_layers import make_predicting
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution import batch_builder
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling import async_scheduling
from windlass.kernels import LowRankTable
from windlass.kernels.torch.torch_backend import TorchBackend

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 96}
RANGES: dict[str, Any] = {"max_model_len": 96, "shift_context": 48, "max_num_seqs": 4}
STATES: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4}
SPECULATION: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 3, "speculative_adaptive": False}
SHIFT = ContextRule("shift", keep_tokens=16)
RECURRENT = ["qwen3_5", "lfm2", "granite4_h", "falcon_h1"]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")
DirectoryOf = Callable[[str], Path]
Adapters = tuple[AdapterSource, ...]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    small = small_models(tmp_path_factory)
    bloom = make_unrotated("bloom", tmp_path_factory.mktemp("bloom"))
    return lambda name: bloom if name == "bloom" else small(name)


def save_adapters(directory: Path, root: Path) -> Adapters:
    """Three adapters of different ranks with a large effect."""
    made = [save_adapter(root / f"{n}", directory, rank=n, seed=n, strength=0.4 / n**0.5) for n in (2, 3, 16)]
    return tuple(AdapterSource(i, f"{i}", str(path)) for i, path in enumerate(made, start=1))


@pytest.fixture(scope="module")
def adapters(directory_of: DirectoryOf, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return save_adapters(directory_of("llama"), tmp_path_factory.mktemp("adapters"))


def fail_captures(core: EngineCore, fails: Callable[[int], bool], error: Exception = OUT_OF_MEMORY) -> None:
    """Make the captures fail whose number `fails` accepts."""
    numbers = itertools.count()

    def fail() -> None:
        if fails(next(numbers)):
            raise error

    device_of(core.runner.decoder).fails = fail


# -- plain rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", slow_but(["llama", "gemma3"], "llama"))
def test_every_kind_of_request_gives_equal_results(model: str, directory_of: DirectoryOf) -> None:
    """All kinds of requests in one step, also with windows and a scaled embedding."""
    found = compare_graphs(directory_of(model), traffic(), **OPTIONS)
    assert found.core.runner.graphs is not None and found.core.runner.graphs.captured == [1, 2, 4, 8]
    assert found.device.replays > 50


@pytest.mark.slow
def test_requests_that_need_ordinary_steps_run_next_to_captured_ones(directory_of: DirectoryOf, tmp_path: Path) -> None:
    """Adapters, shifted retained keys, distance rules; each scaling uses its own frequencies."""
    directory = directory_of("llama")
    source = AdapterSource(1, "a", str(save_adapter(tmp_path / "a", directory, seed=1, strength=0.4)))
    kinds = [None, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 2.0}]
    kinds += [{"rope_type": "dual_chunk", "chunk_size": 32}]
    sent = [
        greedy(f"{i}", prompt(i, 9), 60 - 10 * i, rope_scaling=None if kind is None else RopeScaling.from_dict(kind))
        for i, kind in enumerate(kinds)
    ]
    sent.append(greedy("adapter", prompt(7, 9), 30, adapter=1))
    window = ContextRule("stop", attention_window=16, attention_sinks=2)
    sent.append(greedy("window", prompt(5, 30), 30, context=window))
    options = {**OPTIONS, "lora": (source,), "burst_seconds": 1.0}
    want = answers(directory, sent, **options)
    core, device = graphed(directory, **options)
    assert texts(run_checked(core, sent, every_logit=False)) == texts(want)
    assert device.replays > 20


def run_and_count_blocks(core: EngineCore, sent: list[EngineRequest]) -> tuple[Results, list[int]]:
    """Results, and the number of blocks written in each plane."""
    planes = list(itertools.chain.from_iterable(core.runner.cache.planes))
    for plane in planes:
        plane.fill_(7)
    found = run(core, sent, every_logit=False)
    return found, [int((plane != 7).flatten(2).any(2).any(0).sum()) for plane in planes]


@pytest.mark.slow
def test_padding_rows_write_nothing(directory_of: DirectoryOf) -> None:
    """Three streams in a graph of eight rows, and one with key ranges in a graph of four."""
    sent = [greedy(f"{i}", prompt(i, 9), 12) for i in range(3)]
    core = make_core(directory_of("llama"), **OPTIONS)
    graphs = core.runner.graphs
    graphs.capture([8])
    found, written = run_and_count_blocks(core, sent)
    assert texts(found) == texts(answers(directory_of("llama"), sent, **OPTIONS))
    assert set(written) == {3 * 2} and graphs.num_replayed == 11  # blocks of 21 tokens
    core = make_core(directory_of("llama"), **RANGES)
    graphs = core.runner.graphs
    graphs.capture([4])
    _, written = run_and_count_blocks(core, [greedy("shift", prompt(1, 40), 30, context=SHIFT)])
    assert max(written) <= 5  # blocks of 69 tokens, in the order of the free list
    assert graphs.lazy_graphs.captured == [GraphKey(4, 2)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OUT_OF_MEMORY, "no memory is left for it"),
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "not permitted"),
    ],
    ids=["memory", "not permitted"],
)
def test_steps_whose_capture_fails_are_computed_without_graphs(
    error: Exception, reason: str, directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(directory_of("llama"), **OPTIONS)
    fail_captures(core, lambda number: number == 2, error)
    graphs = core.runner.graphs
    graphs.capture(graphs.sizes)
    assert graphs.captured == [4, 8]
    assert graphs.obstacle is not None and reason in graphs.obstacle
    assert graphs.obstacle + "; only steps of 4, 8 rows use CUDA graphs" in caplog.text
    sent = [greedy("a", prompt(1, 9), 12)]
    assert texts(run(core, sent, every_logit=False)) == texts(answers(directory_of("llama"), sent, **OPTIONS))


def test_capture_time_is_bounded(directory_of: DirectoryOf) -> None:
    core = make_core(directory_of("llama"), **OPTIONS)
    graphs = core.runner.graphs
    assert graphs.sizes == [8, 4, 2, 1]
    graphs.capture(graphs.sizes, max_seconds=-1.0)
    assert graphs.captured == [] and graphs.obstacle is not None
    core.warm_up()
    assert graphs.captured[-1] == 8, "the largest is the first"
    six = make_core(directory_of("llama"), max_num_seqs=6, **OPTIONS).runner.graphs
    assert six is not None and six.sizes == [6, 4, 2, 1]


def test_an_engine_without_graphs_captures_nothing(directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its options, or because its backend has none."""
    core = make_core(directory_of("llama"), cuda_graphs=False)
    core.warm_up()
    assert core.runner.graphs is None
    monkeypatch.setattr("windlass.kernels.backend_selector._NATIVE_BACKENDS", {})
    core = make_core(directory_of("llama"), speculative_model=str(directory_of("llama")), **SPECULATION)
    assert isinstance(core.runner.decoder.backend, TorchBackend)
    assert core.runner.proposer is not None and core.runner.proposer.graphs is core.runner.graphs is None


# -- key ranges --------------------------------------------------------------------------------------------------------


def contexts(**fields: Any) -> list[EngineRequest]:
    """A context that shifts, windows with and without sinks, and a plain context."""
    return [
        greedy("shift", prompt(1, 40), 40, context=SHIFT, **fields),
        greedy("plain", prompt(2, 9), 15, **fields),
        greedy("sinks", prompt(4, 9), 30, context=ContextRule(attention_window=16, attention_sinks=2), **fields),
        greedy("window", prompt(6, 30), 35, context=ContextRule("shift", 0, 20), **fields),
    ]


@pytest.mark.slow
@BURSTS
def test_ranges_that_appear_and_disappear_give_equal_results(burst_seconds: float, directory_of: DirectoryOf) -> None:
    """Streams start and end in steps that the device continues by itself."""
    found = compare_graphs(directory_of("llama"), contexts(), burst_seconds=burst_seconds, **RANGES)
    assert found.core.scheduler.counters.context_shifts >= 4 and found.num_replayed >= 34
    assert len(found.keys) >= (5 if burst_seconds else 30)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "hunyuan", "bloom"])
def test_ranges_of_further_attention_kinds_give_equal_logits(family: str, directory_of: DirectoryOf) -> None:
    """Layers with windows and rotary groups of their own, norms after the rotation, scores that fall with the distance."""
    sent = [one for one in contexts(logprobs=2) if family != "bloom" or one.request_id != "sinks"]
    found = compare_graphs(directory_of(family), sent, **RANGES)
    assert len(found.keys) >= 28 and {key.ranges for key in found.keys} == {2}


@pytest.mark.slow
def test_more_ranges_than_captured_are_captured_again(directory_of: DirectoryOf) -> None:
    """A stream with two ranges, then next to it one with passages and gaps, and then only a plain one."""
    documents = [prompt(seed, 40) for seed in (11, 12, 13)]
    reuse = NonPrefixReuseParams(32, scope="me")
    passages = [*prompt(5, 5), *documents[2], *prompt(6, 3), *documents[0], *prompt(7, 9), *documents[1], *prompt(8, 4)]
    found = compare_graphs(
        directory_of("llama"),
        [greedy(f"{i}", [*prompt(20 + i, 7), *document, 5], 1, reuse=reuse) for i, document in enumerate(documents)],
        [greedy("shift", prompt(1, 40), 20, context=SHIFT, logprobs=1), greedy("a", prompt(2, 9), 20)],
        [
            greedy("shift", prompt(1, 40), 24, context=SHIFT, logprobs=1),
            greedy("passages", passages, 10, reuse=reuse, logprobs=1),
            greedy("plain", prompt(2, 9), 30, logprobs=1),
        ],
        **{**RANGES, "max_model_len": 192},
    )
    assert found.core.scheduler.counters.reused_passages == 3
    assert {key.ranges for key in found.keys[: -len(found.last_keys)]} == {2}
    ranges = list(dict.fromkeys(key.ranges for key in found.last_keys))
    assert ranges == [16, 2], "6 runs in 12 parts, and then those of the other"
    assert found.num_replayed > len(found.keys), "steps of the plain stream alone have no ranges"


def test_a_window_releases_its_blocks_although_steps_are_planned_ahead(directory_of: DirectoryOf) -> None:
    core, _ = graphed(directory_of("llama"), **RANGES)
    keys, plans = used_graph_keys(core), record_plans(core)
    core.add(greedy("window", prompt(1, 9), 60, context=ContextRule(attention_window=16)))
    most = 0
    while core.has_work():
        core.step()
        most = max(most, *(len(seq.cache.tables[0].blocks) for seq in core.scheduler.live_sequences()), 0)
    assert most <= 3 and sum(plan.num_inflight_passes for plan in plans) > 40 and len(keys) > 50


class Outcome(NamedTuple):
    """Tokens, finish reasons and context reports, block digests in the prefix cache, and shifts with dropped tokens."""

    results: dict[str, Any]
    digests: list[set[bytes]]
    dropped: tuple[int, int]


def outcome(core: EngineCore, sent: list[EngineRequest]) -> Outcome:
    found = run_checked(core, sent, every_logit=False)
    results = {name: (one.token_ids, one.finish_reason, one.outputs[-1].context) for (name, _), one in found.items()}
    counters = core.scheduler.counters
    digests = [set(pool.cached) for pool in core.blocks.pools]
    return Outcome(results, digests, (counters.context_shifts, counters.dropped_tokens))


def outcomes_ahead(
    directory: Path, sent: list[EngineRequest], burst_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, Outcome, int]:
    """Outcomes with graphs and without, and the first engine's scheduler calls for steps that are not planned ahead."""
    core, _ = graphed(directory, burst_seconds=burst_seconds, **RANGES)
    schedule, calls = core.scheduler.schedule, list[int]()
    monkeypatch.setattr(core.scheduler, "schedule", lambda: calls.append(1) or schedule())
    plain = make_core(directory, cuda_graphs=False, burst_seconds=0.0, **RANGES)
    return outcome(core, sent), outcome(plain, sent), len(calls)


@pytest.mark.slow
@BURSTS
def test_contexts_are_shifted_in_steps_planned_ahead(
    burst_seconds: float, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the step before is computed, except the first time; keys, digests and reports are unchanged."""
    drawn: dict[str, Any] = {"context": SHIFT, "temperature": 1.5, "seed": 0}
    first = greedy("kept", prompt(3, 40), 100, **drawn)
    (one,) = answers(directory_of("llama"), [first], **RANGES).values()
    end = one.token_ids[24]  # the first one after a second full context
    assert end not in one.token_ids[:24]
    reuse = NonPrefixReuseParams(32, scope="me")
    sent = [
        first,
        greedy("none kept", prompt(40, 33), 90, context=ContextRule("shift"), reuse=reuse),
        greedy("ends", prompt(3, 40), 60, stop_token_ids=(end,), **drawn),
    ]
    got, want, calls = outcomes_ahead(directory_of("llama"), sent, burst_seconds, monkeypatch)
    assert got == want
    tokens, reason, context = got.results["ends"]
    assert (len(tokens), reason, context.dropped_tokens) == (25, "stop", 16)
    assert got.dropped[0] >= 12 and calls < 16


@pytest.mark.slow
@BURSTS
def test_windows_release_blocks_in_steps_planned_ahead(
    burst_seconds: float, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have the same digests if each pass is a step. Longer steps end before a window releases the blocks that it has
    passed: blocks that become full in them have other digests, and a stream that ends in one retains the last blocks."""
    reuse = NonPrefixReuseParams(32, scope="me")
    sent = [
        greedy(f"{window}", prompt(window, held), 90, context=ContextRule("shift", 0, window, sinks), reuse=reuse)
        for window, held, sinks in ((1, 22, 0), (17, 30, 0), (20, 30, 2), (33, 27, 0))  # full in different steps
    ]
    got, want, calls = outcomes_ahead(directory_of("llama"), sent, burst_seconds, monkeypatch)
    assert got.results == want.results
    assert burst_seconds or got == want
    assert want.dropped[0] >= got.dropped[0] >= 16 and calls < 20


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("no\nmore")])
def test_ranges_whose_capture_fails_are_computed_without_graphs(
    error: Exception, directory_of: DirectoryOf, caplog: pytest.LogCaptureFixture
) -> None:
    sent = [greedy("shift", prompt(1, 40), 20, context=SHIFT)]
    core, device = graphed(directory_of("llama"), **RANGES)
    fail_captures(core, lambda number: True, error)
    same(run(core, sent, every_logit=False), answers(directory_of("llama"), sent, **RANGES), 0.0)
    graphs = core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.captured == [] and graphs.lazy_graphs.obstacle is not None
    assert caplog.text.count("a decode step of 1 rows in 2 ranges was not captured") == 1
    assert device.replays == graphs.num_replayed > 0


# -- recurrent states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(RECURRENT))
def test_recurrent_models_give_equal_results(family: str, directory_of: DirectoryOf) -> None:
    """Streams start and end, so that captured steps have padding rows; later requests find cached prefixes."""
    assert compare_graphs(directory_of(family), traffic(), **STATES).num_replayed > 60


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(RECURRENT, "qwen3_5"))
def test_states_at_block_ends_of_steps_planned_ahead_are_cached(family: str, directory_of: DirectoryOf) -> None:
    """Two streams fill blocks at different times, in steps after which the next have been started; then both texts continue."""
    core, device = graphed(directory_of(family), **STATES)
    first = [greedy("a", prompt(1, 21), 60), greedy("b", prompt(2, 30), 60)]
    found = run_checked(core, first, every_logit=False)
    steps, waits = core.stats().num_steps, len(set(device.waits))
    assert num_replayed(core) >= 59 and waits < steps + 3  # the host waits once for each, while it submits the next one
    later = []
    for one in first:
        text = (*one.prompt_token_ids, *found[one.request_id, 0].token_ids, *prompt(3, 5))
        later.append(replace(one, request_id=f"{one.request_id}+", prompt_token_ids=text))
    got = run_checked(core, later, every_logit=False)
    same(got, answers(directory_of(family), later, prefix_caching=False, **STATES), 0.0)
    # 21 + 60 and 30 + 60 tokens, the last of which was sampled and not computed.
    assert [got[name, 0].outputs[-1].cached_tokens for name in ("a+", "b+")] == [80, 80]


@pytest.mark.slow
def test_a_surplus_step_of_an_ended_stream_changes_no_used_state(directory_of: DirectoryOf) -> None:
    ends = greedy("a", prompt(5, 12), 40, temperature=1.0, seed=3)
    token_ids = answers(directory_of("lfm2"), [ends], **STATES)["a", 0].token_ids
    last = next(i for i, token in enumerate(token_ids) if i >= 19 and token not in token_ids[:i])
    ends = replace(ends, sampling=replace(ends.sampling, stop_token_ids=(token_ids[last],)))
    again = greedy("again", [*prompt(5, 12), *token_ids[:last], 7], 9)
    sent = [ends, greedy("b", prompt(6, 14), 70)]
    assert compare_graphs(directory_of("lfm2"), sent, [again], **STATES).num_replayed > 60


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen3_5", "lfm2"], "lfm2"))
def test_shifts_and_windows_of_recurrent_models_give_equal_results(family: str, directory_of: DirectoryOf) -> None:
    sent = [
        greedy("shift", prompt(1, 40), 60, context=SHIFT),
        greedy("plain", prompt(2, 9), 35),
        greedy("window", prompt(6, 30), 35, context=ContextRule(attention_window=16, attention_sinks=2)),
    ]
    found = compare_graphs(directory_of(family), sent, sent, shift_context=48, **STATES)
    assert found.core.scheduler.counters.context_shifts >= 4 and found.num_replayed > 100


@pytest.mark.slow
def test_preempted_recurrent_streams_restart(directory_of: DirectoryOf) -> None:
    """No state block is free for a snapshot."""
    info = make_core(directory_of("lfm2"), cuda_graphs=False, **STATES).info
    memory = int(2.4 * (info.state_bytes + 6 * 16 * info.kv_bytes_per_token))
    sent = [greedy(f"{i}", prompt(i, 20 + i), 50) for i in range(4)]
    found = compare_graphs(directory_of("lfm2"), sent, kv_cache_memory=memory, **STATES)
    assert found.core.stats().num_preemptions and found.num_replayed > 50


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(RECURRENT, "granite4_h"))
def test_states_of_rejected_tokens_are_dropped(family: str, directory_of: DirectoryOf) -> None:
    """The states after proposed tokens are stored until it is known which are accepted."""
    sent = [greedy(f"{i}", prompt(i, 24, period=5), 40, temperature=0.35 * i, seed=i) for i in range(4)]
    found = compare_graphs(directory_of(family), sent, speculative_ngram=3, **STATES)
    stats = found.core.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens and found.num_replayed > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", slow_but(["states", "states, one block free", "adapters", "adapters, bursts"], "states, one block free")
)
def test_steps_planned_ahead_without_memory_are_computed_again(
    kind: str, directory_of: DirectoryOf, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any point of the step, whether or not it has changed a state before. With one free state block, two streams fill blocks
    in one step, so that the prefix of only one is found again."""
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    fields: dict[str, Any] = {"every": 2}
    if kind == "states":
        directory, options, fields = directory_of("lfm2"), STATES, {"every": 3}
        sent = [greedy(f"{i}", prompt(i, 20 + i), 60, temperature=0.5 * i, seed=i) for i in range(3)]
    elif kind == "states, one block free":
        directory, options = directory_of("qwen3_5"), {**STATES, "max_num_seqs": 2}
        fields = {"every": 1, "calls": 5}  # after a step that the device is computing, in a new block
        sent = [greedy(f"{i}", prompt(i, 20), 50, temperature=1.0, seed=i) for i in range(2)]
    else:
        directory, sent = directory_of("llama"), streams()
        options = {"lora": adapters, "burst_seconds": float("bursts" in kind), **RANGES}
    want = answers(directory, sent, **options)
    if "free" in kind:
        info = make_core(directory, **options).info
        options = {**options, "kv_cache_memory": 3 * info.state_bytes + 10 * 16 * info.kv_bytes_per_token}
    core, _ = graphed(directory, **options)
    assert "free" not in kind or core.blocks.available()[-1] == 3
    failed = fail_ahead(core, monkeypatch, **fields)
    same(run_checked(core, sent, every_logit=False), want, 0.0)
    assert kind != "states" or set(failed) == {0, 1, 2, 3, 4}
    assert failed if "free" in kind else len(set(failed)) > 1
    assert "states" not in kind or core.stats().num_preemptions


@pytest.mark.slow
def test_the_host_waits_once_per_step_of_a_recurrent_model(directory_of: DirectoryOf) -> None:
    """No copy of a state makes it wait."""
    core, device = graphed(directory_of("qwen3_5"), prefix_caching=True, **STATES)
    run(core, [greedy("a", prompt(1, 15), 50)], every_logit=False)
    assert len(set(device.waits)) <= core.stats().num_steps + 1


# -- speculative decoding ----------------------------------------------------------------------------------------------


def replays(core: EngineCore) -> tuple[int, int]:
    """Numbers of replayed steps of the model and of its draft model."""
    proposer = core.runner.proposer
    return num_replayed(core), proposer.graphs.num_replayed


@pytest.mark.slow
@pytest.mark.parametrize("draft", slow_but(["llama", "qwen3"], "llama"))
def test_a_captured_draft_model_gives_equal_results(draft: str, directory_of: DirectoryOf) -> None:
    options = {"speculative_model": str(directory_of(draft)), **SPECULATION}
    assert min(replays(compare_graphs(directory_of("llama"), traffic(), **options).core)) > 50


def test_proposals_follow_each_other_on_the_device(directory_of: DirectoryOf) -> None:
    """Four proposals in each of eight steps: a missing token is computed first; the host waits once for the rest."""
    options = {**SPECULATION, "speculative_model": str(directory_of("llama")), "max_num_seqs": 1}
    core, _ = graphed(directory_of("llama"), deterministic=True, **options)
    run(core, [greedy("x", prompt(1, 20), 41)])
    stats = core.stats()
    assert stats.num_steps == 1 + 8 and stats.spec_decode_model_num_accepted_tokens == 32
    assert replays(core) == (8, 8 * 4)
    proposer = core.runner.proposer
    assert proposer is not None and proposer.positions_computed == 20 + 41 - 2
    assert len(set(device_of(proposer.decoder).waits)) <= 2 * 8


@pytest.mark.slow
def test_streams_with_different_numbers_of_proposals_give_equal_results(directory_of: DirectoryOf) -> None:
    sent = [greedy(f"{i}", prompt(i, 9 + i), 20 + i, temperature=0.6 * (i % 2), seed=i) for i in range(5)]
    options = {**SPECULATION, "speculative_model": str(directory_of("llama")), "speculative_adaptive": True}
    assert min(replays(compare_graphs(directory_of("llama"), sent, speculative_tokens=12, **options).core)) > 10


@pytest.mark.slow
def test_draft_models_of_another_vocabulary_size_give_equal_results(tmp_path: Path) -> None:
    """Token ids that one of them lacks are neither proposed nor embedded."""
    tokens, found = {f"t{i}": i for i in range(96)}, []
    for size in (96, 128):
        directory = make_model("llama", tmp_path / str(size), vocab_size=size, max_position_embeddings=64)
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added": size}))
        found.append(directory)
    sent = [greedy("x", [5, 6, 7], 40), greedy("y", [9, 8, 7, 6], 40, temperature=1.0, seed=3)]
    for model, draft in (found, reversed(found)):
        options = {**SPECULATION, "speculative_model": str(draft), "max_model_len": 64, "max_num_seqs": 2}
        assert min(replays(compare_graphs(model, sent, **options).core)) > 10


@pytest.mark.slow
def test_an_mtp_layer_next_to_captured_steps_gives_equal_results(tmp_path: Path) -> None:
    """With a model that has recurrent states; the MTP layer's steps are not captured."""
    model = make_predicting("qwen3_5", tmp_path, seed=1)
    found = compare_graphs(model, traffic(), speculative_mtp=True, **SPECULATION)
    assert found.num_replayed > 50 and found.core.stats().spec_decode_model_num_accepted_tokens > 20


@pytest.mark.slow
def test_ngram_proposals_are_rows_of_a_captured_step(
    directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many keys the rows of a stream are a chunk, which is not captured."""
    sent = [greedy(f"{i}", prompt(i, 7) * 4, 30) for i in range(2)]
    options = {"speculative_ngram": 3, "speculative_ngram_min": 1, "max_model_len": 160, "max_num_seqs": 3}
    counts = []
    for most in (batch_builder._MAX_ROW_BY_ROW_KEYS, 100):
        monkeypatch.setattr(batch_builder, "_MAX_ROW_BY_ROW_KEYS", most)
        core, device, *_ = compare_graphs(directory_of("llama"), sent, **options)
        assert core.runner.graphs is not None and core.runner.graphs.captured == [1, 2, 4, 8, 12]
        assert core.stats().spec_decode_num_draft_tokens > 20
        counts.append((device.replays, core.stats().num_steps))
    assert counts[0][0] == counts[0][1] - 1 and counts[1][0] < counts[1][1] - 5


@pytest.mark.slow
def test_proposed_rows_have_the_ranges_of_their_sequence(tmp_path: Path) -> None:
    """In the model and in a draft model."""
    directory = make_model("llama", tmp_path)  # its texts repeat themselves, so that n-grams are proposed
    sent = [greedy("shift", prompt(3, 40, period=4), 40, context=SHIFT), greedy("plain", prompt(9, 9, period=3), 30)]
    for options in ({"speculative_ngram": 2}, {"speculative_model": str(directory)}):
        found = compare_graphs(directory, sent, **options, **RANGES)
        stats, proposer = found.core.stats(), found.core.runner.proposer
        assert any(key.rows > 2 for key in found.keys)
        assert stats.spec_decode_num_accepted_tokens + stats.spec_decode_model_num_accepted_tokens > 0
        assert proposer is None or (proposer.graphs is not None and proposer.graphs.lazy_graphs.captured)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["ngrams", "draft model"], "ngrams"))
def test_proposed_rows_have_the_adapter_of_their_stream(
    kind: str, directory_of: DirectoryOf, adapters: Adapters
) -> None:
    """A draft model has no adapters, and its steps are captured."""
    options: dict[str, Any] = {"speculative_ngram": 3, "speculative_ngram_min": 1}
    if kind == "draft model":
        options = {"speculative_model": str(directory_of("llama"))}
    repeating = [prompt(i, 24, period=5) for i in range(4)]
    sent = [greedy(f"{i}", text, 40, temperature=0.3 * (i % 2), seed=i) for i, text in enumerate(repeating)]
    options = {"lora": adapters, "speculative_adaptive": False, **options, **RANGES}
    found = compare_graphs(directory_of("llama"), with_adapters(sent, 1, None), **options)
    stats, proposer = found.core.stats(), found.core.runner.proposer
    assert stats.spec_decode_num_accepted_tokens + stats.spec_decode_model_num_accepted_tokens > 0
    assert any(one.rows > 4 for one in found.keys) and len(found.keys) > 10
    assert proposer is None or (proposer.graphs is not None and proposer.graphs.num_replayed > 20)


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapters(requests: list[EngineRequest], *ids: int | None) -> list[EngineRequest]:
    """The same requests, with these adapters in turn."""
    return [replace(one, adapter=own) for one, own in zip(requests, itertools.cycle(ids), strict=False)]


def streams() -> list[EngineRequest]:
    """Streams with and without adapters that end at different times."""
    return [
        greedy("long", prompt(1, 9), 45, adapter=1),
        greedy("none", prompt(2, 12), 30),
        greedy("drawn", prompt(3, 21), 20, adapter=3, temperature=0.8, seed=3),
        greedy("short", prompt(4, 9), 12, adapter=2),
    ]


@pytest.mark.slow
def test_every_kind_of_request_with_adapters_gives_equal_results(directory_of: DirectoryOf, adapters: Adapters) -> None:
    """Several adapters and none in one step. These steps are captured at start, as adapters are loaded."""
    sent = with_adapters(traffic(), 1, None, 2, 3)
    found = compare_graphs(directory_of("llama"), sent, lora=adapters, **RANGES)
    graphs = found.core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.captured == [GraphKey(size, adapted=True) for size in (4, 2, 1)]
    assert len(found.keys) > 50 and found.num_replayed > 50


@pytest.mark.slow
def test_adapter_steps_whose_capture_fails_are_computed_without_graphs(
    directory_of: DirectoryOf, adapters: Adapters
) -> None:
    """If memory ends before steps with adapters, none is tried; if it ends during these, the other graphs remain."""
    want = answers(directory_of("llama"), streams(), lora=adapters, **RANGES)
    for tried, plain, adapted in ((2, [2, 4], []), (4, [1, 2, 4], [GraphKey(4, adapted=True)])):
        core = make_core(directory_of("llama"), lora=adapters, **RANGES)
        graphs = core.runner.graphs
        fail_captures(core, lambda number, tried=tried: number >= tried)
        graphs.capture(graphs.sizes)
        assert graphs.captured == plain and graphs.lazy_graphs.captured == adapted
        assert (graphs.obstacle is None) == (graphs.lazy_graphs.obstacle is not None)
        same(run_checked(core, streams(), every_logit=False), want, 0.0)
        assert (graphs.num_replayed > 0) == bool(adapted)


@pytest.mark.slow
@BURSTS
def test_the_device_continues_rows_with_adapters(
    burst_seconds: float, directory_of: DirectoryOf, adapters: Adapters
) -> None:
    """Also if their order changes; the host waits only for sampled tokens."""
    options: dict[str, Any] = {"lora": adapters, "burst_seconds": burst_seconds, **RANGES}
    found = compare_graphs(directory_of("llama"), streams(), **options)
    assert found.num_replayed >= 44 and {key.rows for key in found.keys} == {1, 2, 4}
    core, device = graphed(directory_of("llama"), **options)
    run(core, streams(), every_logit=False)
    assert len(set(device.waits)) <= core.stats().num_steps + 1


@pytest.mark.slow
def test_steps_without_adapters_use_graphs_without_adapters(directory_of: DirectoryOf, adapters: Adapters) -> None:
    """Although adapters are loaded, and after a stream with an adapter has ended."""
    found = compare_graphs(
        directory_of("llama"),
        [greedy("a", prompt(1, 9), 30), greedy("b", prompt(2, 9), 20)],
        [greedy("a", prompt(3, 9), 30), greedy("b", prompt(4, 9), 9, adapter=1)],
        lora=adapters,
        **RANGES,
    )
    assert len(found.keys) in (8, 9) and found.num_replayed >= 58


@pytest.mark.slow
def test_adapters_loaded_between_steps_are_used_by_the_next(
    directory_of: DirectoryOf, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are captured once adapters are used. One stream continues while another's adapter is unloaded and a third takes its
    slot, after the work that the device has been given."""
    directory, put = directory_of("llama"), LowRankTable.put
    oracle = make_core(directory, cuda_graphs=False, lora=adapters, **RANGES)
    wanted = {i: run(oracle, [greedy("r", prompt(9, 9), 60, adapter=i)])["r", 0].token_ids for i in (1, 2, 3)}
    core, device = graphed(directory, max_loras=2, **RANGES)
    keys, tokens, graphs = used_graph_keys(core), dict[str, list[int]](), core.runner.graphs
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
    for source in adapters[:2]:
        core.add_adapter(core.read_adapter(source).result(30))
    core.add(greedy("one", prompt(9, 9), 60, adapter=1))
    core.add(greedy("two", prompt(9, 9), 60, adapter=2))
    steps(20)
    assert GraphKey(4, adapted=True) in keys and device.done < device.asked, "a step is in flight"
    core.abort("two")
    core.drop_adapter(2)
    core.add_adapter(core.read_adapter(adapters[2]).result(30))
    core.add(greedy("three", prompt(9, 9), 30, adapter=3))
    while core.has_work():
        steps(1)
    assert tokens["one"] == wanted[1] and tokens["three"] == wanted[3][:30]
    assert tokens["two"] == wanted[2][: len(tokens["two"])] and len(tokens["two"]) > 10
    assert len(keys) > 50


def test_padding_rows_have_no_adapter(directory_of: DirectoryOf, adapters: Adapters) -> None:
    """Nothing is read for them, whichever rows used the slots before."""
    core = make_core(directory_of("llama"), lora=adapters, **RANGES)
    graphs = core.runner.graphs
    graphs.capture([4])
    for rows in (3, 2):
        run(core, [greedy(f"{i}", prompt(i, 9), 12, adapter=i) for i in range(1, rows + 1)], every_logit=False)
        core.runner.join()
        assert graphs.rows.adapter_slots(4).tolist() == [*range(rows), *[-1] * (4 - rows)]
    graphs.rows.reset()
    core.runner.join()
    assert graphs.rows.adapter_slots(4).tolist() == [-1] * 4


@pytest.mark.slow
def test_ranges_and_adapters_that_end_in_either_order_give_equal_results(
    directory_of: DirectoryOf, adapters: Adapters
) -> None:
    """And are in one step again."""
    sent = [
        [
            greedy("shift", prompt(1, 40), first, context=SHIFT),
            greedy("window", prompt(6, 30), first + 2, context=ContextRule("shift", 0, 20), adapter=2),
            greedy("plain", prompt(2, 9), second, adapter=1),
            greedy("none", prompt(3, 9), 55),
        ]
        for first, second in ((24, 45), (40, 20))
    ]
    found = compare_graphs(directory_of("llama"), *sent, *sent, lora=adapters, **RANGES)
    assert {(key.ranges > 0, key.adapted) for key in found.keys} == {(True, True), (False, True)}
    assert found.core.scheduler.counters.context_shifts >= 4 and found.num_replayed > 150


@pytest.mark.slow
def test_adapters_of_recurrent_models_give_equal_results(directory_of: DirectoryOf, tmp_path: Path) -> None:
    lora = save_adapters(directory_of("lfm2"), tmp_path)
    found = compare_graphs(directory_of("lfm2"), streams(), streams(), lora=lora, **RANGES)
    assert len(found.keys) > 80 and found.num_replayed > 80


@pytest.mark.slow
def test_preempted_streams_restart_with_their_adapters(directory_of: DirectoryOf, adapters: Adapters) -> None:
    memory = 10 * 16 * make_core(directory_of("llama"), cuda_graphs=False, **RANGES).info.kv_bytes_per_token
    sent = with_adapters([greedy(f"{i}", prompt(i, 20 + i), 50) for i in range(4)], 1, 2, None)
    found = compare_graphs(directory_of("llama"), sent, lora=adapters, kv_cache_memory=memory, **RANGES)
    assert found.core.stats().num_preemptions and len(found.keys) > 40
