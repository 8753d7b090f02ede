"""What a GGUF file says of Qwen 3.5 and Qwen3-Next, whose layers carry a state, in the names of config.json. It opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.gated_delta import LINEAR_ATTENTION
from windlass.engine.model.gguf.carried_states import SIZE_KEYS, read_recurrent_sizes
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION

_INTERVAL, _DENSE_WIDTH = "full_attention_interval", "feed_forward_length"
_RECURRENT = "attention.recurrent_layers"  # in files from 2026 on, beside the interval
_DELTA_COUNT, _DELTA_USED = "expert_count", "expert_used_count"
_DELTA_EXPERT_WIDTH, _DELTA_SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"

# Sections of a rotation tell apart how images lie, on text all positions are equal.
_DELTA_KEYS = (*SIZE_KEYS, _INTERVAL, _RECURRENT, "rope.dimension_sections")


def gated_delta(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes, and which layers attend: every n-th, unless the file says it layer by layer."""
    sizes = read_recurrent_sizes(keys)
    return {
        "linear_conv_kernel_dim": sizes.width,
        "linear_key_head_dim": sizes.state_dim,
        "linear_num_key_heads": sizes.groups,
        "linear_num_value_heads": sizes.heads,
        "linear_value_head_dim": sizes.head_dim,
        "full_attention_interval": keys.size(_INTERVAL, 4),
        **_delta_layer_types(keys, config["num_hidden_layers"]),
    }


def _delta_layer_types(keys: ArchitectureKeys, layers: int) -> dict[str, list[str]]:
    """What `layer_types` says, where the file tells of every block whether it carries a state; the last may predict further."""
    carries = keys.raw(_RECURRENT)
    if carries is None:
        return {}
    blocks = keys.size("block_count")
    if not isinstance(carries, list) or len(carries) != blocks or any(one not in (0, 1) for one in carries):
        raise LoadError(
            f"{keys.key(_RECURRENT)} must have true or false for each of {blocks} blocks, got {format_value(carries)}"
        )
    return {"layer_types": [LINEAR_ATTENTION if one else FULL_ATTENTION for one in carries[:layers]]}


def delta_with_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same and the sizes of experts, whose weights llama.cpp divides by their sum."""
    return {
        **gated_delta(keys, config),
        "num_experts": keys.size(_DELTA_COUNT),
        "num_experts_per_tok": keys.size(_DELTA_USED),
        "moe_intermediate_size": keys.size(_DELTA_EXPERT_WIDTH),
        "shared_expert_intermediate_size": keys.count(_DELTA_SHARED_WIDTH),
        "norm_topk_prob": True,
    }


def without_dense_layers(keys: ArchitectureKeys, layers: int) -> ArchitectureKeys:
    """The keys with a width of a feed-forward that no layer has, where the file has none."""
    return keys.replaced({_DENSE_WIDTH: keys.raw(_DENSE_WIDTH) or keys.size(_DELTA_EXPERT_WIDTH)})


# Fields of `Architecture`.
GATED_DELTA_FIELDS: dict[str, Any] = {
    "more": gated_delta,
    "reads": _DELTA_KEYS,
    "norms_with_offset": True,
    "aliases": {"post_attention_norm": "ffn_norm"},
}
GATED_DELTA_MOE_FIELDS = GATED_DELTA_FIELDS | {
    "more": delta_with_experts,
    "reads": (*_DELTA_KEYS, _DELTA_COUNT, _DELTA_USED, _DELTA_EXPERT_WIDTH, _DELTA_SHARED_WIDTH),
    "plain": without_dense_layers,
}
