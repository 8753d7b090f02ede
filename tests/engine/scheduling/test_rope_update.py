"""Frequency changes: results depend on the request only, not on batch, chunks, preemption or earlier requests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cache_invariants import assert_balanced
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import Reference, make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.execution.cuda_graphs import StepFuture
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import SchedulerOutput
from windlass.engine.scheduling.sequence import SequenceStatus

M = 64
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})
LONGROPE = RopeScaling.from_dict(
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": M,
    }
)
# Both of Gemma's rotary groups change, at different lengths: the local layers have the switch, the others the grid.
NESTED = RopeScaling.from_dict(
    {
        "full_attention": DYNAMIC.to_dict(),
        "sliding_attention": {**LONGROPE.to_dict(), "original_max_position_embeddings": 80},
    }
)
PROMPT = torch.randint(3, 128, (50,), generator=torch.Generator().manual_seed(1)).tolist()
LENGTH = 70  # tokens generated: the grid has points at 64, 76.1, 90.5, 107.6 and 128

CASES = {
    "dynamic_recompute": ("llama", DYNAMIC, "recompute"),
    "dynamic_rotate": ("llama", DYNAMIC, "rotate"),
    "longrope_recompute": ("llama", LONGROPE, None),
    "longrope_rotate": ("llama", LONGROPE, "rotate"),
    "window_rotate": ("mistral", DYNAMIC, "rotate"),
    "two_groups_recompute": ("gemma3", NESTED, "recompute"),
    "two_groups_rotate": ("gemma3", NESTED, "rotate"),
    "global_layers_rotate": ("gemma3", DYNAMIC, "rotate"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = sorted({family for family, _, _ in CASES.values()})
    return {name: make_model(name, tmp_path_factory.mktemp(name), max_position_embeddings=M) for name in families}


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 256, **options})


def request(name: str, case: str, tokens: int = LENGTH, **fields: Any) -> EngineRequest:
    _, scaling, policy = CASES[case]
    return greedy(name, PROMPT, tokens, rope_scaling=scaling, rope_update=policy, **fields)


def assert_same(got: Finished, right: Finished) -> None:
    assert got.token_ids == right.token_ids
    difference = (torch.stack(got.logits) - torch.stack(right.logits)).abs().max()
    assert difference / torch.stack(right.logits).abs().max() < 1e-5
    assert got.outputs[-1].rotary == right.outputs[-1].rotary


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_result_depends_on_the_request_only(case: str, models: dict[str, Path]) -> None:
    model = models[CASES[case][0]]
    core = core_of(model)
    alone = run(core, [request("a", case)])["a", 0]
    report = alone.outputs[-1].rotary
    rerotations = {"dynamic": 4, "longrope": 1, "window": 4, "two": 5, "global": 4}[case.split("_")[0]]
    rotates = case.endswith("rotate")
    assert report is not None and report.moves == (rerotations if rotates else 0)
    assert report.policy == ("rotate" if rotates else "recompute")
    stats = core.stats()
    assert (stats.key_moves > 0) == rotates
    assert (stats.recomputed_tokens["rope_update"] > 0) != rotates

    # After another request that left blocks in the prefix cache.
    assert_same(run(core, [request("b", case)])["b", 0], alone)
    # Chunks of any size, together with requests of other lengths and scalings.
    others = [
        greedy("long", PROMPT * 3, 20, rope_scaling=CASES[case][1], rope_update="frozen"),
        greedy("plain", PROMPT[:20], 60),
        request("twin", case, 30),
    ]
    small = core_of(model, max_num_batched_tokens=7)
    together = run(small, [others[0], request("c", case), *others[1:]])
    assert_same(together["c", 0], alone)
    assert together["twin", 0].token_ids == alone.token_ids[:30]

    # Preempted repeatedly, for lack of blocks and at random.
    tight = core_of(model, kv_cache_memory=core.info.kv_bytes_per_token * 16 * 20, max_num_batched_tokens=33)
    step = tight.step
    steps = itertools.count(1)

    def step_and_disturb() -> list[RequestOutput]:
        running = [s for s in tight.scheduler.live_sequences() if s.status is SequenceStatus.RUNNING]
        if next(steps) % 23 == 0 and running:
            tight.scheduler._queues.preempt(running[0])
        return step()

    tight.step = step_and_disturb  # type: ignore[method-assign]
    crowd = run(tight, [request(f"p{i}", case, priority=i) for i in range(3)])
    for i in range(3):
        assert_same(crowd[f"p{i}", 0], alone)
    stats = tight.stats()
    assert stats.num_preemptions >= 3
    assert not rotates or stats.recomputed_tokens["preemption"] > 50  # the prefix cache has keys of other requests


@pytest.mark.parametrize("case", ["dynamic_rotate", "dynamic_recompute"])
def test_samples_change_frequencies_independently(case: str, models: dict[str, Path]) -> None:
    """The prompt ends with a rotary stage, so that the samples re-rotate the blocks that they share."""
    prompt = (PROMPT + PROMPT)[:M]
    _, scaling, policy = CASES[case]
    core = core_of(models["llama"])
    three = greedy("n", prompt, 30, n=3, rope_scaling=scaling, rope_update=policy)
    results = run(core, [three])
    alone = run(core_of(models["llama"]), [greedy("a", prompt, 30, rope_scaling=scaling, rope_update=policy)])["a", 0]
    for index in range(3):
        assert_same(results["n", index], alone)


def test_recompute_equals_an_uncached_model_at_every_length(models: dict[str, Path]) -> None:
    model = models["llama"]
    core = core_of(model)
    for exact, tokens in ((False, LENGTH), (True, 24)):
        sent = greedy("a", PROMPT, tokens, rope_scaling=DYNAMIC, rope_update="recompute", rope_exact=exact)
        plan = core.plan_rotation(sent)
        result = run(core, [sent])["a", 0]
        for i, logits in enumerate(result.logits):
            length = len(PROMPT) + i
            stage = plan.stage(length)
            assert stage.effective_lengths[0] == pytest.approx(
                max(length, M) if exact else M * 2.0 ** (-(-max(0, _quarter_octaves(length)) // 1) / 4)
            )
            if i % 6 == 5 or length in (M, M + 1):
                reference = Reference(model, stage.specs, ["full_attention"])
                right = reference.logits((PROMPT + result.token_ids)[:length])[-1]
                assert float((logits - right).abs().max() / right.abs().max()) < 1e-5
    # Every token past M costs a pass over all of them.
    assert core.stats().recomputed_tokens["rope_update"] > sum(range(M, len(PROMPT) + 23))


def _quarter_octaves(length: int) -> float:
    return 4 * float(torch.tensor(length / M, dtype=torch.float64).log2())


def test_rerotated_keys_are_private(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    result = run(core, [request("a", "dynamic_rotate")])["a", 0]
    longer = greedy("b", PROMPT + result.token_ids, 2, rope_scaling=DYNAMIC, rope_update="rotate")
    again = run(core, [longer])["b", 0]
    # A prompt of 120 tokens starts under the frequencies of 128, which nothing was computed under from the start.
    assert again.outputs[-1].cached_tokens == 0
    short = greedy("c", PROMPT + result.token_ids[:20], 2, rope_scaling=None)
    # What was computed before the first re-rotation is the plain model's, and stays so: 64 tokens, of which 63 were computed.
    assert run(core, [short])["c", 0].outputs[-1].cached_tokens == 64


def test_preempted_sequence_does_not_use_keys_computed_past_the_change(
    models: dict[str, Path],
) -> None:
    """Up to M `rotate` and no scaling share fingerprint and keys; past it the same tokens have other keys."""
    alone = run(core_of(models["llama"]), [request("a", "dynamic_rotate")])["a", 0]
    core = core_of(models["llama"])
    run(core, [greedy("plain", PROMPT + alone.token_ids, 2)])
    step = core.step

    def step_and_preempt() -> list[RequestOutput]:
        for sequence in core.scheduler.live_sequences():
            if sequence.cache.num_rerotations == 2 and core.stats().num_preemptions == 0:
                core.scheduler._queues.preempt(sequence)
        return step()

    core.step = step_and_preempt  # type: ignore[method-assign]
    assert_same(run(core, [request("b", "dynamic_rotate")])["b", 0], alone)
    assert core.stats().num_preemptions == 1


def test_keys_of_a_single_length_are_not_shared(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    pool = core.blocks.pools[0]
    for prompt in (PROMPT, PROMPT * 2):
        exact = greedy("a", prompt, 30, rope_scaling=DYNAMIC, rope_update="recompute", rope_exact=True)
        run(core, [exact])
        assert len(pool.cached) <= M // 16  # those up to M, which are shared
    # Longrope has one switch with any value of `exact`: its keys can be shared.
    run(core, [greedy("a", PROMPT, 30, rope_scaling=LONGROPE, rope_update="recompute", rope_exact=True)])
    assert len(pool.cached) > M // 16 + 2


def test_one_rerotation_per_step(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    alone = run(core_of(models["llama"]), [request("a", "dynamic_rotate", 40)])["a", 0]
    start, counts = core.runner.start, []

    def watch(output: SchedulerOutput) -> StepFuture:
        counts.append(sum(1 for rerotation in output.rerotations if rerotation.start == 0))
        return start(output)

    core.runner.start = watch  # type: ignore[method-assign]
    results = run(core, [request(str(i), "dynamic_rotate", 40) for i in range(4)])
    assert max(counts) == 1 and sum(counts) == 4 * 2
    for i in range(4):
        assert_same(results[str(i), 0], alone)


def test_frozen_frequencies_use_the_resolved_length(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    for tokens, effective in ((14, M), (15, M * 2**0.25), (40, M * 2**0.5), (200, M * 2.0**2)):
        sent = greedy("a", PROMPT, tokens, rope_scaling=DYNAMIC)
        report = run(core, [sent])["a", 0].outputs[-1].rotary
        assert report is not None and report.policy == "frozen" and report.moves == 0
        assert report.effective_length == pytest.approx(effective)


def test_request_whose_keys_do_not_fit_twice_is_refused(models: dict[str, Path]) -> None:
    per_block = 16 * core_of(models["llama"]).info.kv_bytes_per_token
    core = core_of(models["llama"], kv_cache_memory=12 * per_block, max_model_len=160)
    with pytest.raises(RequestError, match="twice") as caught:
        core.add(request("a", "dynamic_rotate", 100))
    assert caught.value.code == "kv_cache_exceeded"
    assert "set rope_update to frozen or recompute" in caught.value.message
    assert run(core, [request("a", "dynamic_recompute", 100)])["a", 0].finish_reason == "length"


def test_rerotated_bfloat16_keys_are_rounded_once(models: dict[str, Path]) -> None:
    """After four re-rotations a key is as close to the exact one as after its first rounding."""
    core = core_of(models["llama"], kv_cache_dtype="bfloat16")
    sent = request("a", "dynamic_rotate")
    core.add(sent)
    sequence = core.scheduler.live_sequences()[0]
    originals: torch.Tensor | None = None
    while core.has_work():
        if sequence.cache.originals:
            kept = torch.tensor(sequence.cache.originals[0].blocks)
            now = core.runner.cache.pages(0).key[kept].cpu()
            if originals is not None:
                assert torch.equal(
                    now[: len(originals)][:3], originals[:3]
                )  # full since the first re-rotation, so unchanged
            originals = now
            if sequence.cache.num_rerotations == 4:
                break
        core.step()
    assert originals is not None
    table = torch.tensor(sequence.cache.block_tables[0][:3])
    rerotated = core.runner.cache.pages(0).key[table].flatten(0, 1).double().cpu()  # [48, Hkv, D]
    old, new = sequence.cache.originals[0].origins[0][1][0], sequence.stage.specs[0]
    step = torch.tensor(new.inv_freq, dtype=torch.float64) - torch.tensor(old.inv_freq, dtype=torch.float64)
    angle = torch.arange(48).double()[:, None, None] * step
    first, second = originals[:3].flatten(0, 1).double().chunk(2, -1)
    right = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    assert float((rerotated - right).abs().max() / right.abs().max()) < 2**-8
    core.abort("a")
    assert_balanced(core.blocks)
