"""From a config.json to the latent attention of its layers. Knows no single family, opens no file and imports no torch."""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.rotary_layout import RotaryLayout
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.family import Family, LatentSizes, is_set
from windlass.engine.model.mixers.latent_spec import LatentSpec


def read_latent(config: Config, family: Family, sizes: LatentSizes, layout: RotaryLayout) -> LatentSpec:
    """Of the first rotary group; all layers are alike. Raises LoadError for what such layers cannot have."""
    base = layout.groups[0].base
    heads, hidden = read_size(config, "num_attention_heads"), read_size(config, "hidden_size")
    if read_size(config, "num_key_value_heads", heads) != heads:
        raise LoadError(
            "config.json: num_key_value_heads differs from num_attention_heads, which latent attention has none of"
        )
    if base.rotary_dim != base.head_dim:
        raise LoadError(
            "config.json: partial_rotary_factor must be 1 with latent attention: qk_rope_head_dim says what rotates"
        )
    if len(layout.groups) > 1 or any(layer.window is not None for layer in layout.layers):
        raise LoadError(
            "config.json: windows and layers that rotate in several ways are not supported with latent attention"
        )
    plain = read_size(config, "qk_nope_head_dim", sizes.qk_nope_head_dim)
    without_rank = sizes.q_lora_rank is None or ("q_lora_rank" in config and config["q_lora_rank"] is None)
    return LatentSpec(
        num_heads=heads,
        latent_dim=read_size(config, "kv_lora_rank", sizes.kv_lora_rank),
        rotary_dim=base.rotary_dim,
        plain_dim=plain,
        value_dim=read_size(config, "v_head_dim", sizes.v_head_dim or hidden // heads),
        scale=float(plain + base.rotary_dim) ** -0.5,
        query_rank=None if without_rank else read_size(config, "q_lora_rank", sizes.q_lora_rank),
        bias=is_set(config, family.out_bias),
        interleaved=is_set(config, family.interleaved),
    )
