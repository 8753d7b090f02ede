"""SmolLM 3: every fourth layer does not rotate."""

from __future__ import annotations

from windlass.engine.model.config_json.patterns import LayerFacts
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config
from windlass.engine.model.families.family import ATTENTION_BIAS, MLP_BIAS, Family
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _windows_without_rotation(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, the layers that do not rotate see a window; `layer_types` says it layer by layer."""
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
