"""Gemma 1 and 2 and VaultGemma: norms that multiply by one more than their weight, embeddings grown by the root of their size."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.patterns import every_nth_full
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, Family, SoftCaps
from windlass.engine.model.spec import LayerNorms

GEMMA = Family(
    architecture="GemmaForCausalLM",
    title="Gemma",
    model_type="gemma",
    rules=ConfigRules(
        max_position_embeddings=8192,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        tie_word_embeddings=True,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    gelu_by_tanh=True,  # what its first files call gelu
    scaled_embeddings=True,
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    model_type="gemma2",
    rules=ConfigRules(
        layer_pattern=every_nth_full(2),
        max_position_embeddings=8192,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    scaled_embeddings=True,
    query_pre_attn_scalar=256.0,
    soft_caps=SoftCaps(attention=50.0, logits=30.0),
    norms=LayerNorms(
        mixer="input_layernorm",
        mixer_output="post_attention_layernorm",
        feed_forward="pre_feedforward_layernorm",
        feed_forward_output="post_feedforward_layernorm",
    ),
)

VAULT_GEMMA = replace(
    GEMMA2,
    architecture="VaultGemmaForCausalLM",
    title="VaultGemma",
    model_type="vaultgemma",
    norms=LayerNorms(feed_forward="pre_feedforward_layernorm"),
)
