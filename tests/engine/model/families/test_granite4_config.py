"""Granite 4 from config.json: attention in all or a few layers, with and without experts, and refused values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import make_model

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_rotary_groups, read_spec
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec

PUBLISHED: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "shared_intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
    "rope_theta": 10_000_000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 10,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "normalization_function": "rmsnorm",
    "init_method": "mup",
}


def test_one_without_experts_is_dense() -> None:
    spec = read_spec(PUBLISHED)
    for layer in spec.layers:
        assert isinstance(layer.feed_forward, GatedMLPSpec) and layer.feed_forward.intermediate_size == 192
    assert not spec.notices and spec.rotary_groups[0].base.rope_theta == 1e7
    names = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    assert "model.layers.1.shared_mlp.input_linear.weight" in names
    assert read_spec({**PUBLISHED, "layers_block_type": PUBLISHED["layer_types"], "layer_types": None}) == spec


def test_one_with_experts_has_a_shared_one_beside() -> None:
    spec = read_spec({**PUBLISHED, "num_local_experts": 8, "num_experts_per_tok": 2})
    for layer in spec.layers:
        part = layer.feed_forward
        assert isinstance(part, MoESpec) and (part.intermediate_size, part.shared_size) == (128, 192)


# In the shape of ibm-granite/granite-4.0-h-tiny.
ATTENDING = (5, 15, 25, 35)
HYBRID: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": ["attention" if index in ATTENDING else "mamba" for index in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_a_hybrid_that_does_not_rotate() -> None:
    spec = read_spec(HYBRID)
    assert not spec.notices and spec.trained_len == 131_072 and spec.eos_token_ids == (100_257,)
    assert spec.kv_groups == (KVGroupSpec(ATTENDING, 4, 128, None),)
    others = tuple(index for index in range(40) if index not in ATTENDING)
    assert spec.state_group == StateGroupSpec(others, 3328, 4, 48, 128, 64)
    assert spec.layers[0].mixer == StateSpaceSpec(48, 64, 1, 128, 4, 1e-5)  # whose norm knows no residual_multiplier
    assert spec.norm_eps == pytest.approx(1e-5 / 0.22**2) and spec.embedding_scale == pytest.approx(12 / 0.22)
    attention = spec.attention[5]
    assert isinstance(attention, AttentionSpec) and attention.rotary_group is None and attention.scale == 0.0078125
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, MoESpec) and (experts.intermediate_size, experts.shared_size) == (512, 1024)
    stored = {tensor.name for weight in spec.layers[0].weights(1536) for tensor in weight.stored}
    parts = "A_log D dt_bias conv1d.weight conv1d.bias in_proj.weight norm.weight out_proj.weight".split()
    assert {name for name in stored if "mamba" in name} == {f"mamba.{part}" for part in parts}


def test_what_tells_positions_apart() -> None:
    for given, rotates in (("nope", False), (None, False), ("rope", True)):
        config = {**HYBRID, "position_embedding_type": given}
        spec = read_spec(config)
        assert (spec.rotary_groups[0].base.unrotated is None) is rotates
        assert (spec.attention[5].rotary_group is None) is not rotates
        if rotates:
            assert read_rotary_groups(config) == spec.rotary_groups
        else:
            with pytest.raises(LoadError, match="does not rotate: its layers that carry a state tell positions apart"):
                read_rotary_groups(config)
    scaled = {**HYBRID, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert read_spec(scaled).rotary_groups == read_spec(HYBRID).rotary_groups  # which nothing reads


@pytest.mark.parametrize("name", ["granite4_h", "granite4_h_experts"])
def test_older_and_newer_files_are_read_alike(name: str, tmp_path: Path) -> None:
    written = json.loads((make_model(name, tmp_path / name) / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    new = read_spec(written)
    older = {"full_attention": "attention", "linear_attention": "mamba"}
    kinds = [older[kind] for kind in written.pop("layer_types")]
    del written["time_step_limit"]
    assert read_spec({**written, "layers_block_type": kinds}) == new and not new.notices
    del written["mamba_d_head"]
    assert read_spec({**written, "layer_types": kinds, "mamba_d_head": "auto"}) == new


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.001, {"__float__": "Infinity"}], (0.001, math.inf)),
        ([0, 1], (0.0, 1.0)),
    ],
    ids=str,
)
def test_limits_of_steps(given: Any, expected: tuple[float, float]) -> None:
    mixer = read_spec({**HYBRID, "time_step_limit": given}).layers[0].mixer
    assert isinstance(mixer, StateSpaceSpec) and mixer.limits == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 40}, "no layer is full_attention: a model that carries states alone"),
        ({"layer_types": ["mamba"] * 39}, "layer_types must be a list with one name per layer"),
        ({"layer_types": ["attention"] * 40}, "position_embedding_type 'nope' is not supported"),
        ({"layer_types": ["mamba"] * 39 + ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["mamba"] * 39 + [["attention"]]}, "layer_types has"),
        ({"position_embedding_type": "alibi"}, 'position_embedding_type must be "rope" or "nope", got \'alibi\''),
        ({"position_embedding_type": 1}, "position_embedding_type must be"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which changes the model"),
        ({"mamba_n_heads": 0}, "mamba_n_heads must be a positive integer up to 65536"),
        ({"mamba_n_heads": 1 << 17}, "mamba_n_heads must be a positive integer up to 65536"),
        ({"mamba_n_heads": 47}, "mamba_n_heads 47 of 64 numbers are not mamba_expand 2 times hidden_size 1536"),
        ({"mamba_n_heads": 47, "mamba_d_head": "auto"}, "mamba_n_heads 47 of 65 numbers are not mamba_expand 2"),
        ({"mamba_n_heads": 4000, "mamba_d_head": None}, "mamba_n_heads 4000 of 1 numbers are not"),
        ({"mamba_d_head": 1 << 40}, "mamba_d_head must be a positive integer"),
        ({"mamba_d_head": "64"}, "mamba_d_head must be a positive integer"),
        ({"mamba_n_groups": 5}, "mamba_n_heads 48 is not a multiple of mamba_n_groups 5"),
        ({"mamba_n_groups": 96}, "mamba_n_heads 48 is not a multiple of mamba_n_groups 96"),
        ({"mamba_n_groups": -1}, "mamba_n_groups must be a positive integer"),
        ({"mamba_d_state": 0}, "mamba_d_state must be a positive integer"),
        ({"mamba_d_state": 1 << 20}, "mamba_d_state must be a positive integer up to 65536"),
        ({"mamba_d_state": True}, "mamba_d_state must be a positive integer"),
        ({"mamba_expand": 3}, "mamba_n_heads 48 of 64 numbers are not mamba_expand 3 times hidden_size 1536"),
        ({"mamba_expand": 2.5}, "mamba_expand must be a positive integer"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1 is not supported: it may be 2 to 8"),
        ({"mamba_d_conv": 9}, "mamba_d_conv 9 is not supported"),
        ({"mamba_conv_bias": "yes"}, "mamba_conv_bias must be true or false"),
        ({"mamba_proj_bias": 1}, "mamba_proj_bias must be true or false"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit must be two numbers, the smaller first"),
        ({"time_step_limit": [0.1]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [-1, 1]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [math.nan, 1]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [0, True]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": "none"}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [10**400, 10**401]}, "time_step_limit must be two numbers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_spec({**HYBRID, **changes})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
