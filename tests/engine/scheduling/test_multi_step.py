"""Multi-step decoding changes only the number of steps: the oracle is the same engine with one pass per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.fake_executor import add, make_request, make_scheduler
from helpers.adapters import save_adapter
from helpers.cache_invariants import assert_balanced
from helpers.device import DEVICE
from helpers.engines import greedy, make_core, run
from helpers.every_request import DEMO, prompt, run_checked, same, small_models, traffic

from windlass.engine.errors import LoadError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import cpu


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return small_models(tmp_path_factory)


def scaled_traffic() -> list[EngineRequest]:
    """Texts with frequency changes or dropped tokens, and scalings with limited distances or second key copies."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    sent = [
        greedy(
            f"{update} {length}",
            prompt(length, length),
            50,
            rope_scaling=RopeScaling.from_dict(dynamic),
            rope_update=update,
        )
        for update in ("frozen", "recompute", "rotate")
        for length in (9, 60)
    ]
    for kind in (
        {"rope_type": "dual_chunk", "chunk_size": 32},
        {"rope_type": "self_extend", "group_size": 2, "window": 16},
    ):
        sent.append(greedy(str(kind["rope_type"]), prompt(3, 30), 50, rope_scaling=RopeScaling.from_dict(kind)))
    sent.append(greedy("shift", prompt(4, 30), 120, context=ContextRule("shift", 4)))
    sent.append(
        greedy("window", prompt(5, 30), 40, context=ContextRule("stop", attention_window=16, attention_sinks=2))
    )
    return sent


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("model", "sent", "options"),
    [
        ("llama", traffic, {}),
        ("llama", traffic, {"deterministic": True}),
        ("gemma3", traffic, {"deterministic": True}),
        ("qwen2", traffic, {"deterministic": True, "kv_cache_dtype": "int8", "prefix_caching": False}),
        ("demo", traffic, {"deterministic": True, "quantization": "int8", "max_model_len": 128, "max_num_seqs": 3}),
        ("llama", scaled_traffic, {"deterministic": True, "max_model_len": 160, "shift_context": 96}),
    ],
    ids=["llama", "llama exact", "gemma3", "int8 cache", "int8 weights", "changing frequencies"],
)
def test_tokens_equal_one_pass_per_step(
    model: str, sent: Callable[[], list[EngineRequest]], options: dict[str, Any], directory_of: Callable[[str], Path]
) -> None:
    options = {"max_model_len": 96, **options}
    want = run(make_core(directory_of(model), **options), sent())
    core = make_core(directory_of(model), burst_seconds=1.0, **options)
    got = run_checked(core, sent(), every_logit=False)
    same(got, want, 0.0 if options.get("deterministic") else 1e-5)
    stats = core.stats()
    assert stats.generation_tokens == sum(len(result.token_ids) for result in got.values())
    in_bursts = [
        len(output.token_ids) for result in got.values() for output in result.outputs if len(output.token_ids) > 1
    ]
    assert len(in_bursts) > 5 and max(in_bursts) > 3, "hardly anything came in bursts"
    assert core.runner.positions_computed == stats.step_tokens_sum


@pytest.mark.parametrize("logprobs", [None, 1], ids=["by kernels", "by the sampler"])
def test_stream_end_ends_its_passes(logprobs: int | None, directory_of: Callable[[str], Path]) -> None:
    """No pass is computed for an ended stream, and the other streams of the step do not wait for it."""
    core = make_core(directory_of("llama"), burst_seconds=1.0)
    (alone,) = run(core, [greedy("a", prompt(1, 8), 24)], every_logit=False).values()
    stop = next(token for i, token in enumerate(alone.token_ids) if i > 4 and token not in alone.token_ids[:i])
    kept = alone.token_ids.index(stop) + 1
    before = core.runner.positions_computed
    again = greedy("b", prompt(1, 8), 24, stop_token_ids=(stop,), cache_salt="other", logprobs=logprobs)
    found = run(core, [again], every_logit=False)["b", 0]
    assert (found.token_ids, found.finish_reason) == (alone.token_ids[:kept], "stop")
    assert core.runner.positions_computed - before == 8 + kept - 1


@pytest.mark.parametrize("num_passes", [1, 3])
def test_invalid_logits_fail_only_their_request(num_passes: int, directory_of: Callable[[str], Path]) -> None:
    """Tokens sampled before the error are returned, and the other stream continues correctly."""
    core = make_core(directory_of("llama"), burst_seconds=1.0)
    want = run(core, [greedy("good", prompt(1, 8), 24, logprobs=0)])["good", 0]
    for name in ("good", "bad"):
        core.add(greedy(name, prompt(1 if name == "good" else 2, 8), 24, cache_salt=name, logprobs=0))
    sample, calls = core.runner.sampler.sample, 0

    def spoil(logits: torch.Tensor, slots: Any, maxima: Any = None) -> Any:
        nonlocal calls
        calls += len(slots) == 2
        if calls >= 6 + num_passes:
            logits = logits.clone()
            for row, slot in slots:
                if len(slots) == 2 and slot.token_ids[:8] == prompt(2, 8):
                    logits[row] = float("nan")
            maxima = None
        return sample(logits, slots, maxima)

    core.runner.sampler.sample = spoil  # type: ignore[method-assign]
    got: dict[str, list[int]] = {"good": [], "bad": []}
    errors = []
    while core.has_work():
        for output in core.step():
            got[output.request_id] += output.token_ids
            errors += [(output.request_id, str(output.error))] if output.error else []
    assert got["good"] == want.token_ids
    assert [name for name, _ in errors] == ["bad"] and "NaN" in errors[0][1]
    assert len(got["bad"]) == 5 + num_passes
    assert_balanced(core.blocks)


def greedy_traffic(vocab: int = 128) -> list[EngineRequest]:
    """Requests without a sampler between passes, with short and long texts and several frequencies."""
    scalings = [None, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 2.0}]
    return [
        greedy(
            str(i),
            prompt(i, 5 + 17 * i, vocab),
            70,
            stop_token_ids=tuple(range(9, 20)) if i == 1 else (),
            rope_scaling=None if scaling is None else RopeScaling.from_dict(scaling),
        )
        for i, scaling in enumerate(scalings)
    ]


needs_kernels = pytest.mark.skipif(
    DEVICE != "cpu" or cpu.unavailable_reason() is not None, reason="without compiled kernels no pass goes on by itself"
)


@pytest.mark.quick_cases(5)
@needs_kernels
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("demo", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("demo", {"quantization": "int4"}),
        ("mixtral", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_passes_in_kernels_give_equal_tokens(
    model: str, options: dict[str, Any], directory_of: Callable[[str], Path]
) -> None:
    """Consecutive passes without Python across block and window boundaries."""
    options = {"deterministic": True, "max_model_len": 160, **options}
    sent = greedy_traffic(4000 if model == "demo" else 128)
    same_by_kernels(directory_of(model), sent, **options)


def same_by_kernels(directory: Path, sent: list[EngineRequest], **options: Any) -> None:
    """Compare with one pass per step, and check that most tokens did not use the sampler."""
    want = run(make_core(directory, **options), sent)
    core = make_core(directory, burst_seconds=1.0, **options)
    sampler, seen = core.runner.sampler.sample, 0

    def count(logits: torch.Tensor, slots: Any, maxima: Any = None) -> Any:
        nonlocal seen
        seen += len(slots)
        return sampler(logits, slots, maxima)

    core.runner.sampler.sample = count  # type: ignore[method-assign]
    got = run_checked(core, sent, every_logit=False)
    assert {key: (one.token_ids, one.finish_reason) for key, one in got.items()} == {
        key: (one.token_ids, one.finish_reason) for key, one in want.items()
    }
    drawn = core.stats().generation_tokens
    assert drawn == sum(len(one.token_ids) for one in want.values())
    assert seen < drawn / 2, "the sampler saw most of the tokens"


@needs_kernels
def test_passes_in_kernels_with_adapters(directory_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory = directory_of("llama")
    paths = [save_adapter(tmp_path / str(i), directory, seed=i, strength=0.4) for i in (1, 2)]
    sources = tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(paths, start=1))
    sent = [greedy(str(i), prompt(7, 20), 60, adapter=i) for i in (None, 1, 2)]
    same_by_kernels(directory, sent, lora=sources, deterministic=True)


def test_pass_with_invalid_logits_is_not_counted(directory_of: Callable[[str], Path]) -> None:
    """The kernels stop before it; the request fails in the next step, after the tokens sampled until then."""
    core = make_core(directory_of("llama"), burst_seconds=1.0)
    for seed in range(20):  # until a token within a text is new
        want = run(core, [greedy("a", prompt(seed, 8), 24)], every_logit=False)["a", 0].token_ids
        new = [i for i in range(9, 20) if want[i] not in want[:i]]
        if new:
            break
    at, weight = new[0], core.runner.decoder.weights()["embedding"]
    assert isinstance(weight, torch.Tensor)
    core.add(greedy("b", prompt(seed, 8), 24, cache_salt="other"))
    got: list[int] = []
    error = None
    while core.has_work():
        for output in core.step():
            got += output.token_ids
            error = output.error or error
        if 2 <= len(got) <= at:
            weight[want[at]] = float("nan")  # its row is read when it is the last token
    assert got == want[: at + 1] and "NaN" in str(error)


def passes_of(seconds: list[float], *, burst_seconds: float = 1.0, **options: Any) -> list[int]:
    """The number of passes of each step of one stream, if a step of one pass takes `seconds[i]`."""
    scheduler, executor, _ = make_scheduler(burst_seconds=burst_seconds, **options)
    add(executor, make_request("a", [1, 2], max_tokens=60))
    found = []
    for duration in seconds:
        plan = scheduler.schedule()
        found.append(plan.num_passes)
        results = executor.execute(plan)
        scheduler.observe(plan, plan.num_passes * duration)
        scheduler.update(plan, results)
    return found


def test_passes_fit_into_the_time_of_a_step() -> None:
    assert passes_of([0.25] * 6) == [1, 1, 4, 4, 4, 4], "a prompt, and a first step that shows how long a pass takes"
    assert passes_of([0.6] * 4) == [1, 1, 1, 1]
    assert passes_of([0.01] * 4) == [1, 1, 8, 8], "there is a bound, whatever the time"
    assert passes_of([0.25] * 4, burst_seconds=0.0) == [1, 1, 1, 1]
    slower = passes_of([0.2, 0.2, 0.2, *[0.5] * 12])
    assert slower[2:4] == [5, 5] and slower[-1] == 2, "it learns from each step"


@pytest.mark.parametrize("beside", ["a prompt", "somebody who waits", "a draft"])
def test_single_pass_next_to_other_work(beside: str) -> None:
    """New requests would wait, and proposals compute several tokens per step anyway."""
    scheduler, executor, _ = make_scheduler(
        burst_seconds=1.0,
        max_num_seqs=1 if beside == "somebody who waits" else 8,
        speculation=4 * (beside == "a draft"),
    )
    add(executor, make_request("a", [1, 1, 1, 1, 1, 1] if beside == "a draft" else [1, 2], max_tokens=60))

    def step() -> Any:
        plan = scheduler.schedule()
        results = executor.execute(plan)
        scheduler.observe(plan, 0.1 * plan.num_passes)
        scheduler.update(plan, results)
        return plan

    plans = [step() for _ in range(3)]
    if beside == "a draft":
        plans += [step() for _ in range(6)]
        assert any(plan.num_draft_tokens for plan in plans)
        assert all(plan.num_passes == 1 for plan in plans if plan.num_draft_tokens)
        return
    assert plans[-1].num_passes == 8
    add(executor, make_request("b", [3, 2, 1], max_tokens=20))
    assert step().num_passes == 1
    later = [step().num_passes for _ in range(2)]
    assert later == [1, 8 if beside == "a prompt" else 1], "two streams show how long their passes take, too"


def test_multi_step_decoding_does_not_preempt() -> None:
    """The number of passes is limited by the free blocks."""
    scheduler, executor, _ = make_scheduler(groups=[(8, None)], burst_seconds=1.0, block_size=2, max_model_len=14)
    for name in ("a", "b"):
        add(executor, make_request(name, [1, 2, 3] if name == "a" else [3, 2, 1], max_tokens=5))
    while scheduler.has_work():
        plan = scheduler.schedule()
        results = executor.execute(plan)
        scheduler.observe(plan, 0.1 * plan.num_passes)
        scheduler.update(plan, results)
    assert executor.num_bursts > 0
    assert scheduler.stats().num_preemptions == 0


def test_invalid_numbers_of_passes_are_refused() -> None:
    for wrong in (-0.1, 1.5):
        with pytest.raises(LoadError, match=r"scheduling\.burst_seconds"):
            make_core(DEMO, burst_seconds=wrong)
