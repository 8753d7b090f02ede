"""Async scheduling: the tokens equal those of an engine that waits for each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.played_engines import BURSTS, answers, graphed, played_device, record_plans, texts
from helpers.cache_invariants import assert_balanced
from helpers.engines import greedy, make_core, run
from helpers.every_request import prompt, run_checked, small_models, traffic
from helpers.little_memory import NO_ROOM, fail_ahead

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import DeviceMemoryError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling import async_scheduling

__all__ = ["played_device"]
OPTIONS: dict[str, Any] = {"max_model_len": 96}
DirectoryOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> DirectoryOf:
    return small_models(tmp_path_factory)


def alone() -> list[EngineRequest]:
    """Streams without shared sampling state that end by length, by stop tokens and by the context limit."""
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "seed": 8, "top_k": 4, "top_p": 0.9},
        {"temperature": 1.3, "seed": 9, "min_p": 0.1, "n": 2},
        {"stop_token_ids": tuple(range(40, 60))},
        {"temperature": 0.9, "seed": 6, "stop_token_ids": tuple(range(3, 9))},
        {"ignore_eos": False},
        {"max_tokens": 90},
        {"stop_token_ids": tuple(range(20, 50)), "min_tokens": 4},
    ]
    return [greedy(f"{i}", prompt(i, 9 + 4 * i), **{"max_tokens": 30, **given}) for i, given in enumerate(fields)]


def changing() -> list[EngineRequest]:
    """Requests whose frequencies change with the length."""
    kind = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})
    return [
        greedy(f"{update} {length}", prompt(length, length), 50, rope_scaling=kind, rope_update=update)
        for update in ("frozen", "recompute", "rotate")
        for length in (9, 60)
    ]


@pytest.mark.slow
@BURSTS
@pytest.mark.parametrize(
    ("sent", "options"),
    [
        (alone, {}),
        pytest.param(alone, {"max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param(alone, {"kv_cache_memory": 100 << 10, "prefix_caching": False}, marks=pytest.mark.slow),
        (changing, {"max_model_len": 160}),
        pytest.param(traffic, {}, marks=pytest.mark.slow),
        pytest.param(alone, {"speculative_ngram": 3}, marks=pytest.mark.slow),
    ],
    ids=["alone", "few sequences", "few blocks", "frequencies", "every kind", "speculation"],
)
def test_tokens_equal_those_of_steps_that_wait(
    sent: Callable[[], list[EngineRequest]], options: dict[str, Any], burst_seconds: float, directory_of: DirectoryOf
) -> None:
    options = {**OPTIONS, **options}
    want = answers(directory_of("llama"), sent(), **options)
    core, _ = graphed(directory_of("llama"), burst_seconds=burst_seconds, **options)
    plans = record_plans(core)
    assert texts(run_checked(core, sent(), every_logit=False)) == texts(want)
    if "kv_cache_memory" in options:
        assert core.stats().num_preemptions > 0
    ahead = sum(plan.num_inflight_passes > 0 for plan in plans)
    assert ahead == 0 if "speculative_ngram" in options else ahead > 0
    assert core.stats().generation_tokens == sum(len(one.token_ids) for one in want.values())


@BURSTS
def test_the_next_step_is_submitted_before_the_host_waits(burst_seconds: float, directory_of: DirectoryOf) -> None:
    core, device = graphed(directory_of("llama"), burst_seconds=burst_seconds, **OPTIONS)
    plans = record_plans(core)
    for name in ("a", "b"):
        core.add(greedy(name, prompt(1 if name == "a" else 2, 9), 60))
    while not plans or not plans[-1].num_inflight_passes:
        core.step()
    for _ in range(3):
        asked, waits = device.asked, len(device.waits)
        core.step()
        assert plans[-1].num_inflight_passes
        assert device.asked > asked, "the next step"
        assert device.waits[waits:] and max(device.waits[waits:]) <= asked, "only for the previous step"
        assert device.done <= asked
    while core.has_work():
        core.step()


def drive(core: EngineCore, meanwhile: Callable[[int], None]) -> dict[str, list[int]]:
    """Step until the engine is idle; meanwhile(i) is called before the i-th step."""
    got: dict[str, list[int]] = {}
    for i in range(500):
        meanwhile(i)
        if not core.has_work():
            assert_balanced(core.blocks)
            return got
        for output in core.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("not idle after 500 steps")


@pytest.mark.slow
@BURSTS
def test_requests_aborted_and_added_during_a_step_in_flight(burst_seconds: float, directory_of: DirectoryOf) -> None:
    """Blocks of aborted requests are reused while the device still writes to them."""
    sent = {name: greedy(name, prompt(i, 20), 40, cache_salt=name) for i, name in enumerate("abcdef")}
    want = answers(directory_of("llama"), sent.values(), **OPTIONS)
    core, _ = graphed(directory_of("llama"), burst_seconds=burst_seconds, kv_cache_memory=100 << 10, **OPTIONS)
    plans = record_plans(core)
    for name in "abc":
        core.add(sent[name])
    seen = []

    def meanwhile(i: int) -> None:
        seen.append(bool(plans) and plans[-1].num_inflight_passes > 0)
        if len(seen) > 3 and all(seen[-2:]):
            for leaves, comes in (("a", "d"), ("b", "e"), ("c", "f")):
                if any(seq.request.request_id == leaves for seq in core.scheduler.live_sequences()):
                    core.abort(leaves)
                    core.add(sent[comes])
                    return

    got = drive(core, meanwhile)
    for name in "abcdef":
        tokens = want[name, 0].token_ids
        assert got[name] == tokens[: len(got[name])]
        assert (len(got[name]) == 40) == (name in "def")


def test_aborting_the_only_request_of_a_step_in_flight(directory_of: DirectoryOf) -> None:
    core, device = graphed(directory_of("llama"), burst_seconds=1.0, **OPTIONS)
    plans = record_plans(core)
    core.add(greedy("a", prompt(1, 9), 60))
    while not plans or not plans[-1].num_inflight_passes:
        core.step()
    core.abort("a")
    assert not core.has_work() and device.done < device.asked
    assert_balanced(core.blocks)
    sent = [greedy("b", prompt(2, 30), 20)]
    want = answers(directory_of("llama"), sent, **OPTIONS)
    assert texts(run(core, sent, every_logit=False)) == texts(want)


@BURSTS
def test_invalid_logits_fail_only_their_own_request(burst_seconds: float, directory_of: DirectoryOf) -> None:
    """Its tokens in flight are dropped."""
    plain = make_core(directory_of("llama"), cuda_graphs=False, **OPTIONS)
    for seed in range(20):  # until one text contains a token that the other one lacks
        want = run(plain, [greedy(n, prompt(s, 8), 24, cache_salt=f"{n}{seed}") for n, s in (("a", seed), ("b", 77))])
        a, b = want["a", 0].token_ids, want["b", 0].token_ids
        new = [i for i in range(9, 20) if a[i] not in a[:i] and a[i] not in b and a[i] not in prompt(77, 8)]
        if new:
            break
    core, _ = graphed(directory_of("llama"), burst_seconds=burst_seconds, **OPTIONS)
    weight = core.runner.decoder.weights()["embedding"]
    assert isinstance(weight, torch.Tensor)
    errors: dict[str, str] = {}
    got: dict[str, list[int]] = {"a": [], "b": []}
    core.add(greedy("a", prompt(seed, 8), 24))
    core.add(greedy("b", prompt(77, 8), 24))
    while core.has_work():
        for output in core.step():
            got[output.request_id] += output.token_ids
            if output.error:
                errors[output.request_id] = str(output.error)
        if len(got["a"]) == 1:
            weight[a[new[0]]] = float("nan")  # its row is read when it is the last token
    assert got["a"] == a[: new[0] + 1] and got["b"] == b
    assert list(errors) == ["a"] and "NaN" in errors["a"]
    assert_balanced(core.blocks)


def shifting() -> list[EngineRequest]:
    """Requests with contexts that release a block before the step that is planned ahead."""
    rules = (ContextRule("shift", keep_tokens=16), ContextRule("shift", 0, 20), ContextRule())
    return [greedy(f"{i}", prompt(i, 20 + i), 50, context=rule) for i, rule in enumerate(rules)]


@pytest.mark.slow
@BURSTS
@pytest.mark.parametrize(
    ("sent", "every"),
    [pytest.param(alone, 2, marks=pytest.mark.slow), (shifting, 2), pytest.param(alone, 1, marks=pytest.mark.slow)],
    ids=["alone", "shifting", "always"],
)
def test_a_step_planned_ahead_without_memory_is_computed_after_the_previous_one(
    sent: Callable[[], list[EngineRequest]],
    every: int,
    burst_seconds: float,
    directory_of: DirectoryOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request fails, wherever in the step the memory ends."""
    options = {**OPTIONS, "shift_context": 48} if sent is shifting else OPTIONS
    want = answers(directory_of("llama"), sent(), **options)
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 0)
    core, _ = graphed(directory_of("llama"), burst_seconds=burst_seconds, **options)
    failed = fail_ahead(core, monkeypatch, every=every)
    assert texts(run_checked(core, sent(), every_logit=False)) == texts(want)
    assert len(set(failed)) > 1


def test_async_scheduling_pauses_after_a_step_without_memory(
    directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_scheduling, "FIRST_PAUSE", 4)
    core, _ = graphed(directory_of("llama"), burst_seconds=0.0, **OPTIONS)
    failed = fail_ahead(core, monkeypatch, every=1)
    core.add(greedy("a", prompt(1, 9), 30))
    steps = 0
    while core.has_work():
        core.step()
        steps += 1
    assert 2 <= len(failed) <= 4  # after 4, 8 and 16 steps
    counters = core.scheduler.counters
    assert counters.num_steps == sum(counters.step_tokens) == steps
    assert counters.step_tokens_sum == 9 + 29


@pytest.mark.slow
@BURSTS
def test_lasting_lack_of_memory_fails_the_newest_request(
    burst_seconds: float, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without any other request, once the results of the step before the failed one are processed."""
    want = answers(directory_of("llama"), [greedy("a", prompt(1, 9), 30)], **OPTIONS)
    core, _ = graphed(directory_of("llama"), burst_seconds=burst_seconds, **OPTIONS)
    core.add(greedy("a", prompt(1, 9), 30))
    got = [output for _ in range(3) for output in core.step()]

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(NO_ROOM)

    for name in ("submit", "run"):
        monkeypatch.setattr(core.runner.graphs, name, fails)
    while core.has_work():
        got += core.step()
    tokens = [token for output in got for token in output.token_ids]
    assert 0 < len(tokens) < 30 and tokens == want["a", 0].token_ids[: len(tokens)]
    assert [type(output.error) for output in got if output.error] == [DeviceMemoryError]
    assert_balanced(core.blocks)
