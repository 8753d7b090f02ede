"""A device without memory to rotate the keys of even one block: only the request that owns them fails.

No GPU is needed: the rotation fails with torch's error, after some layers have been rotated.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.played_engines import graphed, played_device
from helpers.engines import Finished, greedy, make_core, run
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model

from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import DeviceMemoryError
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.chunked_prefill import StepLimiter
from windlass.engine.scheduling.scheduler_output import SchedulerOutput
from windlass.kernels import is_out_of_memory

__all__ = ["played_device"]
M = 64
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
OPTIONS: dict[str, Any] = {"max_model_len": 256, "deterministic": True}
Results = dict[tuple[str, int], Finished]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama", "mistral", "gemma3")
    return {name: make_model(name, tmp_path_factory.mktemp(name), max_position_embeddings=M) for name in families}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests() -> list[EngineRequest]:
    """The first one's keys turn at lengths of 65 and 77; it is older than all others, and better ranked."""
    text = prompt(1, 60)
    return [
        greedy("turning", text, 20, rope_scaling=DYNAMIC, rope_update="rotate", n=2, temperature=0.7, seed=1),
        greedy("beside", prompt(2, 30), 24, n=2, temperature=0.8, seed=3, repetition_penalty=1.2),
        greedy("same prompt", text, 24),
    ]


class Turning:
    """Rotations of keys that fail from the `first` one on, until the engine handles it; those are left half done."""

    def __init__(self, core: EngineCore, first: int, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self.calls, self.tokens = 0, list[int]()  # of turns that failed
        backend: Any = core.runner.decoder.backend
        turn, step, told = backend.rerotate_cached_keys, core.step, list[bool]()

        def fails(pages: Any, sources: Any, targets: Any, cos: Any, sin: Any, **named: Any) -> None:
            self.calls += 1
            if self.calls <= first or told:
                return turn(pages, sources, targets, cos, sin, **named)
            self.tokens.append(len(sources))
            turn(pages, sources, targets, cos * torch.nan, sin * torch.nan, **named)
            raise error or torch.OutOfMemoryError(NO_ROOM)

        def stepping(*given: Any) -> Any:
            outputs = step(*given)
            told.extend(True for output in outputs if output.error is not None)
            return outputs

        monkeypatch.setattr(backend, "rerotate_cached_keys", fails)
        monkeypatch.setattr(core, "step", stepping)


def errors_of(results: Results) -> dict[str, Exception]:
    found = [(name, output.error) for (name, _), one in results.items() for output in one.outputs]
    return {name: error for name, error in found if error is not None}


def check(core: EngineCore, right: EngineCore, got: Results, want: Results) -> None:
    """The others have the very bits, what is cached is whole, and nothing is left of the one that failed."""
    for key, one in want.items():
        if key[0] == "turning":
            tokens = got[key].token_ids
            assert 0 < len(tokens) < 20 and tokens == one.token_ids[: len(tokens)]
        else:
            assert got[key].token_ids == one.token_ids
            assert all(torch.equal(*both) for both in zip(got[key].logits, one.logits, strict=True))
    assert core.blocks.num_used_blocks == 0
    assert len(core.runner.input_batch) == core.runner.sampler.num_tracked == core.runner.tables.num_live == 0
    cached = 0
    for pool, whole, planes, others in zip(
        core.blocks.pools, right.blocks.pools, core.runner.cache.planes, right.runner.cache.planes, strict=True
    ):
        for digest, block in pool.cached.items():
            other = whole.cached[digest]
            assert all(torch.equal(mine[:, block], its[:, other]) for mine, its in zip(planes, others, strict=True))
            cached += 1
    assert cached > 4


@pytest.mark.parametrize(
    ("family", "first"),
    [
        ("llama", 1),
        *[pytest.param("llama", first, marks=pytest.mark.slow) for first in (0, 7, 12, 17)],
        *[pytest.param("mistral", first, marks=pytest.mark.slow) for first in (0, 7, 12)],
        *[pytest.param("gemma3", first, marks=pytest.mark.slow) for first in (0, 7)],
    ],
)
def test_the_request_whose_keys_they_are_fails(
    models: dict[str, Path],
    family: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, core = (make_core(models[family], **OPTIONS) for _ in range(2))
    want = run(right, requests())
    turning = Turning(core, first, monkeypatch)
    with caplog.at_level(logging.WARNING, "windlass.engine"):
        got = run(core, requests())
    assert turning.tokens and turning.tokens[-1] <= 16
    error = errors_of(got).pop("turning")
    assert isinstance(error, DeviceMemoryError) and "rope_update" in str(error) and len(errors_of(got)) == 1
    assert [record.request_id for record in caplog.records] == ["turning"]  # type: ignore[attr-defined]
    check(core, right, got, want)
    # In the blocks that it gave back, and with what the cache holds of it.
    again = run(core, requests())
    assert not errors_of(again) and {key: one.token_ids for key, one in again.items()} == {
        key: one.token_ids for key, one in want.items()
    }


@pytest.mark.parametrize("first", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_where_keys_turn_over_several_steps(
    models: dict[str, Path], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for by then is forgotten, and it is in no step itself."""
    monkeypatch.setattr(StepLimiter, "rerotation_limit", 16)
    right, core = (make_core(models["llama"], **OPTIONS) for _ in range(2))
    want = run(right, requests())
    Turning(core, first, monkeypatch)
    got = run(core, requests())
    assert list(errors_of(got)) == ["turning"]
    check(core, right, got, want)


def test_the_others_find_no_memory_either_and_carry_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states have been changed by then, so they begin again; until then no layer had computed."""
    model = make_model("qwen3_5", tmp_path / "model", max_position_embeddings=M)
    want = run(make_core(model, **OPTIONS), requests())
    core = make_core(model, **OPTIONS)
    Turning(core, 1, monkeypatch)
    retry, failed = core.runner.retry, list[SchedulerOutput]()

    def fails(plan: SchedulerOutput) -> Any:
        results = retry(plan)
        if not failed:
            failed.append(plan)
            raise torch.OutOfMemoryError(NO_ROOM)
        return results

    monkeypatch.setattr(core.runner, "retry", fails)
    got = run(core, requests(), every_logit=False)
    assert failed and set(errors_of(got)) == {"turning", "same prompt"}
    for index in range(2):
        assert got["beside", index].token_ids == want["beside", index].token_ids


def test_nobody_else_is_there(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(models["llama"], **OPTIONS)
    Turning(core, 0, monkeypatch)
    assert list(errors_of(run(core, requests()[:1]))) == ["turning"]
    assert not errors_of(run(core, requests()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("burst_seconds", [0.0, 1.0])
def test_on_a_device_that_computes_steps_by_itself(
    models: dict[str, Path], burst_seconds: float, played_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_model_len": 256, "burst_seconds": burst_seconds}
    want = run(graphed(models["llama"], **options)[0], requests(), every_logit=False)
    core, _ = graphed(models["llama"], **options)
    Turning(core, 3, monkeypatch)
    got = run(core, requests(), every_logit=False)
    assert list(errors_of(got)) == ["turning"]
    for key, one in want.items():
        assert got[key].token_ids == (
            one.token_ids if key[0] != "turning" else one.token_ids[: len(got[key].token_ids)]
        )


@pytest.mark.slow
def test_keys_of_a_draft_model_fail_nobody(models: dict[str, Path], tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft", max_position_embeddings=M)
    want = run(make_core(models["llama"], **OPTIONS), requests())
    core = make_core(models["llama"], speculative_model=str(draft), speculative_adaptive=False, **OPTIONS)
    proposer, failed = core.runner.proposer, list[KeyRerotation]()
    assert proposer is not None

    def fails(rerotation: KeyRerotation, start: int, end: int) -> None:
        failed.append(rerotation)
        raise torch.OutOfMemoryError(NO_ROOM)

    proposer._rotator._apply_at_once = fails  # type: ignore[method-assign]
    got = run(core, requests())
    assert failed and not errors_of(got) and core.stats().key_moves > 0
    assert {key: one.token_ids for key, one in got.items()} == {key: one.token_ids for key, one in want.items()}


def test_another_error_ends_the_engine(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(models["llama"], **OPTIONS)
    Turning(core, 0, monkeypatch, LOST)
    with pytest.raises(torch.AcceleratorError):
        run(core, requests())


def test_whoever_follows_a_plan_without_a_request_hears_of_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks, and the scorer; `None` means keys without an owner."""
    core = make_core(models["llama"], **OPTIONS)
    (spec,) = core.plan_rotation(greedy("a", [5, 6])).stage(2).specs
    Turning(core, 0, monkeypatch)
    for seq_id in (7, None):
        turned = KeyRerotation(0, 0, 16, (0,), (1,), 0, (spec,), (spec,), seq_id=seq_id)
        plan = SchedulerOutput(core.runner.input_batch.step + 1, rerotations=(turned,))
        for apply in (core.runner.apply, core.runner.execute_rank, core.runner.hidden_states):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                apply(plan)  # type: ignore[operator]
            assert is_out_of_memory(raised.value)
            plan = SchedulerOutput(core.runner.input_batch.step + 1, rerotations=(turned,))
