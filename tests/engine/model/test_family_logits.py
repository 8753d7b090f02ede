"""Logits of further families against transformers: whole, in odd chunks and token by token; and that the tests would notice.

Reference: float32, eager attention, one pass over the whole sequence, cos and sin from float64 angles.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_experts, tiny_families, tiny_plain
from helpers.cpu_kernels import choose
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.model.families import spec_reader
from windlass.engine.model.families.family import is_set

FAMILIES = tiny_families.FAMILIES | tiny_plain.FAMILIES | tiny_experts.FAMILIES
TOLERANCE = 1e-5  # of the largest reference logit
PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
# Keys of config.json whose effect no tensor shows, with a value that changes it.
SWITCHES = [
    ("olmo", "clip_qkv", None),
    ("nanochat", "final_logit_softcapping", None),
    ("chatglm", "rope_ratio", 2.0),
    ("llama4", "attention_chunk_size", 16),
    ("llama4", "attn_scale", 0.1),
    ("llama4", "floor_scale", 20),
    ("llama4", "use_qk_norm", False),
    ("qwen3_next", "norm_topk_prob", True),
    ("qwen3_5", "rms_norm_eps", 0.01),
    ("lfm2", "norm_eps", 0.01),
    ("lfm2_moe", "routed_scaling_factor", 1.0),
    ("lfm2_moe", "norm_topk_prob", False),
    ("granite4_h", "time_step_limit", [0.0, 1.0]),
    ("granite4_h", "rms_norm_eps", 0.01),
]
# Families with operations that no other has.
OWN_OPERATIONS = [
    *(
        "apertus",
        "bitnet",
        "cohere_normed",
        "falcon_h1_normed",
        "granite4_h",
        "lfm2",
        "llama4",
        "nanochat",
        "olmo",
        "persimmon",
        "qwen3_5",
    ),
]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def error(core: EngineCore, directory: Path) -> float:
    """Largest difference of the logits behind the prompt, relative to the largest logit."""
    request = greedy("a", PROMPT, 9)
    result = run(core, [request])["a", 0]
    names = [group.name for group in core.runner.decoder.spec.rotary_groups]
    reference = Reference(directory, specs_of(core, request), names).logits(PROMPT + result.token_ids)
    expected = reference[len(PROMPT) - 1 : -1]
    assert torch.isfinite(expected).all() and float(expected.std()) > 0
    return float((torch.stack(result.logits) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("budget", [64, 7, 1])
def test_logits_are_those_of_transformers(family: Path, budget: int) -> None:
    assert error(make_core(family, max_num_batched_tokens=budget), family) < TOLERANCE


def skewed(value: Any) -> Any:
    """A rope object with another theta."""
    if not isinstance(value, dict):
        return value
    return {k: v * 1.3 if k == "rope_theta" else skewed(v) for k, v in value.items()}


def test_another_theta_shows(family: Path, tmp_path: Path) -> None:
    other = shutil.copytree(family, tmp_path / "other")
    config = json.loads((family / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": 10_000.0}
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": skewed(rope)}))
    reference = make_core(family)
    core, request = make_core(other), greedy("a", PROMPT, 1)
    ours, theirs = (run(one, [request])["a", 0].logits[0] for one in (core, reference))
    assert (ours - theirs).abs().max() / theirs.abs().max() > 10 * TOLERANCE


def test_other_pairs_show(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((family / "config.json").read_text())
    flipped = [replace(one, interleaved=not is_set(config, one.interleaved)) for one in spec_reader.FAMILIES]
    monkeypatch.setattr(spec_reader, "FAMILIES", tuple(flipped))
    assert error(make_core(family), family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["nanochat"], indirect=True)
def test_the_other_way_round_shows(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_reader, "FAMILIES", tuple(replace(one, swapped=False) for one in spec_reader.FAMILIES))
    assert error(make_core(family), family) > 10 * TOLERANCE


@pytest.mark.slow
def test_every_vector_counts(family: Path, tmp_path: Path) -> None:
    """Each bias and each norm of a layer and behind them: where one is left out (read as zeros), logits are others."""
    tensors = load_file(family / "model.safetensors")
    request = greedy("a", PROMPT, 1)
    expected = run(make_core(family), [request])["a", 0].logits[0]
    names = [
        name
        for name, tensor in tensors.items()
        if (tensor.dim() == 1 or name.endswith("norm.weight")) and (".1." in name or ".layers." not in name)
    ]
    assert names
    for name in names:
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(family, other)
        save_file({**tensors, name: torch.zeros_like(tensors[name])}, other / "model.safetensors")
        logits = run(make_core(other), [request])["a", 0].logits[0]
        assert (logits - expected).abs().max() / expected.abs().max() > 10 * TOLERANCE, name


@pytest.mark.parametrize(("family", "key", "other"), SWITCHES, indirect=["family"])
def test_every_switch_counts(family: Path, key: str, other: Any, tmp_path: Path) -> None:
    changed = shutil.copytree(family, tmp_path / "other")
    config = json.loads((family / "config.json").read_text())
    assert config[key] != other
    (changed / "config.json").write_text(json.dumps({**config, key: other}))
    request = greedy("a", PROMPT, 1)
    ours, theirs = (run(make_core(one), [request])["a", 0].logits[0] for one in (changed, family))
    assert (ours - theirs).abs().max() / theirs.abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("family", OWN_OPERATIONS, indirect=True)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain torch"])
def test_the_same_bits_in_any_chunks(family: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `deterministic`; and they are the reference's logits, whichever backend computes them."""
    if not compiled:
        choose(monkeypatch, "turned off by this test")
        assert error(make_core(family), family) < TOLERANCE
    found = []
    for budget in (64, 7):
        core = make_core(family, deterministic=True, max_num_batched_tokens=budget)
        found.append(torch.stack(run(core, [greedy("a", PROMPT, 3)])["a", 0].logits))
    assert torch.equal(*found)
    assert error(core, family) < TOLERANCE


def test_prefix_hits(family: Path) -> None:
    core = make_core(family)
    first = run(core, [greedy("a", PROMPT, 12)])["a", 0]
    second = run(core, [greedy("b", PROMPT, 12)])["b", 0]
    assert second.outputs[0].cached_tokens >= 32
    assert second.token_ids == first.token_ids
    largest = torch.stack(first.logits).abs().max()
    assert (torch.stack(second.logits) - torch.stack(first.logits)).abs().max() / largest < TOLERANCE


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantized_as_it_loads(family: Path, quantization: str) -> None:
    request = greedy("a", PROMPT, 1)
    expected = run(make_core(family), [request])["a", 0].logits[0]
    actual = run(make_core(family, quantization=quantization), [request])["a", 0].logits[0]
    near = torch.nn.functional.cosine_similarity(actual, expected, dim=0)
    assert near > (0.99 if quantization == "int8" else 0.7), near
