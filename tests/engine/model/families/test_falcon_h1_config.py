"""Falcon H1, with a state-space layer in parallel with attention: config.json, refused values, and quantized weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.rewritten_weights import logits
from helpers.adapters import merged, save_adapter
from helpers.configs import engine_config
from helpers.engines import make_core
from helpers.tiny_models import make_model

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec

# In the shape of tiiuae/Falcon-H1-0.5B-Instruct.
PUBLISHED: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32784,
}
SWITCHES = {
    "key_multiplier": 0.9,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [0.75, 1.0],
    "time_step_limit": [0.0, 1.0],
    **{
        f"ssm_multipliers {i}": [one * (1.3 if i == k else 1) for k, one in enumerate([0.9, 0.8, 1.1, 1.3, 0.7])]
        for i in range(5)
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("falcon_h1", tmp_path_factory.mktemp("falcon_h1"))


def test_a_published_file() -> None:
    spec = read_spec(PUBLISHED)
    every = tuple(range(36))
    assert not spec.notices and spec.trained_len == 16_384 and spec.eos_token_ids == (11,)
    assert spec.kv_groups == (KVGroupSpec(every, 2, 64, None),)
    assert spec.state_group == StateGroupSpec(every, 1536 + 2 * 128, 4, 24, 128, 64)
    assert spec.embedding_scale == 5.656854249492381 and spec.logit_scale == 0.0390625
    layer = spec.layers[7]
    assert isinstance(layer.mixer, AttentionSpec) and layer.mixer.scale == pytest.approx(0.390625 / 8)
    assert isinstance(layer.feed_forward, GatedMLPSpec) and layer.feed_forward.factors == (
        0.8838834764831844,
        0.5859375,
    )
    parallel = layer.parallel_state_space
    assert parallel is not None
    assert (parallel.attention_factor, parallel.state_factor) == (0.9375, 0.23570226039551587)
    factors = tuple(1.25 * one for one in PUBLISHED["ssm_multipliers"])
    assert parallel.state_space == StateSpaceSpec(24, 64, 1, 128, 4, 1e-5, normed=None, factors=factors)  # type: ignore[arg-type]
    stored = {tensor.name for weight in layer.weights(1024) for tensor in weight.stored}
    parts = "A_log D dt_bias conv1d.weight conv1d.bias in_proj.weight out_proj.weight".split()
    assert {name for name in stored if name.startswith("mamba")} == {f"mamba.{part}" for part in parts}


def test_factors_of_one_cost_nothing() -> None:
    ones = {"mlp_multipliers": [1, 1], "ssm_multipliers": None, "ssm_in_multiplier": None}
    layer = read_spec({**PUBLISHED, **ones}).layers[0]
    assert layer.parallel_state_space is not None and layer.parallel_state_space.state_space.factors is None
    assert isinstance(layer.feed_forward, GatedMLPSpec) and layer.feed_forward.factors is None


@pytest.mark.parametrize("name", SWITCHES)
def test_every_factor_counts(name: str, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    key = name.split()[0]
    assert config[key] != SWITCHES[name]
    (other / "config.json").write_text(json.dumps({**config, key: SWITCHES[name]}))
    ours, theirs = logits(other), logits(model)
    assert (ours - theirs).abs().max() > 1e-4 * theirs.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_n_heads": 23}, "mamba_n_heads 23 of 64 numbers are not the 1536 that mamba_d_ssm"),
        ({"mamba_n_heads": 1 << 20}, "mamba_n_heads must be a positive integer up to 65536"),
        ({"mamba_d_head": "auto", "mamba_n_heads": 7}, "mamba_n_heads 7 of 219 numbers are not the 1536"),
        ({"mamba_d_ssm": None}, "mamba_n_heads 24 of 64 numbers are not the 2048"),
        ({"mamba_d_ssm": -1}, "mamba_d_ssm must be a positive integer"),
        ({"mamba_d_ssm": 1 << 40}, "mamba_d_ssm must be a positive integer"),
        ({"mamba_n_groups": 5}, "mamba_n_heads 24 is not a multiple of mamba_n_groups 5"),
        ({"mamba_d_state": 1 << 20}, "mamba_d_state must be a positive integer up to 65536"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1 is not supported"),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm must be true or false"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias and projectors_bias must be alike"),
        (
            {"mamba_proj_bias": True, "projectors_bias": True},
            "must be alike, and false where ssm_in_multiplier is not 1",
        ),
        (
            {"attention_bias": True, "attention_in_multiplier": 2.0},
            "attention_in_multiplier 2.0 together with attention_bias",
        ),
        ({"key_multiplier": -1.0}, "key_multiplier must be a positive number"),
        ({"ssm_out_multiplier": math.inf}, "ssm_out_multiplier must be a positive number"),
        ({"attention_in_multiplier": 1e200}, "attention_in_multiplier must be a positive number up to 1e\\+06"),
        ({"ssm_multipliers": [1e300] * 5}, "ssm_multipliers must be a list of 5 positive numbers up to 1e\\+06"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 positive numbers"),
        ({"ssm_multipliers": 1.0}, "ssm_multipliers must be a list of 5 positive numbers"),
        ({"mlp_multipliers": [1.0, math.nan]}, "mlp_multipliers must be a list of 2 positive numbers"),
        ({"mlp_multipliers": [1.0, "1"]}, "mlp_multipliers must be a list of 2 positive numbers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which changes the model"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp=false, which changes the model"),
        ({"attn_layer_indices": [1, 2]}, "attn_layer_indices="),
        ({"time_step_limit": [1, 0]}, "time_step_limit must be two numbers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_spec({**PUBLISHED, **changes})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_from_the_cache_are_the_same(quantization: str, model: Path, tmp_path: Path) -> None:
    options = {"quantization": quantization, "weight_cache": str(tmp_path)}
    first = logits(model, **options)
    assert any("quantized weights read from" in notice for notice in make_core(model, **options).info.notices)
    assert torch.equal(logits(model, **options), first)


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "k_proj", "v_proj", "o_proj"], ["in_proj", "out_proj"], ["gate_proj", "up_proj", "down_proj"]],
)
def test_an_adapter_changes_every_part(targets: list[str], model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, targets)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert (logits(model, adapter) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (logits(model) - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_ranks_are_refused(model: Path) -> None:
    with pytest.raises(LoadError, match="a layer that carries a state is not split: leave it out"):
        prepare_model(engine_config(model, tensor_parallel=2), DeviceCapabilities("cpu", True))
