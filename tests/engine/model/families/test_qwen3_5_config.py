"""Models with mostly Gated DeltaNet layers from config.json: attention layers, sizes, and refused values."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers import tiny_experts, tiny_families
from helpers.tiny_models import SIZES, make_model

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.multimodal import text_config_of
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetNames, GatedDeltaNetSpec
from windlass.engine.model.model_spec import ModelSpec

STATE, ATTENTION = "linear_attention", "full_attention"
# As Qwen/Qwen3.5-27B has it, but for what says how images are seen.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": ([STATE] * 3 + [ATTENTION]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen3_5"},
}


def config(name: str = "qwen3_5", **changes: Any) -> dict[str, Any]:
    """Of a tiny model, as published files have it."""
    kind, own = (tiny_families.FAMILIES | tiny_experts.FAMILIES)[name]
    model_type = {"Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text", "Qwen3Next": "qwen3_next"}[kind]
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": model_type, **SIZES, **own, **changes}


def published(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **changes}}


def read_text(whole: dict[str, Any]) -> ModelSpec:
    part = text_config_of(whole)
    return part.adapt_spec(read_spec(part.config), ())


def test_a_published_file() -> None:
    spec = read_text(PUBLISHED)
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
    assert all(name.startswith(("mtp.", "model.visual.")) is name.startswith(spec.unused_tensors) for name in NAMES)


NAMES = (
    "mtp.fc.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "model.language_model.layers.0.linear_attn.A_log",
    "lm_head.weight",
)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_interval"])
def test_published_and_written_by_transformers_are_read_alike(name: str, tmp_path: Path) -> None:
    written = transformers.AutoConfig.from_pretrained(make_model(name, tmp_path / name)).to_dict()
    ours, theirs = read_spec(config(name)), read_spec({**written, "architectures": config(name)["architectures"]})
    assert (ours.layers, ours.kv_groups, ours.state_group) == (theirs.layers, theirs.kv_groups, theirs.state_group)
    assert ours.rotary_groups == theirs.rotary_groups and not theirs.notices


def test_every_nth_layer_attends_where_no_list_says_which() -> None:
    for interval, attending in ((None, (3,)), (2, (1, 3)), (1, (0, 1, 2, 3, 4))):
        spec = read_spec(config(layer_types=None, full_attention_interval=interval))
        assert tuple(spec.attention) == attending
        assert (spec.state_group is None) is (len(attending) == 5)
        assert all(isinstance(spec.layers[index].mixer, GatedDeltaNetSpec) for index in set(range(5)) - set(attending))


def test_tensors_lie_apart_or_joined() -> None:
    apart, joined = (read_spec(config(name)).layers[0].mixer for name in ("qwen3_5", "qwen3_next"))
    assert isinstance(apart, GatedDeltaNetSpec) and isinstance(joined, GatedDeltaNetSpec)
    assert apart.names == GatedDeltaNetNames()
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


def test_which_layers_have_experts() -> None:
    def with_experts(**changes: Any) -> list[int]:
        layers = read_spec(config("qwen3_next", **changes)).layers
        return [index for index, layer in enumerate(layers) if isinstance(layer.feed_forward, MoESpec)]

    assert with_experts() == [0, 2, 3]
    assert with_experts(decoder_sparse_step=2, mlp_only_layers=[]) == [1, 3]
    assert with_experts(mlp_only_layers=None) == [0, 1, 2, 3, 4]


def test_scalings_of_the_layers_that_attend() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    (group,) = read_spec(config(rope_parameters={**yarn, "mrope_section": [2, 1, 1]})).rotary_groups
    assert group.scaling.rope_type == "yarn" and group.base.rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_spec(config(**changes))


def test_the_text_part_refuses_the_same() -> None:
    with pytest.raises(LoadError, match="attn_output_gate=false"):
        read_text(published(attn_output_gate=False))


def test_other_models_have_no_such_layers() -> None:
    other = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
    with pytest.raises(LoadError, match="layer_types has 'linear_attention'"):
        read_spec({**other, "layer_types": [STATE, ATTENTION] * 2})
