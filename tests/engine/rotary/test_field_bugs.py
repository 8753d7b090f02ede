"""Mistakes in rotary embeddings that serving engines have shipped, each as a test that would catch it here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from windlass.engine.api.request import SamplingParams
from windlass.engine.cache.changes import TableChange, TableChanges
from windlass.engine.cache.runs import SlotLayout
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.model.families.reading import read_rotary_groups
from windlass.engine.rotary.scaling import RopeScaling, resolve
from windlass.engine.scheduling.plan import NewSequence, ScheduledSequence, Snapshot

M = 64  # the trained length of the models here
DYNAMIC = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})


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
    """The first layer's keys of a prompt, as they stand in the pages."""
    with recorded_batches(core) as batches:
        run(core, [greedy("a", tokens, 1, rope_scaling=scaling)])
    keys = core.runner.cache.pages(0).key.flatten(0, 1)
    return torch.cat([keys[batch.slots[0]] for batch in batches]).cpu()  # [T, Hkv, D]


# --- narrow positions, frequencies and angles ---------------------------------------------------------------------


def exact(function: Any, position: int, frequencies: tuple[float, ...]) -> list[float]:
    with mpmath.workdps(30):
        return [float(function(position * mpmath.mpf(w))) for w in frequencies]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_cast_to_half_does_not_cast_its_rotation(dtype: str, llama: Path) -> None:
    """Positions, frequencies, angles or tables in the weights' type: off by up to 2 (everything) from position 4k on."""
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
    """With cosines in the weights' type half of all cached keys come out another number."""
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
def test_positions_stay_whole_past_what_float32_counts(dtype: str, llama: Path) -> None:
    """float32 cannot tell 2^24 from 2^24 + 1, bfloat16 cannot tell 256 from 257."""
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


# --- the attention factor -----------------------------------------------------------------------------------------


def test_cached_keys_carry_no_attention_factor(llama: Path) -> None:
    """Keys multiplied by it cannot be re-rotated, nor shared with a scaling that differs in it alone."""
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


def test_scores_take_its_square_on_rotated_dimensions_only(glm: Path) -> None:
    """Glm rotates half of each head; transformers multiplies cosines and sines, so unrotated dimensions see no factor."""
    scaling = RopeScaling.from_dict({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7})
    core = make_core(glm)
    request = greedy("a", prompt(40), 6, rope_scaling=scaling)
    specs = specs_of(core, request)
    assert specs[0].rotary_scale == 1.7
    result = run(core, [request])["a", 0]
    logits = Reference(glm, specs, ["full_attention"]).logits(request.prompt_token_ids + result.token_ids)[39:-1]
    assert (torch.stack(result.logits) - logits).abs().max() / logits.abs().max() < 1e-5


# --- dynamic frequencies that depend on something else than the request -----------------------------------------------


def uncached(directory: Path, n: float, tokens: list[int]) -> torch.Tensor:
    """transformers' logits over `tokens` under its dynamic frequencies of length n, in one pass."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=M)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=n)
    model = Reference(directory, [resolve(RopeScaling(), read_rotary_groups(config.to_dict())[0].base, 1)], ["x"])

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * inv_freq.double()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().float(), angle.sin().float()

    model.model.model.rotary_emb.forward = rotary
    return model.logits(tokens)


def agrees(directory: Path, tokens: list[int], result: Finished, n: float) -> None:
    expected = uncached(directory, n, tokens + result.token_ids)[len(tokens) - 1 : -1]
    # float32 frequencies in transformers cost up to 1e-5 here; another length costs 1e-1 and more.
    assert (torch.stack(result.logits) - expected).abs().max() / expected.abs().max() < 5e-5


def test_a_short_request_beside_a_long_one(llama: Path) -> None:
    """The batch's maximum would give both the long one's frequencies."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256, max_num_batched_tokens=64)
    tokens = {"long": prompt(120, 1), "short": prompt(30, 2)}
    results = run(core, [greedy(name, ids, 8) for name, ids in tokens.items()])
    agrees(llama, tokens["short"], results["short", 0], M)
    agrees(llama, tokens["long"], results["long", 0], 2 * M)  # 128 tokens


def test_a_short_request_after_a_long_one(llama: Path) -> None:
    """transformers keeps the longer request's base for what follows, down to half the trained length."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256)
    long, short = prompt(120, 1), prompt(M - 8, 2)
    agrees(llama, long, run(core, [greedy("long", long, 8)])["long", 0], 2 * M)
    agrees(llama, short, run(core, [greedy("short", short, 8)])["short", 0], M)
    agrees(llama, long, run(core, [greedy("again", long, 8)])["again", 0], 2 * M)


@pytest.mark.parametrize("budget", [5, 32, 256])
def test_chunked_prefill_has_the_length_of_the_request(budget: int, llama: Path) -> None:
    """Early chunks of a long prompt are short: their own length would give them other frequencies."""
    core = make_core(llama, rope_scaling=DYNAMIC, max_model_len=256, max_num_batched_tokens=budget)
    tokens = prompt(100, 3)
    # 140 tokens in the end, one grid point above the prompt's 100.
    agrees(llama, tokens, run(core, [greedy("a", tokens, 40)])["a", 0], M * 2**1.25)


@pytest.mark.parametrize("key", ["rope_scaling", "top"])
def test_dynamic_grows_from_the_trained_length_not_an_original_one(key: str) -> None:
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"max_position_embeddings": M, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    (config if key == "top" else config["rope_scaling"])["original_max_position_embeddings"] = 16
    (group,) = read_rotary_groups(config)
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=M)
    theirs.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    for length in (17, M, 2 * M, 4 * M):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(resolve(group.scaling, group.base, length).inv_freq, expected, rtol=3e-6)


def test_the_server_s_context_is_not_the_trained_length(llama: Path) -> None:
    request = greedy("a", prompt(100), 28)
    specs = [
        specs_of(make_core(llama, rope_scaling=DYNAMIC, max_model_len=length), request) for length in (128, 200, 1000)
    ]
    assert specs[0] == specs[1] == specs[2]


# --- checkpoints and configs -----------------------------------------------------------------------------------------


def test_biases_are_permuted_with_their_rows(tmp_path: Path) -> None:
    """An interleaved checkpoint whose matrices are permuted and whose biases are not."""
    helium = make_model("helium", tmp_path)
    tensors, decoder = load_file(helium / "model.safetensors"), make_core(helium).runner.decoder
    for i, layer in enumerate(decoder.layers):
        bias = layer.mixer.weights.qkv_bias
        assert bias is not None
        for name, heads, view in zip("qk", (4, 2), torch.split(bias.cpu(), [64, 32, 32])[:2], strict=True):
            stored = tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"]
            pairs = stored.view(heads, 8, 2)  # (2j, 2j + 1)
            assert torch.equal(view.view(heads, 2, 8), pairs.transpose(1, 2))
            assert not torch.equal(view, stored)


GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("nested", [False, True])
def test_yarn_heeds_truncate(nested: bool) -> None:
    """gpt-oss does not round the ends of the ramp; transformers forgets the field where groups are named."""
    types = ["full_attention", "sliding_attention"]
    config: dict[str, Any] = {"model_type": "qwen3", "head_dim": 64, "num_hidden_layers": 2, "layer_types": types}
    config |= {"use_sliding_window": True, "max_position_embeddings": 131_072}
    config["rope_parameters"] = dict.fromkeys(types, GPT_OSS) if nested else GPT_OSS
    (group,) = read_rotary_groups(json.loads(json.dumps(config)))
    spec = resolve(group.scaling, group.base, 1)
    j = np.arange(32)
    w = 150_000.0 ** (-2 * j / 64)
    low, high = (64 * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(150_000)) for turns in (32, 1))
    ramp = np.clip((j - low) / (high - low), 0, 1)
    np.testing.assert_allclose(spec.inv_freq, w * (1 - ramp) + w / 32 * ramp, rtol=1e-12)
    assert spec.rotary_scale == pytest.approx(1.3466, abs=1e-4)
    rounded = resolve(RopeScaling.from_dict({**GPT_OSS, "truncate": True}), group.base, 1)
    assert max(abs(a / b - 1) for a, b in zip(spec.inv_freq, rounded.inv_freq, strict=True)) > 0.05
