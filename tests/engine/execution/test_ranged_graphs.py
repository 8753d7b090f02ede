"""Captured decode steps with slot ranges on a simulated device; the oracle is the same engine without graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_helpers.played_engines import device_of, graphed, kinds_that_stand, played_device
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, same
from helpers.tiny_models import make_model
from helpers.tiny_unrotated import make_unrotated

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.cuda_graphs import GraphKey
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.request import EngineRequest

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 96, "shift_context": 48, "max_num_seqs": 4}
PLAIN: dict[str, Any] = {**OPTIONS, "cuda_graphs": False}
SHIFT = ContextRule("shift", keep_tokens=16)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            make = make_unrotated if family == "bloom" else make_model
            made[family] = make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def contexts(**fields: Any) -> list[EngineRequest]:
    """A context that shifts, windows with and without sinks, and a plain context."""
    return [
        greedy("shift", prompt(1, 40), 40, context=SHIFT, **fields),
        greedy("plain", prompt(2, 9), 15, **fields),
        greedy("sinks", prompt(4, 9), 30, context=ContextRule(attention_window=16, attention_sinks=2), **fields),
        greedy("window", prompt(6, 30), 35, context=ContextRule("shift", 0, 20), **fields),
    ]


def compared(
    directory: Path, *sent: list[EngineRequest], **options: Any
) -> tuple[EngineCore, list[GraphKey], list[GraphKey]]:
    """An engine that has answered these lists in turn, with the tokens and logits of one without graphs; the keys of the graphs
    that ran its steps, and of those that ran the last list."""
    options = {**OPTIONS, **options}
    plain = make_core(directory, cuda_graphs=False, **options)
    core, _ = graphed(directory, **options)
    stood, before = kinds_that_stand(core), 0
    for requests in sent:
        before = len(stood)
        same(run_checked(core, requests, every_logit=False), run(plain, requests, every_logit=False), 0.0)
    return core, stood, stood[before:]


@pytest.mark.slow
@pytest.mark.parametrize("burst_seconds", [0.0, 1.0], ids=["a pass a step", "bursts"])
def test_contexts_of_every_kind_beside_plain_ones(burst_seconds: float, directory_of: Callable[[str], Path]) -> None:
    """Streams start and end, so that ranges appear, change and disappear, in steps that the device continues by itself."""
    core, stood, _ = compared(directory_of("llama"), contexts(), burst_seconds=burst_seconds)
    assert core.scheduler.counters.context_shifts >= 4
    assert core.runner.graphs is not None and core.runner.graphs.num_replayed >= 34
    assert len(stood) >= (5 if burst_seconds else 30)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "hunyuan", "bloom"])
def test_logits_are_those_without(family: str, directory_of: Callable[[str], Path]) -> None:
    """Layers with their own windows and rotary groups, norms after the rotation, scores that fall with the distance."""
    sent = contexts(logprobs=2)
    if family == "bloom":
        sent = [one for one in sent if one.request_id != "sinks"]
    _, stood, _ = compared(directory_of(family), sent)
    assert len(stood) >= 28 and {key.ranges for key in stood} == {2}


def test_ranges_grow_beyond_what_was_captured_and_vanish(directory_of: Callable[[str], Path]) -> None:
    """A stream with two ranges, then next to it one with passages and gaps, and then only a plain one."""
    documents = [prompt(seed, 40) for seed in (11, 12, 13)]
    reuse = NonPrefixReuseParams(32, scope="me")
    of_passages = [
        *prompt(5, 5),
        *documents[2],
        *prompt(6, 3),
        *documents[0],
        *prompt(7, 9),
        *documents[1],
        *prompt(8, 4),
    ]
    core, stood, last = compared(
        directory_of("llama"),
        [greedy(f"{i}", [*prompt(20 + i, 7), *document, 5], 1, reuse=reuse) for i, document in enumerate(documents)],
        [greedy("shift", prompt(1, 40), 20, context=SHIFT, logprobs=1), greedy("a", prompt(2, 9), 20)],
        [
            greedy("shift", prompt(1, 40), 24, context=SHIFT, logprobs=1),
            greedy("passages", of_passages, 10, reuse=reuse, logprobs=1),
            greedy("plain", prompt(2, 9), 30, logprobs=1),
        ],
        max_model_len=192,
    )
    assert core.scheduler.counters.reused_passages == 3
    assert {key.ranges for key in stood[: -len(last)]} == {2}
    assert list(dict.fromkeys(key.ranges for key in last)) == [16, 2], "6 runs in 12 parts, and then those of the other"
    graphs = core.runner.graphs
    assert graphs is not None and graphs.num_replayed > len(stood), "those of the plain one alone have no ranges"


@pytest.mark.slow
def test_rows_of_proposed_tokens(directory_of: Callable[[str], Path]) -> None:
    """Each is a row with the ranges of its sequence, in the model and in a draft model."""
    sent = [greedy("shift", prompt(3, 40, period=4), 40, context=SHIFT), greedy("plain", prompt(9, 9, period=3), 30)]
    for options in ({"speculative_ngram": 2}, {"speculative_model": str(directory_of("llama"))}):
        core, stood, _ = compared(directory_of("llama"), sent, **options)
        stats = core.stats()
        assert any(key.rows > 2 for key in stood)
        assert stats.spec_decode_num_accepted_tokens + stats.spec_decode_model_num_accepted_tokens > 0
        proposer = core.runner.proposer
        assert proposer is None or (proposer.graphs is not None and proposer.graphs.lazy_graphs.captured)


def test_a_window_gives_its_blocks_up_although_steps_are_planned_ahead(directory_of: Callable[[str], Path]) -> None:
    core, _ = graphed(directory_of("llama"), **OPTIONS)
    stood, plans, start = kinds_that_stand(core), list[int](), core.runner.start
    core.runner.start = lambda plan: plans.append(plan.num_inflight_passes) or start(plan)  # type: ignore[method-assign, func-returns-value]
    core.add(greedy("window", prompt(1, 9), 60, context=ContextRule(attention_window=16)))
    most = 0
    while core.has_work():
        core.step()
        most = max(most, *(len(seq.cache.tables[0].blocks) for seq in core.scheduler.live_sequences()), 0)
    assert most <= 3 and sum(plans) > 40 and len(stood) > 50


def asked(core: EngineCore, requests: list[EngineRequest]) -> tuple[dict[str, Any], list[set[bytes]]]:
    """Tokens and context reports, by request, and the digests in the prefix cache afterwards."""
    found = run_checked(core, requests, every_logit=False)
    told = {name: (one.token_ids, one.finish_reason, one.outputs[-1].context) for (name, _), one in found.items()}
    return told, [set(pool.cached) for pool in core.blocks.pools]


class Ahead(NamedTuple):
    """Results of an engine with graphs and of one without: outputs, block digests, shifts and dropped tokens.

    calls: the first engine's scheduler calls for steps that are not planned ahead.
    """

    got: dict[str, Any]
    want: dict[str, Any]
    names: list[set[bytes]]
    known: list[set[bytes]]
    dropped: tuple[int, int]
    all_dropped: tuple[int, int]
    calls: int


def ahead(directory: Path, sent: list[EngineRequest], burst_seconds: float, monkeypatch: pytest.MonkeyPatch) -> Ahead:
    plain = make_core(directory, cuda_graphs=False, burst_seconds=0.0, **OPTIONS)
    core, _ = graphed(directory, burst_seconds=burst_seconds, **OPTIONS)
    schedule, calls = core.scheduler.schedule, 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return schedule()

    monkeypatch.setattr(core.scheduler, "schedule", counted)
    got, names = asked(core, sent)
    want, known = asked(plain, sent)
    dropped, all_dropped = (
        (each.scheduler.counters.context_shifts, each.scheduler.counters.dropped_tokens) for each in (core, plain)
    )
    return Ahead(got, want, names, known, dropped, all_dropped, calls)


BURSTS = pytest.mark.parametrize("burst_seconds", [0.0, 1.0], ids=["a pass a step", "bursts"])


@BURSTS
def test_contexts_are_shifted_ahead(
    burst_seconds: float, directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the step before is computed, except the first time; keys, digests and reports are unchanged."""
    drawn: dict[str, Any] = {"context": SHIFT, "temperature": 1.5, "seed": 0}
    first, plain = greedy("kept", prompt(3, 40), 100, **drawn), make_core(directory_of("llama"), **PLAIN)
    ((_, one),) = run(plain, [first], every_logit=False).items()
    end = one.token_ids[24]  # the first one after a second full context
    assert end not in one.token_ids[:24]
    sent = [
        first,
        greedy(
            "none kept", prompt(40, 33), 90, context=ContextRule("shift"), reuse=NonPrefixReuseParams(32, scope="me")
        ),
        greedy("ends", prompt(3, 40), 60, stop_token_ids=(end,), **drawn),
    ]
    found = ahead(directory_of("llama"), sent, burst_seconds, monkeypatch)
    assert found.got == found.want and found.names == found.known and found.dropped == found.all_dropped
    tokens, reason, context = found.got["ends"]
    assert (len(tokens), reason, context.dropped_tokens) == (25, "stop", 16)
    assert found.dropped[0] >= 12 and found.calls < 16


@BURSTS
def test_windows_give_blocks_up_ahead(
    burst_seconds: float, directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have the same digests if each pass is a step. Longer steps end before a window releases the blocks that it has
    passed: blocks that become full in them have other digests, and a stream that ends in one retains the last blocks."""
    sent = [
        greedy(
            f"{window} seen",
            prompt(window, held),
            90,
            context=ContextRule("shift", 0, window, sinks),
            reuse=NonPrefixReuseParams(32, scope="me"),
        )
        for window, held, sinks in (
            (1, 22, 0),
            (17, 30, 0),
            (20, 30, 2),
            (33, 27, 0),
        )  # blocks become full in different steps
    ]
    found = ahead(directory_of("llama"), sent, burst_seconds, monkeypatch)
    assert found.got == found.want
    if not burst_seconds:
        assert found.names == found.known and found.dropped == found.all_dropped
    assert found.all_dropped[0] >= found.dropped[0] >= 16 and found.calls < 20


def test_rows_that_are_none_touch_nothing(directory_of: Callable[[str], Path]) -> None:
    """A graph of four rows runs a step of one."""
    core = make_core(directory_of("llama"), **OPTIONS)
    graphs = core.runner.graphs
    assert graphs is not None
    graphs.capture([4])
    planes = [plane for planes in core.runner.cache.planes for plane in planes]
    for plane in planes:
        plane.fill_(7)
    run(core, [greedy("shift", prompt(1, 40), 30, context=SHIFT)], every_logit=False)
    assert graphs.lazy_graphs.captured == [GraphKey(4, 2)]
    for plane in planes:
        assert (
            int((plane != 7).flatten(2).any(2).any(0).sum()) <= 5
        )  # blocks of 69 tokens, in the order of the free list


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no\nmore")])
def test_what_is_not_captured_takes_the_ordinary_way(
    error: Exception, directory_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    sent = [greedy("shift", prompt(1, 40), 20, context=SHIFT)]
    want = run(make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS), sent)
    core, device = graphed(directory_of("llama"), **OPTIONS)

    def fails() -> None:
        raise error

    device.fails = fails
    same(run(core, sent, every_logit=False), want, 0.0)
    graphs = core.runner.graphs
    assert graphs is not None and graphs.lazy_graphs.captured == [] and graphs.lazy_graphs.obstacle is not None
    assert caplog.text.count("a decode step of 1 rows in 2 ranges was not captured") == 1
    assert device_of(core.runner.decoder).replays == graphs.num_replayed > 0
