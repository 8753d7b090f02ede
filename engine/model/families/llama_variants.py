"""Families that differ from Llama in a few switches: Seed-OSS, CWM, Arcee, Apertus, BitNet, Helium 1, SmolLM 3.

Defaults, biases, windows, activations, interleaved pairs (Helium), layers without rotation (SmolLM 3), or an additional norm.
"""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, LayerFacts, every_nth_full, read_flag
from windlass.engine.model.families.family import ATTENTION_BIAS, MLP_BIAS, ConfigFlag, Family
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION

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


def _windows_without_rotation(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, layers that do not rotate have a window, or those that `layer_types` lists."""
    full = [FULL_ATTENTION] * facts.count
    if not config.get("use_sliding_window", False):
        return full, full
    return facts.given or [FULL_ATTENTION if rotates else SLIDING_ATTENTION for rotates in facts.rotates], full


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    title="SmolLM 3",
    model_type="smollm3",
    rules=ConfigRules(
        layer_pattern=_windows_without_rotation,
        max_position_embeddings=32_768,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_theta=2_000_000.0,
        no_rope_layer_interval=4,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    feed_forward_bias=MLP_BIAS,
)

SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    title="Seed-OSS",
    model_type="seed_oss",
    rules=ConfigRules(
        max_position_embeddings=524_288,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
    ),
    qkv_bias=ConfigFlag("attention_bias", default=True),
    out_bias=ConfigFlag("attention_out_bias"),
    feed_forward_bias=MLP_BIAS,
)

CWM = Family(
    architecture="CwmForCausalLM",
    title="CWM",
    model_type="cwm",
    rules=ConfigRules(
        layer_pattern=every_nth_full(4, first=True),
        max_position_embeddings=131_072,
        hidden_size=6144,
        num_hidden_layers=64,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        eos_token_id=(128_001, 128_008, 128_009),
        sliding_window=8192,
        rope_theta=1_000_000.0,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    feed_forward_bias=MLP_BIAS,
)

ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    rules=ConfigRules(
        max_position_embeddings=4096,
        hidden_size=2560,
        rms_norm_eps=1e-5,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    feed_forward_bias=MLP_BIAS,
    activation="relu2",
    feed_forward_names=PlainMLPNames(),
)


def _check_published(family: Family, config: Config) -> Family:
    """Reject values of keys that its files have but its class in transformers no longer reads."""
    if not read_flag(config, "qk_norm", default=True) or read_flag(config, "post_norm"):
        raise LoadError("config.json sets qk_norm or post_norm otherwise than published Apertus models: not supported")
    return family


APERTUS = Family(
    architecture="ApertusForCausalLM",
    title="Apertus",
    model_type="apertus",
    rules=ConfigRules(
        max_position_embeddings=65_536,
        rms_norm_eps=1e-5,
        rope_theta=12_000_000.0,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="before",
    activation="xielu",
    feed_forward_names=PlainMLPNames(),
    norms=LayerNorms(mixer="attention_layernorm", feed_forward="feedforward_layernorm"),
    variant=_check_published,
    extra_keys=frozenset({"qk_norm", "post_norm"}),
)

# Unquantized files only: packed weights, and the rounding of activations, are not part of the family.
BITNET = Family(
    architecture="BitNetForCausalLM",
    title="BitNet",
    model_type="bitnet",
    rules=ConfigRules(
        max_position_embeddings=2048,
        hidden_size=2560,
        num_hidden_layers=30,
        num_attention_heads=20,
        num_key_value_heads=5,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    activation="relu2",
    attention_names=AttentionNames(output_norm="self_attn.attn_sub_norm"),
    feed_forward_names=GatedMLPNames(inner_norm="mlp.ffn_sub_norm"),
)
