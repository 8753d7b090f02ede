"""Positions, angles and cached keys are exact for every dtype of the model, and keys have no attention factor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model

from windlass.engine.cache.cache_operations import TableChange, TableChanges
from windlass.engine.cache.sequence_cache import SlotLayout
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import SamplingParams
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import NewSequence, ScheduledSequence, Snapshot

M = 64  # the trained length of the models here


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=M)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("glm", tmp_path_factory.mktemp("glm"), max_position_embeddings=M)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@contextmanager
def recorded_batches(core: EngineCore) -> Iterator[list[ForwardBatch]]:
    forward, batches = core.runner.decoder.forward, []

    def record(batch: ForwardBatch, *rest: Any) -> torch.Tensor:
        batches.append(batch)
        return forward(batch, *rest)

    core.runner.decoder.forward = record  # type: ignore[method-assign]
    try:
        yield batches
    finally:
        core.runner.decoder.forward = forward  # type: ignore[method-assign]


def cached_keys(core: EngineCore, scaling: RopeScaling, tokens: list[int]) -> torch.Tensor:
    """Return the cached keys of a prompt in the first layer."""
    with recorded_batches(core) as batches:
        run(core, [greedy("a", tokens, 1, rope_scaling=scaling)])
    keys = core.runner.cache.pages(0).key.flatten(0, 1)
    return torch.cat([keys[batch.slots[0]] for batch in batches]).cpu()  # [T, Hkv, D]


def exact(function: Any, position: int, frequencies: tuple[float, ...]) -> list[float]:
    with mpmath.workdps(30):
        return [float(function(position * mpmath.mpf(w))) for w in frequencies]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_16_bit_models_have_exact_rotations(dtype: str, llama: Path) -> None:
    """Positions, frequencies, angles or tables in 16 bits would have errors of up to 2 from position 4k on."""
    core = make_core(llama, dtype=dtype)
    request = greedy("a", prompt(40), 4)
    (spec,) = specs_of(core, request)
    with recorded_batches(core) as batches:
        run(core, [request])
    for batch in batches:
        assert (batch.positions.dtype, batch.cos.dtype, batch.sin.dtype) == (torch.int64, torch.float32, torch.float32)
        angles = batch.positions.cpu().double()[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float64)
        assert (batch.cos[0].cpu() - angles.cos()).abs().max() < 1e-6
        assert (batch.sin[0].cpu() - angles.sin()).abs().max() < 1e-6
    assert core.runner.tables.inv_freq.dtype == torch.float64
    assert core.runner.decoder.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_are_rounded_once_after_an_exact_rotation(dtype: str, llama: Path) -> None:
    """With cosines in 16 bits, half of all cached keys would differ."""
    core = make_core(llama, dtype=dtype)
    keys = cached_keys(
        core, RopeScaling(), [7] * 60
    )  # [T, Hkv, D]: one key at sixty positions, at 0 as it was projected
    (spec,) = specs_of(core, greedy("a", [7], 1))
    angles = torch.arange(60)[:, None].double() * torch.tensor(spec.inv_freq, dtype=torch.float64)
    real, imaginary = keys[0].double().chunk(2, dim=-1)  # [Hkv, D/2]
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1).to(keys.dtype)
    assert (keys == expected).double().mean() > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_beyond_the_integers_of_float32(dtype: str, llama: Path) -> None:
    """float32 cannot represent 2^24 + 1, and bfloat16 cannot represent 257."""
    core = make_core(llama, dtype=dtype)
    (spec,) = specs_of(core, greedy("a", prompt(4), 1))
    row = core.runner.tables.acquire([spec])
    for first in (256, 10_000_000, 2**24, 2**31):
        tables = TableChanges(True, (TableChange(appended=(0,)),))
        held = NewSequence(
            0, 0, SamplingParams(), 0, 4, (), tuple(prompt(4)), tables, row, SlotLayout.starting_at(first)
        )
        core.runner.restore(Snapshot(0, sequences=(held,)))
        batch = core.runner.batches.build([ScheduledSequence(0, 0, 4, 4)])
        assert batch.positions.tolist() == [first, first + 1, first + 2, first + 3]
        cos, sin = batch.cos[0].cpu(), batch.sin[0].cpu()
        for t in range(4):
            np.testing.assert_allclose(cos[t], exact(mpmath.cos, first + t, spec.inv_freq), rtol=0, atol=2e-6)
            np.testing.assert_allclose(sin[t], exact(mpmath.sin, first + t, spec.inv_freq), rtol=0, atol=2e-6)


def test_cached_keys_have_no_attention_factor(llama: Path) -> None:
    """Multiplied keys could not be rotated again, or shared between scalings that differ only in the factor."""
    fields = {"rope_type": "yarn", "factor": 4.0}
    tokens = prompt(30)
    unit, large = (
        cached_keys(
            make_core(llama, prefix_caching=False),
            RopeScaling.from_dict({**fields, "attention_factor": a}),
            tokens,
        )
        for a in (1.0, 3.0)
    )
    assert torch.equal(unit, large)
    plain = cached_keys(make_core(llama, prefix_caching=False), RopeScaling.from_dict({"rope_type": "default"}), tokens)
    torch.testing.assert_close(large.norm(dim=-1), plain.norm(dim=-1), rtol=1e-6, atol=0)
    assert not torch.allclose(large, plain)


def test_the_squared_attention_factor_applies_to_rotated_dimensions_only(glm: Path) -> None:
    """Glm rotates half of each head, and transformers multiplies only cosines and sines."""
    scaling = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7})
    core = make_core(glm)
    request = greedy("a", prompt(40), 6, rope_scaling=scaling)
    specs = specs_of(core, request)
    assert specs[0].rotary_scale == 1.7
    result = run(core, [request])["a", 0]
    logits = Reference(glm, specs, ["full_attention"]).logits(request.prompt_token_ids + result.token_ids)[39:-1]
    assert (torch.stack(result.logits) - logits).abs().max() / logits.abs().max() < 1e-5
