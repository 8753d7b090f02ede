"""GLM 4: half of each head rotates, in interleaved pairs. Glm4 has norms around every part as well."""

from __future__ import annotations

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import Family, Flag
from windlass.engine.model.spec import CheckpointLayout

_BIAS = Flag("attention_bias", default=True)
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
    model_type="glm",
    rules=_RULES,
    qkv_bias=_BIAS,
    checkpoint=CheckpointLayout(interleaved=True, fused_gate_up=True),
)

GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    rules=_RULES,
    qkv_bias=_BIAS,
    norms="sandwich",
    checkpoint=CheckpointLayout(interleaved=True, fused_gate_up=True, norms="glm4"),
)
