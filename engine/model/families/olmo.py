"""OLMo 1, whose norms have no weights; OLMo 2 and 3: norms behind every part instead of before it, and one over all heads of
the queries, one of the keys."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.patterns import every_nth_full
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, Family
from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.spec import LayerNorms

NORMS_BEHIND = LayerNorms(
    mixer=None,
    mixer_output="post_attention_layernorm",
    feed_forward=None,
    feed_forward_output="post_feedforward_layernorm",
)
_RULES = ConfigRules(max_position_embeddings=2048, rms_norm_eps=1e-5)

OLMO = Family(
    architecture="OlmoForCausalLM",
    title="OLMo 1",
    model_type="olmo",
    rules=_RULES,
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    clip_key="clip_qkv",
    extra_keys=frozenset({"clip_qkv"}),
    norms=LayerNorms(form=NormSpec(centered=True, weight=False)),
    norm_eps_key=None,
)

OLMO2 = Family(
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    rules=_RULES,
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="all heads",
    norms=NORMS_BEHIND,
)

OLMO3 = replace(
    OLMO2,
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    rules=replace(
        _RULES,
        layer_pattern=every_nth_full(4, groups=True),
        scales_full_attention_only=True,
        sliding_window=4096,
        rope_theta=500_000.0,
    ),
)
