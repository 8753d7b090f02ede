"""GLM 4: half of each head rotates, in interleaved pairs. Glm4 has norms around every part as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.family import ConfigFlag, Family
from windlass.engine.model.feed_forward.gated_spec import GatedMLPNames
from windlass.engine.model.spec import LayerNorms

_BIAS = ConfigFlag("attention_bias", default=True)
_GATE_UP = GatedMLPNames(gate_up="mlp.gate_up_proj")
_RULES = ConfigRules(
    max_position_embeddings=131_072,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-7,
    eos_token_id=(151_329, 151_336, 151_338),
    partial_rotary_factor=0.5,
)

GLM = Family(
    architecture="GlmForCausalLM",
    title="GLM-4 (9B)",
    model_type="glm",
    rules=_RULES,
    qkv_bias=_BIAS,
    interleaved=True,
    feed_forward_names=_GATE_UP,
)


def _rewrite_glm4(config: Config) -> dict[str, Any]:
    """Heads of the text part of a multimodal model are a share of its hidden size, as its config.json has no `head_dim`."""
    if config.get("model_type") != "glm4v_text" or config.get("head_dim") is not None:
        return dict(config)
    return {**config, "head_dim": read_size(config, "hidden_size") // read_size(config, "num_attention_heads")}


GLM4 = Family(
    architecture="Glm4ForCausalLM",
    title="GLM-4 0414",
    model_type="glm4",
    other_model_types=("glm4v_text",),
    rules=replace(_RULES, rewrite=_rewrite_glm4),
    qkv_bias=_BIAS,
    interleaved=True,
    feed_forward_names=_GATE_UP,
    norms=LayerNorms(mixer_output="post_self_attn_layernorm", feed_forward_output="post_mlp_layernorm"),
)
