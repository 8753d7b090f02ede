"""Families from config.json: published files, files that transformers writes, variants, and refused values."""

from __future__ import annotations

import json
import math
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers import tiny_experts, tiny_families, tiny_models
from helpers.tiny_models import SIZES, make_model
from helpers.tiny_unrotated import make_unrotated
from transformers import AutoConfig

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.multimodal import text_config_of
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.families.spec_reader import read_rotary_groups, read_spec
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec, PlainMLPNames, PlainMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec, RouterSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetNames, GatedDeltaNetSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec
from windlass.engine.model.model_spec import ModelSpec

CONV, STATE, LOCAL, FULL = "conv", "linear_attention", "sliding_attention", "full_attention"
TINY = tiny_models.FAMILIES | tiny_families.FAMILIES | tiny_experts.FAMILIES
# model_type of tiny models by transformers' class.
MODEL_TYPES = {
    "Gemma4": "gemma4_text",
    "Lfm2": "lfm2",
    "Lfm2Moe": "lfm2_moe",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
    "Qwen3Next": "qwen3_next",
}


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a tiny model, with the keys of published files."""
    kind, own = TINY[name]
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": MODEL_TYPES[kind], **SIZES, **own, **changes}


def stored_names(spec: ModelSpec) -> set[str]:
    return {tensor.name for weight in spec.weights() for tensor in weight.stored}


# -- published files ---------------------------------------------------------------------------------------------------

LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
# LiquidAI/LFM2-1.2B.
LFM2: dict[str, Any] = json.loads("""{
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim":
    12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps":
    1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": true,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": true, "use_pos_enc": true, "vocab_size": 65536
}""")
# Without recurrent layers.
GRANITE4: dict[str, Any] = json.loads("""{
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 128, "shared_intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 0, "num_experts_per_tok": 0,
    "layer_types": ["attention", "attention"], "position_embedding_type": "rope", "rope_theta": 10000000,
    "rope_scaling": null, "tie_word_embeddings": true, "embedding_multiplier": 12, "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22, "logits_scaling": 10, "mamba_n_heads": 128, "mamba_d_state": 256,
    "normalization_function": "rmsnorm", "init_method": "mup"
}""")
GRANITE4_H_ATTENTION = (5, 15, 25, 35)
# Shape of ibm-granite/granite-4.0-h-tiny.
GRANITE4_H: dict[str, Any] = json.loads("""{
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": false,
    "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "initializer_range":
    0.1, "intermediate_size": 512, "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 48, "mamba_proj_bias": false, "max_position_embeddings": 131072, "normalization_function":
    "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads":
    4, "num_local_experts": 64, "output_router_logits": false, "pad_token_id": 100256, "position_embedding_type":
    "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": true, "torch_dtype":
    "bfloat16", "use_cache": true, "vocab_size": 100352
}""")
GRANITE4_H["layer_types"] = ["attention" if index in GRANITE4_H_ATTENTION else "mamba" for index in range(40)]
# Qwen/Qwen3.5-27B, without the keys of its vision part.
QWEN3_5: dict[str, Any] = json.loads("""{
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype":
    "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim":
    128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type":
    "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 24,
    "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish", "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings": false,
    "use_cache": true, "vocab_size": 248320}, "tie_word_embeddings": false, "vision_config": {"model_type":
    "qwen3_5"}
}""")
QWEN3_5["text_config"]["layer_types"] = ([STATE] * 3 + [FULL]) * 16
# Shape of tiiuae/Falcon-H1-0.5B-Instruct.
FALCON_H1: dict[str, Any] = json.loads("""{
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": null, "bos_token_id":
    1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048, "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 24, "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": false,
    "mamba_use_mlp": true, "max_position_embeddings": 16384, "mlp_bias": false, "mlp_multipliers":
    [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "projectors_bias": false, "rms_norm_eps":
    1e-05, "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_multipliers":
    [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], "ssm_out_multiplier":
    0.23570226039551587, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size":
    32784
}""")
NEMOTRON_LETTERS = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
# Shape of nvidia/NVIDIA-Nemotron-Nano-9B-v2, whose file has kinds of layers as letters.
NEMOTRON_H: dict[str, Any] = json.loads("""{
    "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 12, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 4480, "initializer_range": 0.02, "intermediate_size": 15680, "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80, "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": false,
    "max_position_embeddings": 131072, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
    "rms_norm_eps": 1e-05, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
    "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true, "use_mamba_kernels":
    true, "vocab_size": 131072
}""")
NEMOTRON_H["hybrid_override_pattern"] = NEMOTRON_LETTERS


def test_published_lfm2() -> None:
    spec = read_spec(LFM2)
    assert not spec.notices and spec.trained_len == 128_000 and spec.norm_eps == 1e-5 and spec.tied_embeddings
    assert spec.eos_token_ids == (7,) and width_of(spec) == 8192
    assert tuple(spec.attention) == LFM2_ATTENTION
    assert spec.kv_groups == (KVGroupSpec(LFM2_ATTENTION, 8, 64, None),)
    others = tuple(index for index in range(16) if index not in LFM2_ATTENTION)
    assert spec.state_group == StateGroupSpec(others, 2048, 3, 0, 0, 0)
    assert spec.state_group.block_bytes == 10 * 2 * 2048 * 4
    assert spec.layers[0].mixer == ShortConvolutionSpec(2048, 3)
    attention = spec.attention[2]
    assert isinstance(attention, AttentionSpec) and attention.qk_norm == "before" and not attention.qkv_bias
    (group,) = spec.rotary_groups
    assert (group.base.rotary_dim, group.base.rope_theta) == (64, 1_000_000)
    stored = stored_names(spec)
    assert {name for name in stored if ".0." in name} == {
        f"model.layers.0.{name}.weight"
        for name in "conv.conv conv.in_proj conv.out_proj operator_norm ffn_norm".split()
        + [f"feed_forward.w{part}" for part in (1, 2, 3)]
    }
    parts = "q_proj k_proj v_proj out_proj q_layernorm k_layernorm".split()
    assert {name for name in stored if ".2.self" in name} == {f"model.layers.2.self_attn.{n}.weight" for n in parts}
    assert stored - {name for name in stored if ".layers." in name} == {
        "model.embed_tokens.weight",
        "model.embedding_norm.weight",
    }


def test_granite4_without_experts_is_dense() -> None:
    spec = read_spec(GRANITE4)
    for layer in spec.layers:
        assert isinstance(layer.feed_forward, GatedMLPSpec) and layer.feed_forward.intermediate_size == 192
    assert not spec.notices and spec.rotary_groups[0].base.rope_theta == 1e7
    assert "model.layers.1.shared_mlp.input_linear.weight" in stored_names(spec)
    assert read_spec({**GRANITE4, "layers_block_type": GRANITE4["layer_types"], "layer_types": None}) == spec


def test_granite4_with_experts_has_a_shared_expert() -> None:
    spec = read_spec({**GRANITE4, "num_local_experts": 8, "num_experts_per_tok": 2})
    for layer in spec.layers:
        part = layer.feed_forward
        assert isinstance(part, MoESpec) and (part.intermediate_size, part.shared_size) == (128, 192)


def test_published_granite4_h_does_not_rotate() -> None:
    spec = read_spec(GRANITE4_H)
    assert not spec.notices and spec.trained_len == 131_072 and spec.eos_token_ids == (100_257,)
    assert spec.kv_groups == (KVGroupSpec(GRANITE4_H_ATTENTION, 4, 128, None),)
    others = tuple(index for index in range(40) if index not in GRANITE4_H_ATTENTION)
    assert spec.state_group == StateGroupSpec(others, 3328, 4, 48, 128, 64)
    assert spec.layers[0].mixer == StateSpaceSpec(48, 64, 1, 128, 4, 1e-5)  # its norm has no residual_multiplier
    assert spec.norm_eps == pytest.approx(1e-5 / 0.22**2) and spec.embedding_scale == pytest.approx(12 / 0.22)
    attention = spec.attention[5]
    assert isinstance(attention, AttentionSpec) and attention.rotary_group is None and attention.scale == 0.0078125
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, MoESpec) and (experts.intermediate_size, experts.shared_size) == (512, 1024)
    stored = {tensor.name for weight in spec.layers[0].weights(1536) for tensor in weight.stored}
    parts = "A_log D dt_bias conv1d.weight conv1d.bias in_proj.weight norm.weight out_proj.weight".split()
    assert {name for name in stored if "mamba" in name} == {f"mamba.{part}" for part in parts}


QWEN3_5_NAMES = (
    "mtp.fc.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "model.language_model.layers.0.linear_attn.A_log",
    "lm_head.weight",
)


def test_published_qwen3_5() -> None:
    spec = read_text(QWEN3_5)
    assert spec.architecture == "Qwen3_5ForCausalLM" and spec.trained_len == 262_144 and spec.norm_offset == 1
    assert not any("not understood" in notice for notice in spec.notices)
    attending = tuple(range(3, 64, 4))
    assert tuple(spec.attention) == attending
    assert spec.kv_groups == (KVGroupSpec(attending, 4, 256, None),)
    others = tuple(index for index in range(64) if index not in attending)
    assert spec.state_group == StateGroupSpec(others, 2 * 16 * 128 + 48 * 128, 4, 48, 128, 128)
    (group,) = spec.rotary_groups
    assert (group.base.rotary_dim, group.base.head_dim, group.base.rope_theta) == (64, 256, 10_000_000)
    attention = spec.attention[3]
    assert isinstance(attention, AttentionSpec) and attention.gated_queries and attention.qk_norm == "before"
    rows = {weight.name: weight.shape for weight in spec.weights()}
    assert rows["layers.3.qkv"] == (2 * 24 * 256 + 2 * 4 * 256, 5120)
    assert rows["layers.0.projections"] == (10_240 + 6144 + 96, 5120) and rows["layers.0.convolution"] == (10_240, 4)
    assert sum(prod(weight.shape) for weight in spec.weights()) == 26_895_998_464
    assert all(
        name.startswith(("mtp.", "model.visual.")) is name.startswith(spec.unused_tensors) for name in QWEN3_5_NAMES
    )


def read_text(whole: dict[str, Any]) -> ModelSpec:
    part = text_config_of(whole)
    return part.adapt_spec(read_spec(part.config), ())


def test_published_falcon_h1() -> None:
    spec = read_spec(FALCON_H1)
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
    factors = tuple(1.25 * one for one in FALCON_H1["ssm_multipliers"])
    assert parallel.state_space == StateSpaceSpec(24, 64, 1, 128, 4, 1e-5, normed=None, factors=factors)  # type: ignore[arg-type]
    stored = {tensor.name for weight in layer.weights(1024) for tensor in weight.stored}
    parts = "A_log D dt_bias conv1d.weight conv1d.bias in_proj.weight out_proj.weight".split()
    assert {name for name in stored if name.startswith("mamba")} == {f"mamba.{part}" for part in parts}


def test_published_nemotron_h() -> None:
    spec = read_spec(NEMOTRON_H)
    attending = tuple(index for index, letter in enumerate(NEMOTRON_LETTERS) if letter == "*")
    recurrent = tuple(index for index, letter in enumerate(NEMOTRON_LETTERS) if letter == "M")
    assert not spec.notices and spec.trained_len == 131_072 and spec.norm_eps == 1e-5 and spec.eos_token_ids == (12,)
    assert spec.kv_groups == (KVGroupSpec(attending, 8, 128, None),)
    assert spec.state_group == StateGroupSpec(recurrent, 128 * 80 + 2 * 8 * 128, 4, 128, 128, 80)
    assert spec.rotary_groups[0].base.unrotated is not None
    for letter, layer in zip(NEMOTRON_LETTERS, spec.layers, strict=True):
        kinds = type(layer.mixer), type(layer.feed_forward)
        none = type(None)
        assert kinds == {"M": (StateSpaceSpec, none), "*": (AttentionSpec, none), "-": (none, PlainMLPSpec)}[letter]
    assert spec.layers[1].feed_forward == PlainMLPSpec(
        15_680, "relu2", names=PlainMLPNames("mixer.up_proj", "mixer.down_proj")
    )
    stored = stored_names(spec)
    assert {name for name in stored if ".1." in name} == {
        f"backbone.layers.1.{name}.weight" for name in ("norm", "mixer.up_proj", "mixer.down_proj")
    }
    assert stored - {name for name in stored if ".layers." in name} == {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
    }


def test_published_nemotron_with_experts() -> None:
    """Shape of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: layers of experts instead of feed-forwards."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    widths = {"intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
    weights = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 52}
    spec = read_spec({**NEMOTRON_H, **sizes, **widths, **weights, "hybrid_override_pattern": pattern})
    assert not spec.notices
    for letter, layer in zip(pattern, spec.layers, strict=True):
        assert isinstance(layer.feed_forward, MoESpec) == (letter == "E") == (layer.mixer is None)
    experts = spec.layers[1].feed_forward
    assert isinstance(experts, MoESpec) and not experts.gated
    assert (experts.experts, experts.intermediate_size, experts.shared_size) == (128, 1856, 3712)
    assert (experts.router.top_k, experts.router.scale, experts.router.scores) == (6, 2.5, "sigmoid")
    stored = {stored.name for weight in experts.weights(2688) for stored in weight.stored}
    parts = ("experts.0.up_proj", "experts.0.down_proj", "shared_experts.up_proj", "shared_experts.down_proj", "gate")
    assert {f"mixer.{part}.weight" for part in parts} <= stored and len(stored) == 2 * 128 + 4


# -- files of transformers ---------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", [name for name, (kind, _) in TINY.items() if kind in MODEL_TYPES])
def test_published_keys_give_the_spec_of_transformers_keys(name: str, tmp_path: Path) -> None:
    written = transformers.AutoConfig.from_pretrained(make_model(name, tmp_path / name)).to_dict()
    if "per_layer_config" in written:
        written["per_layer_config"] = {str(index): sizes for index, sizes in written["per_layer_config"].items()}
    ours = read_spec(tiny(name, rope_theta=1e6) if name.startswith("lfm2") else tiny(name))
    theirs = read_spec({**written, "architectures": tiny(name)["architectures"]})
    assert (ours.layers, ours.kv_groups, ours.state_group) == (theirs.layers, theirs.kv_groups, theirs.state_group)
    assert (ours.rotary_groups, ours.tied_embeddings) == (theirs.rotary_groups, theirs.tied_embeddings)
    assert ours.per_layer_embeddings == theirs.per_layer_embeddings
    assert not theirs.notices and (not ours.notices or not name.startswith("lfm2"))


@pytest.mark.parametrize("name", ["granite4_h", "granite4_h_experts"])
def test_older_keys_of_granite4_give_the_same_spec(name: str, tmp_path: Path) -> None:
    written = json.loads((make_model(name, tmp_path / name) / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    new = read_spec(written)
    older = {"full_attention": "attention", "linear_attention": "mamba"}
    kinds = [older[kind] for kind in written.pop("layer_types")]
    del written["time_step_limit"]
    assert read_spec({**written, "layers_block_type": kinds}) == new and not new.notices
    del written["mamba_d_head"]
    assert read_spec({**written, "layer_types": kinds, "mamba_d_head": "auto"}) == new


def test_layer_kinds_of_nemotron_by_name_and_by_letter(tmp_path: Path) -> None:
    written = json.loads((make_unrotated("nemotron_h", tmp_path) / "config.json").read_text())
    spec = read_spec(written)
    assert not spec.notices
    names = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    kinds = written.pop("layers_block_type")
    assert read_spec({**written, "layers_block_type": [names[kind] for kind in kinds]}) == spec
    assert read_spec({**written, "hybrid_override_pattern": "".join(letters[kind] for kind in kinds)}) == spec
    older = {"mamba_n_groups": written.pop("n_groups"), "mamba_d_conv": written.pop("conv_kernel")}
    assert read_spec({**written, **older, "layers_block_type": kinds}) == spec


# -- LFM2 --------------------------------------------------------------------------------------------------------------


def width_of(spec: ModelSpec, layer: int = 0) -> int:
    feed_forward = spec.layers[layer].feed_forward
    assert isinstance(feed_forward, GatedMLPSpec)
    return feed_forward.intermediate_size


def test_attention_layers_of_lfm2() -> None:
    listed = read_spec(tiny("lfm2", layer_types=None, full_attn_idxs=[4, 2]))
    assert tuple(listed.attention) == (2, 4) and listed.state_group == read_spec(tiny("lfm2")).state_group
    assert read_spec(tiny("lfm2", full_attn_idxs=[2, 4])).layers == listed.layers
    every = read_spec(tiny("lfm2", layer_types=None))
    assert len(every.attention) == 5 and every.state_group is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 88),  # int(64 * 1.3), rounded up to a multiple of 8
        ({"block_ffn_dim_multiplier": 1.0}, 64),
        ({"block_ffn_dim_multiplier": None}, 64),
        ({"block_ffn_dim_multiplier": None, "intermediate_size": 100}, 66),  # not rounded without a factor
        ({"block_multiple_of": None, "block_ffn_dim_multiplier": 1}, 256),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_auto_adjust_ff_dim": None}, 88),
        ({"block_ff_dim": 48, "block_ffn_dim_multiplier": 1.0}, 32),
    ],
    ids=str,
)
def test_feed_forward_widths_of_lfm2(changes: dict[str, Any], expected: int) -> None:
    assert width_of(read_spec(tiny("lfm2", **changes))) == expected
    given = {
        key: value for key, value in tiny("lfm2", **changes).items() if key not in ("architectures", "layer_types")
    }
    if None not in changes.values():  # transformers refuses None
        theirs = transformers.Lfm2Config(**given, layer_types=["conv"] * 5)
        assert transformers.models.lfm2.modeling_lfm2.Lfm2MLP(theirs).w1.out_features == expected


def test_older_of_two_names_has_priority() -> None:
    both = {"tie_embedding": True, "tie_word_embeddings": False}
    assert read_spec(tiny("lfm2", **both)).tied_embeddings
    assert transformers.Lfm2Config(**both).tie_word_embeddings
    assert not read_spec(tiny("lfm2", tie_embedding=False, tie_word_embeddings=True)).tied_embeddings


def test_experts_and_router_of_lfm2() -> None:
    for name, biased in (("lfm2_moe", True), ("lfm2_moe_unbiased", False)):
        layers = read_spec(tiny(name)).layers
        experts = layers[-1].feed_forward
        assert isinstance(experts, MoESpec) and (experts.names.choice_bias is not None) is biased
        assert sum(isinstance(layer.feed_forward, GatedMLPSpec) for layer in layers) == (1 if biased else 2)
        assert width_of(read_spec(tiny(name))) == 96
        top_k, scale = (2, 1.25) if biased else (3, 1.0)
        assert experts.router == RouterSpec(top_k, "sigmoid", normalized=biased, scale=scale, sum_eps=1e-6)


@pytest.mark.parametrize("written", [None, {"tie_word_embeddings": False}, {"tie_embedding": False}], ids=str)
def test_text_part_of_lfm2(written: dict[str, bool] | None) -> None:
    """The config of the entire model decides whether the head is tied, not its text part."""
    text = {**LFM2, "tie_embedding": written is not None}
    whole = {"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "text_config": text}
    part = text_config_of({**whole, **(written or {})})
    spec = part.adapt_spec(read_spec(part.config), ())
    assert spec.layers == read_spec(LFM2).layers and spec.tied_embeddings is (written is None)


# -- Granite 4 ---------------------------------------------------------------------------------------------------------


def test_position_embedding_type_of_granite4() -> None:
    for given, rotates in (("nope", False), (None, False), ("rope", True)):
        config = {**GRANITE4_H, "position_embedding_type": given}
        spec = read_spec(config)
        assert (spec.rotary_groups[0].base.unrotated is None) is rotates
        assert (spec.attention[5].rotary_group is None) is not rotates
        if rotates:
            assert read_rotary_groups(config) == spec.rotary_groups
        else:
            with pytest.raises(LoadError, match="does not rotate: its recurrent layers encode positions"):
                read_rotary_groups(config)
    scaled = {**GRANITE4_H, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert read_spec(scaled).rotary_groups == read_spec(GRANITE4_H).rotary_groups  # not used


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
def test_step_limits_of_granite4(given: Any, expected: tuple[float, float]) -> None:
    mixer = read_spec({**GRANITE4_H, "time_step_limit": given}).layers[0].mixer
    assert isinstance(mixer, StateSpaceSpec) and mixer.limits == expected


# -- Gemma 4 -----------------------------------------------------------------------------------------------------------


def attention_of(spec: ModelSpec) -> list[AttentionSpec]:
    found = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, AttentionSpec) for mixer in found)
    return found  # type: ignore[return-value]


def test_kv_sharing_reads_the_last_layer_of_a_kind() -> None:
    spec = read_spec(tiny("gemma4_e2b"))
    mixers = attention_of(spec)
    assert [mixer.kv_source_layer for mixer in mixers] == [None, None, None, 1, 2, 1]
    assert [mixer.window for mixer in mixers] == [8, None] * 3
    assert spec.kv_groups == (KVGroupSpec((0, 2), 2, 16, 8), KVGroupSpec((1,), 2, 32, None))
    widths = [getattr(layer.feed_forward, "intermediate_size", None) for layer in spec.layers]
    assert widths == [96] * 3 + [192] * 3
    assert (
        "model.layers.3.self_attn.k_proj." in spec.unused_tensors
        and "model.layers.2.self_attn.k_proj." not in spec.unused_tensors
    )


def test_global_layers_of_gemma4_have_their_own_heads() -> None:
    mixers = attention_of(read_spec(tiny("gemma4_31b")))
    assert [(mixer.head_dim, mixer.num_kv_heads, mixer.keys_as_values) for mixer in mixers] == [
        (16, 2, False),
        (32, 1, True),
    ] * 2
    # Without the switch they have as many key heads as the others.
    plain = attention_of(read_spec(tiny("gemma4_31b", attention_k_eq_v=False)))
    assert [(mixer.num_kv_heads, mixer.keys_as_values) for mixer in plain] == [(2, False)] * 4


def test_last_layer_of_gemma4_has_no_window() -> None:
    spec = read_spec(tiny("gemma4_31b", layer_types=[LOCAL] * 4))
    assert [layer.mixer.window for layer in spec.layers] == [8, 8, 8, None]


def test_defaults_of_unified_gemma4() -> None:
    given = tiny("gemma4_31b", model_type="gemma4_unified_text")
    for key in ("sliding_window", "max_position_embeddings", "hidden_size_per_layer_input"):
        del given[key]
    spec = read_spec({**given, "architectures": ["Gemma4UnifiedForCausalLM"]})
    assert spec.trained_len == 262_144 and spec.layers[0].mixer.window == 1024
    assert spec.per_layer_embeddings is None and all(layer.per_layer_projection is None for layer in spec.layers)


def test_bidirectional_attention_of_images_is_accepted() -> None:
    assert read_spec(tiny("gemma4_e2b", use_bidirectional_attention="vision")) == read_spec(tiny("gemma4_e2b"))


def test_unused_keys_of_gemma4_change_nothing() -> None:
    plain = read_spec(tiny("gemma4_e2b"))
    default = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    proportional = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
    for changes in (
        {"partial_rotary_factor": 0.5},
        {"attn_logit_softcapping": 5.0},
        {"rope_parameters": {LOCAL: default, FULL: proportional}},
    ):
        spec = read_spec(tiny("gemma4_e2b", **changes))
        assert (spec.rotary_groups, spec.layers) == (plain.rotary_groups, plain.layers), changes
    default_rope = read_spec(tiny("gemma4_e2b", rope_parameters={LOCAL: default, FULL: default}))
    assert [group.base.rotary_dim for group in default_rope.rotary_groups] == [32, 16]


# -- Qwen 3.5 ----------------------------------------------------------------------------------------------------------


def test_full_attention_interval() -> None:
    for interval, attending in ((None, (3,)), (2, (1, 3)), (1, (0, 1, 2, 3, 4))):
        spec = read_spec(tiny("qwen3_5", layer_types=None, full_attention_interval=interval))
        assert tuple(spec.attention) == attending
        assert (spec.state_group is None) is (len(attending) == 5)
        assert all(isinstance(spec.layers[index].mixer, GatedDeltaNetSpec) for index in set(range(5)) - set(attending))


def test_separate_and_joined_projections() -> None:
    separate, joined = (read_spec(tiny(name)).layers[0].mixer for name in ("qwen3_5", "qwen3_next"))
    assert isinstance(separate, GatedDeltaNetSpec) and isinstance(joined, GatedDeltaNetSpec)
    assert separate.names == GatedDeltaNetNames()
    stored = [tensor.name for weight in joined.weights(64) for tensor in weight.stored]
    assert [name.removeprefix("linear_attn.") for name in stored] == [
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
        "norm.weight",
        "out_proj.weight",
    ]


def test_layers_with_experts_of_qwen3_next() -> None:
    def with_experts(**changes: Any) -> list[int]:
        layers = read_spec(tiny("qwen3_next", **changes)).layers
        return [index for index, layer in enumerate(layers) if isinstance(layer.feed_forward, MoESpec)]

    assert with_experts() == [0, 2, 3]
    assert with_experts(decoder_sparse_step=2, mlp_only_layers=[]) == [1, 3]
    assert with_experts(mlp_only_layers=None) == [0, 1, 2, 3, 4]


def test_scaling_of_full_attention_layers() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    (group,) = read_spec(tiny("qwen3_5", rope_parameters={**yarn, "mrope_section": [2, 1, 1]})).rotary_groups
    assert group.scaling.rope_type == "yarn" and group.base.rotary_dim == 8


def test_text_part_of_qwen3_5_is_refused_alike() -> None:
    with pytest.raises(LoadError, match="attn_output_gate=false"):
        read_text({**QWEN3_5, "text_config": {**QWEN3_5["text_config"], "attn_output_gate": False}})


def test_linear_attention_of_other_families_is_refused() -> None:
    other = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
    with pytest.raises(LoadError, match="layer_types has 'linear_attention'"):
        read_spec({**other, "layer_types": [STATE, FULL] * 2})


# -- Falcon H1, Nemotron H ---------------------------------------------------------------------------------------------


def test_factors_of_one_are_omitted() -> None:
    ones = {"mlp_multipliers": [1, 1], "ssm_multipliers": None, "ssm_in_multiplier": None}
    layer = read_spec({**FALCON_H1, **ones}).layers[0]
    assert layer.parallel_state_space is not None and layer.parallel_state_space.state_space.factors is None
    assert isinstance(layer.feed_forward, GatedMLPSpec) and layer.feed_forward.factors is None


def test_time_step_min_does_not_limit_steps() -> None:
    """It belongs to the initialization, although transformers 5.24 applies it."""

    def limits(**changes: Any) -> set[tuple[float, float]]:
        layers = read_spec({**NEMOTRON_H, **changes}).layers
        return {layer.mixer.limits for layer in layers if isinstance(layer.mixer, StateSpaceSpec)}

    assert limits(time_step_min=0.5) == limits(time_step_min=0.5, time_step_limit=None) == {(0.0, math.inf)}
    assert limits(time_step_limit=[0.1, 2.0]) == limits(mamba_dt_limit=[0.1, 2.0]) == {(0.1, 2.0)}


# -- refused values ----------------------------------------------------------------------------------------------------


VALID = {
    "falcon_h1": FALCON_H1,
    "granite4_h": GRANITE4_H,
    "nemotron_h": NEMOTRON_H,
    **{name: tiny(name) for name in ("gemma4_e2b", "lfm2", "lfm2_moe", "qwen3_5")},
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "falcon_h1": [
        ({"mamba_n_heads": 23}, "mamba_n_heads 23 of 64 numbers are not the 1536 of mamba_d_ssm"),
        ({"mamba_n_heads": 1 << 20}, "mamba_n_heads must be a positive integer up to 65536"),
        ({"mamba_d_head": "auto", "mamba_n_heads": 7}, "mamba_n_heads 7 of 219 numbers are not the 1536"),
        ({"mamba_d_ssm": None}, "mamba_n_heads 24 of 64 numbers are not the 2048"),
        ({"mamba_d_ssm": -1}, "mamba_d_ssm must be a positive integer"),
        ({"mamba_d_ssm": 1 << 40}, "mamba_d_ssm must be a positive integer"),
        ({"mamba_n_groups": 5}, "mamba_n_heads 24 is not a multiple of mamba_n_groups 5"),
        ({"mamba_d_state": 1 << 20}, "mamba_d_state must be a positive integer up to 65536"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1 is not supported"),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm must be true or false"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias and projectors_bias must be equal"),
        (
            {"mamba_proj_bias": True, "projectors_bias": True},
            "must be equal, and false where ssm_in_multiplier is not 1",
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
    "gemma4_e2b": [
        ({"num_kv_shared_layers": 6}, "leaves no layer of a kind"),
        ({"num_kv_shared_layers": 5}, "leaves no layer of a kind"),
        ({"num_kv_shared_layers": 7}, "leaves no layer of a kind"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be"),
        ({"vocab_size_per_layer_input": 100}, "each token needs a row"),
        ({"hidden_size_per_layer_input": "12"}, "hidden_size_per_layer_input must be"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "not a multiple of num_global_key_value_heads 3"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"global_head_dim": 33}, "cannot form pairs"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "the same values for all layers of full attention"),
        (
            {"per_layer_config": {str(i): {"head_dim": 32} for i in range(6)}},
            "the same values for all layers of full attention",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 32}, "5": {}}},
            "the same values for all layers",
        ),
        ({"per_layer_config": {str(i): {"rank": 2} for i in (1, 3, 5)}}, "per_layer_config may set head_dim and"),
        ({"per_layer_config": {str(i): 2 for i in (1, 3, 5)}}, "per_layer_config may set head_dim and"),
        ({"per_layer_config": {"1": {"head_dim": 32}}, "layer_types": 3}, "the same values for all layers"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 9},
            "do not go together",
        ),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size must be"),
    ],
    "granite4_h": [
        ({"layer_types": ["mamba"] * 40}, "no layer is full_attention: models with recurrent layers only"),
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
    "lfm2": [
        ({"layer_types": [CONV] * 5}, "no layer is full_attention"),
        ({"layer_types": None, "full_attn_idxs": []}, "no layer is full_attention"),
        ({"layer_types": [CONV] * 4}, "layer_types must name 5 layers"),
        ({"layer_types": [CONV] * 4 + ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": [CONV] * 4 + ["linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"full_attn_idxs": [0]}, "layer_types and full_attn_idxs name different layers"),
        (
            {"layer_types": None, "full_attn_idxs": [5]},
            "full_attn_idxs must be a list of the numbers of layers, 0 to 4",
        ),
        ({"layer_types": None, "full_attn_idxs": [-1]}, "full_attn_idxs must be"),
        ({"layer_types": None, "full_attn_idxs": [True]}, "full_attn_idxs must be"),
        ({"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be"),
        ({"conv_L_cache": 0}, "conv_L_cache must be"),
        ({"conv_L_cache": 1}, "conv_L_cache 1 is not supported: it may be 2 to 8"),
        ({"conv_L_cache": 9}, "conv_L_cache 9 is not supported"),
        ({"conv_bias": 1}, "conv_bias must be true or false"),
        ({"block_auto_adjust_ff_dim": "yes"}, "block_auto_adjust_ff_dim must be true or false"),
        ({"block_multiple_of": 0}, "block_multiple_of must be"),
        ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier must be"),
        ({"block_ffn_dim_multiplier": float("inf")}, "block_ffn_dim_multiplier must be"),
        ({"block_ffn_dim_multiplier": 1e300}, "intermediate_size must be"),
        ({"block_ff_dim": 1}, "intermediate_size must be"),
        ({"intermediate_size": None}, "intermediate_size must be"),
        ({"intermediate_size": "96"}, "intermediate_size must be"),
        ({"block_use_swiglu": False}, "block_use_swiglu=false"),
        ({"use_pos_enc": False}, "use_pos_enc=false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"conv_dim": 32}, "hidden_size is 64 and conv_dim is 32: keep one"),
        ({"block_dim": 32}, "hidden_size is 64 and block_dim is 32: keep one"),
        ({"num_heads": 2}, "num_attention_heads is 4 and num_heads is 2: keep one"),
        ({"theta": 1e4, "rope_theta": 1e6}, "rope_theta is 1000000.0 and theta is 10000.0: keep one"),
        ({"tie_embedding": "no"}, "tie_word_embeddings must be true or false"),
        ({"num_experts": 8}, "num_experts=8"),
    ],
    "lfm2_moe": [
        ({"use_expert_bias": "no"}, "use_expert_bias must be true or false"),
        ({"num_experts_per_tok": 7}, "num_experts 6 and num_experts_per_tok 7 do not go together"),
        ({"num_dense_layers": -1}, "num_dense_layers must be"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor must be"),
        ({"layer_types": [CONV] * 5}, "no layer is full_attention"),
    ],
    "nemotron_h": [
        ({"hybrid_override_pattern": "M-"}, "num_hidden_layers is 56, but kinds are given for 2 layers: keep one"),
        ({"hybrid_override_pattern": None}, "layers_block_type must be a list with one name per layer"),
        ({"hybrid_override_pattern": ""}, "layers_block_type must be a list"),
        ({"hybrid_override_pattern": ["M"]}, "layers_block_type must be a list"),
        ({"layers_block_type": "mamba"}, "layers_block_type must be a list"),
        ({"hybrid_override_pattern": "M?" * 28}, "layer_types has '?'"),
        (
            {"hybrid_override_pattern": "ME*-" * 14, "moe_latent_size": 1024},
            "moe_latent_size is 1024: experts that see",
        ),
        (
            {"hybrid_override_pattern": "ME*-" * 14, "num_experts_per_tok": 9},
            "do not go together: a token goes to 9 experts",
        ),
        ({"hybrid_override_pattern": "ME*-" * 14, "n_group": 3}, "8 experts do not make 3 groups"),
        ({"hybrid_override_pattern": "M-" * 28}, "no layer is full_attention"),
        ({"hybrid_override_pattern": "*" * 10**6, "num_hidden_layers": None}, "num_hidden_layers must be a positive"),
        ({"mamba_num_heads": 0}, "mamba_num_heads must be a positive integer up to 65536"),
        ({"mamba_num_heads": 1 << 40}, "mamba_num_heads must be a positive integer up to 65536"),
        ({"mamba_head_dim": 1 << 20}, "mamba_head_dim must be a positive integer up to 65536"),
        ({"n_groups": 7}, "mamba_num_heads 128 is not a multiple of n_groups 7"),
        ({"ssm_state_size": -1}, "ssm_state_size must be a positive integer"),
        ({"conv_kernel": 9}, "conv_kernel 9 is not supported: it may be 2 to 8"),
        ({"use_bias": 1}, "use_bias must be true or false"),
        ({"use_conv_bias": "no"}, "use_conv_bias must be true or false"),
        ({"time_step_limit": [1, 0]}, "time_step_limit must be two numbers"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu', which changes the model"),
        ({"mlp_hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({"attention_bias": True}, "attention_bias=true, which changes the model"),
        ({"sliding_window": 8}, "sliding_window=8, which changes the model"),
    ],
    "qwen3_5": [
        ({"layer_types": [STATE] * 5}, "no layer is full_attention"),
        ({"layer_types": None, "full_attention_interval": 6}, "no layer is full_attention"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be"),
        ({"layer_types": None, "full_attention_interval": "4"}, "full_attention_interval must be"),
        ({"layer_types": [STATE] * 4}, "layer_types must name 5 layers"),
        ({"layer_types": [STATE] * 4 + ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": [STATE] * 4 + ["mamba"]}, "layer_types has 'mamba'"),
        ({"layer_types": STATE}, "layer_types must be a list"),
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"linear_num_value_heads": 3}, "3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be"),
        ({"linear_value_head_dim": -1}, "linear_value_head_dim must be"),
        ({"linear_key_head_dim": True}, "linear_key_head_dim must be"),
        ({"linear_key_head_dim": 2.5}, "linear_key_head_dim must be"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported: it may be 2 to 8"),
        ({"linear_conv_kernel_dim": None, "linear_num_key_heads": 8}, "4 is not a multiple of linear_num_key_heads 8"),
        ({"num_experts": 8}, "num_experts=8"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 1]}},
            "must add up to the 4 rotated pairs",
        ),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param(family, changes, message, id=f"{family}-{str(changes)[:60]}")
        for family, rows in REFUSED.items()
        for changes, message in rows
    ],
)
def test_invalid_value_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_spec({**VALID[family], **changes})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


# -- registry ----------------------------------------------------------------------------------------------------------


def test_every_family_is_listed_once() -> None:
    for names in ([family.architecture for family in FAMILIES], [family.model_type for family in FAMILIES]):
        assert len(set(names)) == len(names)


REMOTE = {"baichuan", "chatglm", "internlm2"}  # their classes are published with their weights
UNSPECIFIED = {("bloom", "max_position_embeddings")}  # by the configuration class
OF_ANOTHER = {"internlm3"}  # run by another family's class


def test_families_without_a_class_of_transformers() -> None:
    without = {family.model_type for family in FAMILIES if not hasattr(transformers, family.architecture)}
    assert without == REMOTE | OF_ANOTHER


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.model_type not in REMOTE],
    ids=lambda family: family.model_type,
)
def test_defaults_equal_the_configuration_class(family: Family) -> None:
    theirs, rules = AutoConfig.for_model(family.model_type), family.rules
    theirs.allow_global_per_layer_attribute_access = True  # for Gemma 4, whose global layers have other heads
    if family.model_type not in OF_ANOTHER:
        assert getattr(transformers, family.architecture).config_class is type(theirs)
    sizes = rules.sizes
    for name, default in {
        "max_position_embeddings": sizes.context,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "tie_word_embeddings": rules.tie_word_embeddings,
    }.items():
        if (family.model_type, name) not in UNSPECIFIED:
            assert default == getattr(theirs, name), name
    if family.norm_eps_key is not None:
        assert rules.rms_norm_eps == getattr(theirs, family.norm_eps_key)
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    assert (sizes.kv_heads or sizes.heads) == kv_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (sizes.head_dim or sizes.hidden // sizes.heads) == head_dim
    if hasattr(theirs, family.activation_key):
        assert family.activation == getattr(theirs, family.activation_key)
    assert family.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
