"""What a GGUF file says of Granite's models, in the names of config.json. It opens no file.

llama.cpp has three architectures of them: dense, of experts, and hybrids with layers that carry a state, dense or of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.granite4 import STATE_SPACE
from windlass.engine.model.families.softmax_experts import GRANITE_MOE_SHARED
from windlass.engine.model.gguf.carried_states import (
    SIZE_KEYS,
    any_layer_has_bias,
    attention_layers_only,
    layer_types_of,
    read_recurrent_sizes,
)
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation

_COUNT, _USED = "expert_count", "expert_used_count"
_EXPERT_WIDTH, _SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_ROTATES = "rope.scaling.finetuned"  # llama.cpp's switch, of these architectures alone
# Granite 4's files have sizes of layers with states whether or not there are any: tensors of theirs are refused as unknown.
_GRANITE_KEYS = (*_SCALES, _SHARED_WIDTH, *SIZE_KEYS)
_GRANITE_MOE_KEYS = (*_GRANITE_KEYS, _COUNT, _USED, _EXPERT_WIDTH)


def _multipliers(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "logits_scaling": keys.number("logit_scale"),
    }


def _granite(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Granite 4's have a feed-forward under a shared expert's name."""
    width = keys.count(_SHARED_WIDTH) or config["intermediate_size"]
    return {**_multipliers(keys, config), "intermediate_size": width}


def _with_shared_experts(keys: ArchitectureKeys) -> Family | None:
    return GRANITE_MOE_SHARED if keys.count(_SHARED_WIDTH) else None


def _granite_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_multipliers(keys, config),
        "num_local_experts": keys.size(_COUNT),
        "num_experts_per_tok": keys.size(_USED),
        "shared_intermediate_size": keys.count(_SHARED_WIDTH) or None,
    }


def _granite_hybrid(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys carry a state."""
    sizes, hidden = read_recurrent_sizes(keys), config["hidden_size"]
    if sizes.values % hidden:
        raise LoadError(f"layers with a state have {sizes.values} values, which is no multiple of the model's {hidden}")
    of_experts = (
        _granite_moe(keys, config) if keys.count(_COUNT) else {**_multipliers(keys, config), "num_local_experts": 0}
    )
    return {
        **of_experts,
        "intermediate_size": keys.count(_EXPERT_WIDTH) or config["intermediate_size"],
        "shared_intermediate_size": keys.count(_SHARED_WIDTH) or config["intermediate_size"],
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], STATE_SPACE),
        "position_embedding_type": "nope" if keys.raw(_ROTATES) is False else "rope",
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_expand": sizes.values // hidden,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.width,
    }


def _granite_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "attention_bias": any_layer_has_bias(tensors, "attn_q"),
        "mamba_proj_bias": any_layer_has_bias(tensors, "ssm_in"),
        "mamba_conv_bias": any_layer_has_bias(tensors, "ssm_conv1d"),
    }


def _granite_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """All layers attend. Raises LoadError where llama.cpp would rotate none of them."""
    if keys.raw(_ROTATES) is False:
        raise LoadError(
            f"sets {keys.key(_ROTATES)}=false, by which no layer rotates and nothing tells positions apart: that is not "
            "supported, get another conversion"
        )
    return dict(rope)


# Fields of `Architecture`.
GRANITE_FIELDS: dict[str, Any] = {"more": _granite, "reads": _GRANITE_KEYS, "rope": _granite_rope}
GRANITE_MOE_FIELDS: dict[str, Any] = {
    "more": _granite_moe,
    "reads": _GRANITE_MOE_KEYS,
    "choose": _with_shared_experts,
    "rope": _granite_rope,
}
GRANITE_HYBRID_FIELDS: dict[str, Any] = {
    "more": _granite_hybrid,
    "reads": _GRANITE_MOE_KEYS,
    "plain": attention_layers_only,
    "told_by": _granite_by_tensors,
}
