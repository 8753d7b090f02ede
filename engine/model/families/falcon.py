"""Falcon: fused projections, norms around the mean, and three ways to place them, which config.json tells apart.

Falcon-RW does not rotate: its scores lose by the distance (ALiBi) before they are divided by the root of a head's size, so that
the slopes are divided, too. transformers rounds what is lost to bfloat16; here it is not rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.model.config_json.patterns import nope_layers
from windlass.engine.model.config_json.rules import ConfigRules, renamed
from windlass.engine.model.config_json.values import Config, read_flag, read_size
from windlass.engine.model.families.family import ConfigFlag, Family, FamilyClassificationHead
from windlass.engine.model.feed_forward.plain_spec import PlainMLPNames
from windlass.engine.model.head_spec import ClassificationHeadNames
from windlass.engine.model.mixers.attention_spec import AttentionNames
from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.spec import LayerNorms, OuterNames

_FORM = NormSpec(centered=True, bias=True)
_ONE_NORM = LayerNorms(feed_forward=None, form=_FORM, parallel=True)
_TWO_NORMS = LayerNorms(mixer="ln_attn", feed_forward="ln_mlp", form=_FORM, parallel=True)
_IN_TURN = LayerNorms(form=_FORM)
_FUSED = AttentionNames(qkv="self_attention.query_key_value", out="self_attention.dense")
_BIAS = ConfigFlag("bias")
_names = renamed({"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"})


def _rewrite(config: Config) -> dict[str, Any]:
    """The number of key heads counts in the newer form alone; in the older there is one, or one for each query."""
    found = _names(config)
    if not read_flag(config, "new_decoder_architecture"):
        one = read_flag(config, "multi_query", default=True)
        found["num_key_value_heads"] = 1 if one else config.get("num_attention_heads")
    return found


def _variant(family: Family, config: Config) -> Family:
    if read_flag(config, "alibi"):
        rules = replace(family.rules, layer_pattern=nope_layers)
        family = replace(family, positions="alibi", scaled_alibi=True, rules=rules)
    if read_flag(config, "new_decoder_architecture"):
        norms = _ONE_NORM if read_size(config, "num_ln_in_parallel_attn", 2) == 1 else _TWO_NORMS
        return replace(family, attention_names=replace(_FUSED, qkv_order="groups"), norms=norms)
    norms = _ONE_NORM if read_flag(config, "parallel_attn", default=True) else _IN_TURN
    one = read_flag(config, "multi_query", default=True)
    return replace(family, attention_names=replace(_FUSED, qkv_order="parts" if one else "groups"), norms=norms)


FALCON = Family(
    architecture="FalconForCausalLM",
    title="Falcon, Falcon-RW",
    model_type="falcon",
    rules=ConfigRules(
        max_position_embeddings=2048,
        hidden_size=4544,
        num_attention_heads=71,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        intermediate_factor=4,
        rewrite=_rewrite,
    ),
    qkv_bias=_BIAS,
    out_bias=_BIAS,
    feed_forward_bias=_BIAS,
    activation="gelu",
    activation_key="activation",
    attention_names=_FUSED,
    feed_forward_names=PlainMLPNames(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=_ONE_NORM,
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("transformer.word_embeddings", "transformer.h", "transformer.ln_f"),
    token_head=FamilyClassificationHead(ClassificationHeadNames(out="classifier"), out_bias=True),
    variant=_variant,
    extra_keys=frozenset(
        {"new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "alibi"}
    ),
)
