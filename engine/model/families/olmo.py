"""OLMo 1 to 3 and OLMoE."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import ConfigRules, Sizes, every_nth_full
from windlass.engine.model.families.family import ATTENTION_BIASES, Family
from windlass.engine.model.families.moe_rules import UNNORMALIZED_ROUTER, MoERules
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.model.norm import NormSpec

NORMS_BEHIND = LayerNorms(
    mixer=None,
    mixer_output="post_attention_layernorm",
    feed_forward=None,
    feed_forward_output="post_feedforward_layernorm",
)

_RULES = ConfigRules(Sizes(context=2048), rms_norm_eps=1e-5)

OLMO = Family(
    architecture="OlmoForCausalLM",
    title="OLMo 1",
    model_type="olmo",
    rules=_RULES,
    biases=ATTENTION_BIASES,
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
    biases=ATTENTION_BIASES,
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

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    model_type="olmoe",
    rules=ConfigRules(
        sizes=Sizes(context=4096, hidden=2048, layers=16, heads=16),
        rms_norm_eps=1e-5,
        eos_token_id=(50_279,),
    ),
    biases=ATTENTION_BIASES,
    qk_norm="all heads",
    experts=MoERules(
        experts=64,
        top_k=8,
        width_keys=("intermediate_size",),
        router=UNNORMALIZED_ROUTER,
        normalized_key="norm_topk_prob",
    ),
)
