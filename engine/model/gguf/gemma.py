"""What a GGUF file says of the layers of Gemma 2 and 3, in the names of config.json. It opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.local_layers import WINDOW, local_layers
from windlass.engine.rotary.scaling import FULL_ATTENTION


def gemma2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing says what scales q·k: the inverse root of the head's width, but for the 27B model, which has 46 layers."""
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    return {
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"] if count == 46 else head_dim,
        "layer_types": local_layers(keys, count, 2),
        "sliding_window": keys.count(WINDOW) or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def gemma3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Local and global layers, and the number whose inverse root scales q·k, which the 27B model has from elsewhere.

    Older files leave the pattern out, since every sixth layer is global; none has that number.
    """
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    scale = keys.number("attention.scale")
    if scale is not None:
        scaled_by = scale**-2
    else:
        scaled_by = config["hidden_size"] / config["num_attention_heads"] if count == 62 else head_dim
    window = keys.count(WINDOW)
    return {
        "query_pre_attn_scalar": scaled_by,
        "layer_types": local_layers(keys, count, 6) if window else [FULL_ATTENTION] * count,
        "sliding_window": window or config["max_position_embeddings"],
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }
