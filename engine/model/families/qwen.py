"""Qwen 2 and 2.5, with biases on q, k and v, and Qwen 3, with a norm per head before the rotation."""

from __future__ import annotations

from windlass.engine.model.config_json.patterns import LayerFacts
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_flag, read_size
from windlass.engine.model.families.family import ATTENTION_BIAS, Family
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _windows_above(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, layers from `max_window_layers` on see a window; `layer_types` says it layer by layer."""
    first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 28)
    windows = read_flag(config, "use_sliding_window")
    kinds = facts.given or [SLIDING_ATTENTION if windows and i >= first else FULL_ATTENTION for i in range(facts.count)]
    return (kinds if windows else [FULL_ATTENTION] * facts.count), kinds


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    title="Qwen 2 and 2.5",
    model_type="qwen2",
    other_model_types=("qwen2_vl_text", "qwen2_5_vl_text"),  # whose positions have three parts, on text the same
    rules=ConfigRules(
        layer_pattern=_windows_above,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        sliding_window=4096,
    ),
    qkv_bias=True,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    title="Qwen 3",
    model_type="qwen3",
    other_model_types=("qwen3_vl_text",),
    rules=ConfigRules(
        layer_pattern=_windows_above,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        head_dim=128,
        sliding_window=4096,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="before",
)
