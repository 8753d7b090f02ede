"""Gemma 3 (text): local layers with a theta of their own between global ones, norms around every part."""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.patterns import LayerFacts
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.family import ATTENTION_BIAS, Family, SoftCaps
from windlass.engine.model.spec import LayerNorms
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _gemma3_layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Every `sliding_window_pattern`-th layer, the sixth by default, sees everything; `layer_types` says it directly."""
    if not facts.windowed:
        # Local layers would rotate by their own theta without a window; nothing says which layers those are.
        raise LoadError("config.json: sliding_window is null, and local layers need one: give its size")
    kinds = facts.given or _every(read_size(config, "sliding_window_pattern", 6), facts.count)
    return kinds, kinds


def _every(interval: int, count: int) -> list[str]:
    return [SLIDING_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)]


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    title="Gemma 3 (text)",
    model_type="gemma3_text",
    text_part="Text",
    rules=ConfigRules(
        layer_pattern=_gemma3_layer_pattern,
        max_position_embeddings=131_072,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="before",
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    scaled_embeddings=True,
    query_pre_attn_scalar=256.0,
    soft_caps=SoftCaps(),
    norms=LayerNorms(
        mixer="input_layernorm",
        mixer_output="post_attention_layernorm",
        feed_forward="pre_feedforward_layernorm",
        feed_forward_output="post_feedforward_layernorm",
    ),
)
