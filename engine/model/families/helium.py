"""Helium 1: interleaved pairs."""

from __future__ import annotations

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, MLP_BIAS, Family

HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    rules=ConfigRules(
        max_position_embeddings=4096,
        hidden_size=2560,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=128,
        rms_norm_eps=1e-8,
        rope_theta=100_000.0,
    ),
    qkv_bias=ATTENTION_BIAS,
    feed_forward_bias=MLP_BIAS,
    interleaved=True,
)
