"""Cohere's Command R and R7B: LayerNorm, mixer and feed-forward in parallel, interleaved pairs, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import Config, ConfigRules, local_layers_rotate, read_flag
from windlass.engine.model.families.family import ATTENTION_BIAS, Family, Multipliers
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.model.norm import NormSpec

_RULES = ConfigRules(
    max_position_embeddings=8192,
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_theta=500_000.0,
)

_CENTERED = NormSpec(centered=True)


def _with_head_norms(family: Family, config: Config) -> Family:
    """Command R+ norms queries and keys, each head with its own weights."""
    wanted = read_flag(config, "use_qk_norm")
    return replace(family, qk_norm="by head", qk_norm_form=_CENTERED) if wanted else family


COHERE = Family(
    architecture="CohereForCausalLM",
    title="Cohere Command R and R+",
    model_type="cohere",
    rules=_RULES,
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    interleaved=True,
    multipliers=Multipliers(logits="logit_scale", logits_default=0.0625),
    norms=LayerNorms(feed_forward=None, form=_CENTERED, parallel=True),
    norm_eps_key="layer_norm_eps",
    variant=_with_head_norms,
    extra_keys=frozenset({"use_qk_norm"}),
)

# Its global layers do not rotate.
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    title="Cohere Command R7B (Cohere 2)",
    model_type="cohere2",
    variant=None,
    extra_keys=frozenset(),
    rules=replace(_RULES, layer_pattern=local_layers_rotate, sliding_window=4096, rope_theta=10_000.0),
)
