"""Re-rotations without memory for even one block: only the request that owns the keys fails.

No GPU is needed: the rotation fails with torch's error, after some layers have been rotated.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.played_engines import graphed, played_device, texts
from helpers.engines import greedy, make_core, run
from helpers.every_request import Results, prompt
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama", "mistral", "gemma3")
    return {name: make_model(name, tmp_path_factory.mktemp(name), max_position_embeddings=M) for name in families}


def requests() -> list[EngineRequest]:
    """Keys of the first request are rotated at lengths of 65 and 77. It is older than all others."""
    text = prompt(1, 60)
    return [
        greedy("rotating", text, 20, rope_scaling=DYNAMIC, rope_update="rotate", n=2, temperature=0.7, seed=1),
        greedy("other", prompt(2, 30), 24, n=2, temperature=0.8, seed=3, repetition_penalty=1.2),
        greedy("same prompt", text, 24),
    ]


class FailingRotations:
    """Key rotations that fail after the first `first` ones, with invalid keys, until a request has failed.

    tokens: numbers of tokens of the failed rotations.
    """

    def __init__(self, core: EngineCore, first: int, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self.calls, self.tokens = 0, list[int]()
        backend: Any = core.runner.decoder.backend
        rotate, step, reported = backend.rerotate_cached_keys, core.step, list[bool]()

        def fails(pages: Any, sources: Any, targets: Any, cos: Any, sin: Any, **named: Any) -> None:
            self.calls += 1
            if self.calls <= first or reported:
                return rotate(pages, sources, targets, cos, sin, **named)
            self.tokens.append(len(sources))
            rotate(pages, sources, targets, cos * torch.nan, sin * torch.nan, **named)
            raise error or torch.OutOfMemoryError(NO_ROOM)

        def stepping(*given: Any) -> Any:
            outputs = step(*given)
            reported.extend(True for output in outputs if output.error is not None)
            return outputs

        monkeypatch.setattr(backend, "rerotate_cached_keys", fails)
        monkeypatch.setattr(core, "step", stepping)


def errors_of(results: Results) -> dict[str, Exception]:
    found = [(name, output.error) for (name, _), one in results.items() for output in one.outputs]
    return {name: error for name, error in found if error is not None}


def check(core: EngineCore, right: EngineCore, got: Results, want: Results) -> None:
    """Check that the others have the same bits, cached blocks are complete, and the failed request leaves nothing."""
    for key, one in want.items():
        if key[0] == "rotating":
            tokens = got[key].token_ids
            assert 0 < len(tokens) < 20 and tokens == one.token_ids[: len(tokens)]
        else:
            assert got[key].token_ids == one.token_ids
            assert all(torch.equal(*both) for both in zip(got[key].logits, one.logits, strict=True))
    assert core.blocks.num_used_blocks == 0
    assert len(core.runner.input_batch) == core.runner.sampler.num_tracked == core.runner.tables.num_live == 0
    cached = 0
    for pool, complete, planes, others in zip(
        core.blocks.pools, right.blocks.pools, core.runner.cache.planes, right.runner.cache.planes, strict=True
    ):
        for digest, block in pool.cached.items():
            other = complete.cached[digest]
            assert all(torch.equal(mine[:, block], its[:, other]) for mine, its in zip(planes, others, strict=True))
            cached += 1
    assert cached > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "first"),
    [
        ("llama", 1),
        *[pytest.param("llama", first, marks=pytest.mark.slow) for first in (0, 7, 12, 17)],
        *[pytest.param("mistral", first, marks=pytest.mark.slow) for first in (0, 7, 12)],
        *[pytest.param("gemma3", first, marks=pytest.mark.slow) for first in (0, 7)],
    ],
)
def test_only_the_request_that_owns_the_keys_fails(
    models: dict[str, Path], family: str, first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, core = (make_core(models[family], **OPTIONS) for _ in range(2))
    want = run(right, requests())
    rotations = FailingRotations(core, first, monkeypatch)
    with caplog.at_level(logging.WARNING, "windlass.engine"):
        got = run(core, requests())
    assert rotations.tokens and rotations.tokens[-1] <= 16
    error = errors_of(got).pop("rotating")
    assert isinstance(error, DeviceMemoryError) and "rope_update" in str(error) and len(errors_of(got)) == 1
    assert [record.request_id for record in caplog.records] == ["rotating"]
    check(core, right, got, want)
    # In the released blocks, and with the cached ones.
    again = run(core, requests())
    assert not errors_of(again) and texts(again) == texts(want)


@pytest.mark.slow
@pytest.mark.parametrize("first", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_rotation_over_several_steps_fails_only_its_request(
    models: dict[str, Path], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepLimiter, "rerotation_limit", 16)
    right, core = (make_core(models["llama"], **OPTIONS) for _ in range(2))
    want = run(right, requests())
    FailingRotations(core, first, monkeypatch)
    got = run(core, requests())
    assert list(errors_of(got)) == ["rotating"]
    check(core, right, got, want)


@pytest.mark.slow
def test_recurrent_streams_restart_if_they_find_no_memory_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states have been changed by then; before that no layer had computed."""
    model = make_model("qwen3_5", tmp_path / "model", max_position_embeddings=M)
    want = run(make_core(model, **OPTIONS), requests())
    core = make_core(model, **OPTIONS)
    FailingRotations(core, 1, monkeypatch)
    retry, failed = core.runner.retry, list[SchedulerOutput]()

    def fails(plan: SchedulerOutput) -> Any:
        results = retry(plan)
        if not failed:
            failed.append(plan)
            raise torch.OutOfMemoryError(NO_ROOM)
        return results

    monkeypatch.setattr(core.runner, "retry", fails)
    got = run(core, requests(), every_logit=False)
    assert failed and set(errors_of(got)) == {"rotating", "same prompt"}
    for index in range(2):
        assert got["other", index].token_ids == want["other", index].token_ids


def test_a_failed_rotation_of_the_only_request(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(models["llama"], **OPTIONS)
    FailingRotations(core, 0, monkeypatch)
    assert list(errors_of(run(core, requests()[:1]))) == ["rotating"]
    assert not errors_of(run(core, requests()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("burst_seconds", [0.0, 1.0])
def test_a_failed_rotation_between_captured_steps(
    models: dict[str, Path], burst_seconds: float, played_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_model_len": 256, "burst_seconds": burst_seconds}
    want = run(graphed(models["llama"], **options)[0], requests(), every_logit=False)
    core, _ = graphed(models["llama"], **options)
    FailingRotations(core, 3, monkeypatch)
    got = run(core, requests(), every_logit=False)
    assert list(errors_of(got)) == ["rotating"]
    for key, one in want.items():
        length = len(one.token_ids) if key[0] != "rotating" else len(got[key].token_ids)
        assert got[key].token_ids == one.token_ids[:length]


@pytest.mark.slow
def test_failed_rotations_in_a_draft_model_fail_no_request(models: dict[str, Path], tmp_path: Path) -> None:
    draft = make_model("llama", tmp_path / "draft", max_position_embeddings=M)
    want = run(make_core(models["llama"], **OPTIONS), requests())
    core = make_core(models["llama"], speculative_model=str(draft), speculative_adaptive=False, **OPTIONS)
    proposer, failed = core.runner.proposer, list[KeyRerotation]()
    assert proposer is not None

    def fails(rerotation: KeyRerotation, start: int, end: int) -> None:
        failed.append(rerotation)
        raise torch.OutOfMemoryError(NO_ROOM)

    proposer._rotator._apply_at_once = fails
    got = run(core, requests())
    assert failed and not errors_of(got) and core.stats().key_moves > 0
    assert texts(got) == texts(want)


def test_another_error_ends_the_engine(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(models["llama"], **OPTIONS)
    FailingRotations(core, 0, monkeypatch, LOST)
    with pytest.raises(torch.AcceleratorError):
        run(core, requests())


def test_failed_rotations_outside_the_scheduler_raise(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On other ranks and in the scorer; `None` means keys without an owner."""
    core = make_core(models["llama"], **OPTIONS)
    (spec,) = core.plan_rotation(greedy("a", [5, 6])).stage(2).specs
    FailingRotations(core, 0, monkeypatch)
    for seq_id in (7, None):
        rotated = KeyRerotation(0, 0, 16, (0,), (1,), 0, (spec,), (spec,), seq_id=seq_id)
        plan = SchedulerOutput(core.runner.input_batch.step + 1, rerotations=(rotated,))
        for apply in (core.runner.apply, core.runner.execute_rank, core.runner.hidden_states):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                apply(plan)
            assert is_out_of_memory(raised.value)
            plan = SchedulerOutput(core.runner.input_batch.step + 1, rerotations=(rotated,))
