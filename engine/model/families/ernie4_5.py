"""ERNIE 4.5 (dense): interleaved pairs, one switch for all biases."""

from __future__ import annotations

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ConfigFlag, Family

_BIAS = ConfigFlag("use_bias")

ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    other_names=("Ernie4_5_ForCausalLM",),
    title="ERNIE 4.5 (dense)",
    model_type="ernie4_5",
    rules=ConfigRules(
        max_position_embeddings=131_072,
        hidden_size=1024,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=500_000.0,
    ),
    qkv_bias=_BIAS,
    out_bias=_BIAS,
    feed_forward_bias=_BIAS,
    interleaved=True,
)
