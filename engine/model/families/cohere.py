"""Cohere's Command R and R7B: LayerNorm, mixer and feed-forward in parallel, interleaved pairs, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import ConfigRules, Sizes, local_layers_rotate
from windlass.engine.model.families.family import ATTENTION_BIASES, ConfigFlag, ConfigNumber, Family, Multipliers
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.model.norm import NormSpec

_RULES = ConfigRules(
    sizes=Sizes(context=8192, hidden=8192, layers=40, heads=64),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_theta=500_000.0,
)

_CENTERED = NormSpec(centered=True)

COHERE = Family(
    architecture="CohereForCausalLM",
    title="Cohere Command R and R+",
    model_type="cohere",
    rules=_RULES,
    biases=ATTENTION_BIASES,
    interleaved=True,
    multipliers=Multipliers(logits=ConfigNumber("logit_scale", 0.0625)),
    norms=LayerNorms(feed_forward=None, form=_CENTERED, parallel=True),
    norm_eps_key="layer_norm_eps",
    qk_norm="by head",  # in Command R+
    qk_norm_form=_CENTERED,
    qk_norm_flag=ConfigFlag("use_qk_norm"),
)

# Its global layers do not rotate.
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    title="Cohere Command R7B (Cohere 2)",
    model_type="cohere2",
    qk_norm=None,
    qk_norm_flag=None,
    rules=replace(_RULES, layer_pattern=local_layers_rotate, sliding_window=4096, rope_theta=10_000.0),
)
