"""Older and rarer names of a model's rotation in config.json, rewritten to the ones the reader knows.

Responsible for names only: `rotary_pct`, `rotary_dim`, `rotary_emb_base`, `rope_ratio`, `global_rope_theta`,
`local_rope_theta`, `attn_config.rope_theta`, `dual_chunk_attention_config`. Two names that disagree are
refused rather than ranked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config, read_number, read_object, read_size
from windlass.engine.rotary.fields import format_value

LEGACY_ROPE_KEYS = (
    "rotary_pct",  # GPT-NeoX, StableLM
    "rotary_emb_base",  # GPT-NeoX
    "rotary_dim",  # GPT-J, CodeGen, MiniMax: dimensions rather than a share of them
    "rope_ratio",  # ChatGLM: theta is 10,000 times it
    "global_rope_theta",  # ModernBERT
    "local_rope_theta",  # ModernBERT
    "attn_config",  # DBRX
    "dual_chunk_attention_config",  # Qwen2.5-1M
)
_CHATGLM_THETA = 10_000.0


def normalize_rope_keys(config: Config, head_dim: int) -> dict[str, Any]:
    """The config with `rope_theta`, `rope_local_base_freq` and `partial_rotary_factor` for the older names it carries.

    Raises LoadError for a wrong value and for two names that say different things.
    """
    result = dict(config)

    def put(name: str, older: str, value: float | dict[str, Any] | None) -> None:
        if value is None:
            return
        given = result.get(name)
        if given is not None and given != value:
            raise LoadError(
                f"config.json: {name} is {format_value(given)} and {older} makes it {format_value(value)}: keep one"
            )
        result[name] = value

    put("rope_theta", "rotary_emb_base", read_number(config, "rotary_emb_base"))
    put("rope_theta", "global_rope_theta", read_number(config, "global_rope_theta"))
    put("rope_local_base_freq", "local_rope_theta", read_number(config, "local_rope_theta"))
    put("partial_rotary_factor", "rotary_pct", read_number(config, "rotary_pct"))
    ratio = read_number(config, "rope_ratio")
    put("rope_theta", "rope_ratio", None if ratio is None else _CHATGLM_THETA * ratio)
    attention = config.get("attn_config")
    if isinstance(attention, Mapping):
        put("rope_theta", "attn_config.rope_theta", read_number(attention, "rope_theta"))
    chunks = read_object(config, "dual_chunk_attention_config")
    if chunks is not None:
        put("rope_scaling", "dual_chunk_attention_config", _dual_chunks(chunks))
    if config.get("rotary_dim") is not None:
        dim = read_size(config, "rotary_dim")
        share = dim / head_dim
        # A share is read back as int(head_dim * share), which rounding must not take below the whole number.
        put("partial_rotary_factor", "rotary_dim", share if int(head_dim * share) == dim else math.nextafter(share, 2))
    return result


def _dual_chunks(given: Config) -> dict[str, Any]:
    """The scaling that Qwen2.5-1M writes apart: scores grow with the length of the request.

    Which keys are left out to save time (`sparse_attention_…`) is no part of the model: all are looked at.
    """
    names = ("chunk_size", "local_size", "original_max_position_embeddings")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    return {"rope_type": "dual_chunk", **chosen, "length_scores": True}
