"""LFM2 from config.json: attention layers, feed-forward widths, experts, and refused values."""

from __future__ import annotations

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
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec, RouterSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.model_spec import ModelSpec

CONV, ATTENTION = "conv", "full_attention"
ATTENDING = (2, 5, 8, 10, 12, 14)
# As LiquidAI/LFM2-1.2B has it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": list(ATTENDING),
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def config(name: str = "lfm2", **changes: Any) -> dict[str, Any]:
    """Of a tiny model."""
    kind, own = (tiny_families.FAMILIES | tiny_experts.FAMILIES)[name]
    model_type = {"Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe"}[kind]
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": model_type, **SIZES, **own, **changes}


def width(spec: ModelSpec, layer: int = 0) -> int:
    feed_forward = spec.layers[layer].feed_forward
    assert isinstance(feed_forward, GatedMLPSpec)
    return feed_forward.intermediate_size


def test_a_published_file() -> None:
    spec = read_spec(PUBLISHED)
    assert not spec.notices and spec.trained_len == 128_000 and spec.norm_eps == 1e-5 and spec.tied_embeddings
    assert spec.eos_token_ids == (7,) and width(spec) == 8192
    assert tuple(spec.attention) == ATTENDING
    assert spec.kv_groups == (KVGroupSpec(ATTENDING, 8, 64, None),)
    others = tuple(index for index in range(16) if index not in ATTENDING)
    assert spec.state_group == StateGroupSpec(others, 2048, 3, 0, 0, 0)
    assert spec.state_group.block_bytes == 10 * 2 * 2048 * 4
    assert spec.layers[0].mixer == ShortConvolutionSpec(2048, 3)
    attention = spec.attention[2]
    assert isinstance(attention, AttentionSpec) and attention.qk_norm == "before" and not attention.qkv_bias
    (group,) = spec.rotary_groups
    assert (group.base.rotary_dim, group.base.rope_theta) == (64, 1_000_000)
    stored = {tensor.name for weight in spec.weights() for tensor in weight.stored}
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


@pytest.mark.parametrize("name", ["lfm2", "lfm2_plain", "lfm2_moe", "lfm2_moe_unbiased"])
def test_published_and_written_by_transformers_are_read_alike(name: str, tmp_path: Path) -> None:
    written = transformers.AutoConfig.from_pretrained(make_model(name, tmp_path / name)).to_dict()
    ours = read_spec(config(name, rope_theta=1e6))
    theirs = read_spec({**written, "architectures": config(name)["architectures"]})
    assert (ours.layers, ours.kv_groups, ours.state_group) == (theirs.layers, theirs.kv_groups, theirs.state_group)
    assert ours.tied_embeddings is theirs.tied_embeddings
    assert ours.rotary_groups == theirs.rotary_groups and not theirs.notices and not ours.notices


def test_which_layers_attend() -> None:
    told = read_spec(config(layer_types=None, full_attn_idxs=[4, 2]))
    assert tuple(told.attention) == (2, 4) and told.state_group == read_spec(config()).state_group
    assert read_spec(config(full_attn_idxs=[2, 4])).layers == told.layers
    every = read_spec(config(layer_types=None))
    assert len(every.attention) == 5 and every.state_group is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 88),  # int(64 * 1.3) in eights
        ({"block_ffn_dim_multiplier": 1.0}, 64),
        ({"block_ffn_dim_multiplier": None}, 64),
        ({"block_ffn_dim_multiplier": None, "intermediate_size": 100}, 66),  # no steps without a factor
        ({"block_multiple_of": None, "block_ffn_dim_multiplier": 1}, 256),
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_auto_adjust_ff_dim": None}, 88),
        ({"block_ff_dim": 48, "block_ffn_dim_multiplier": 1.0}, 32),
    ],
    ids=str,
)
def test_widths_of_feed_forwards(changes: dict[str, Any], expected: int) -> None:
    assert width(read_spec(config(**changes))) == expected
    given = {key: value for key, value in config(**changes).items() if key not in ("architectures", "layer_types")}
    if None not in changes.values():  # which transformers refuses
        theirs = transformers.Lfm2Config(**given, layer_types=["conv"] * 5)
        assert transformers.models.lfm2.modeling_lfm2.Lfm2MLP(theirs).w1.out_features == expected


def test_of_two_names_the_older_counts() -> None:
    both = {"tie_embedding": True, "tie_word_embeddings": False}
    assert read_spec(config(**both)).tied_embeddings
    assert transformers.Lfm2Config(**both).tie_word_embeddings
    assert not read_spec(config(tie_embedding=False, tie_word_embeddings=True)).tied_embeddings


def test_experts_and_how_they_are_chosen() -> None:
    for name, biased in (("lfm2_moe", True), ("lfm2_moe_unbiased", False)):
        layers = read_spec(config(name)).layers
        experts = layers[-1].feed_forward
        assert isinstance(experts, MoESpec) and (experts.names.choice_bias is not None) is biased
        assert sum(isinstance(layer.feed_forward, GatedMLPSpec) for layer in layers) == (1 if biased else 2)
        assert width(read_spec(config(name))) == 96
        top_k, scale = (2, 1.25) if biased else (3, 1.0)
        assert experts.router == RouterSpec(top_k, "sigmoid", normalized=biased, scale=scale, sum_eps=1e-6)


@pytest.mark.parametrize("written", [None, {"tie_word_embeddings": False}, {"tie_embedding": False}], ids=str)
def test_a_text_part(written: dict[str, bool] | None) -> None:
    """The whole model decides whether the head is tied, whatever its text part says."""
    text = {**PUBLISHED, "tie_embedding": written is not None}
    whole = {"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "text_config": text}
    part = text_config_of({**whole, **(written or {})})
    spec = part.adapt_spec(read_spec(part.config), ())
    assert spec.layers == read_spec(PUBLISHED).layers and spec.tied_embeddings is (written is None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ids=str,
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_spec(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_expert_bias": "no"}, "use_expert_bias must be true or false"),
        ({"num_experts_per_tok": 7}, "num_experts 6 and num_experts_per_tok 7 do not go together"),
        ({"num_dense_layers": -1}, "num_dense_layers must be"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor must be"),
        ({"layer_types": [CONV] * 5}, "no layer is full_attention"),
    ],
    ids=str,
)
def test_experts_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_spec(config("lfm2_moe", **changes))
