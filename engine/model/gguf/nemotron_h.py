"""What a GGUF file says of Nemotron H and Nemotron 3, in the names of config.json. It opens no file.

A layer attends where it has heads of keys, is a feed-forward where that has a width, and else carries a state. None rotates,
although files have the keys of a rotation and rows in its order. All feed-forwards of `nemotron_h_moe` are experts. There a block
behind the layers may predict further tokens, which attends and has experts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.granite4 import STATE_SPACE
from windlass.engine.model.families.nemotron_h import EXPERTS, FEED_FORWARD
from windlass.engine.model.gguf.carried_states import (
    KV_HEADS,
    SIZE_KEYS,
    any_layer_has_bias,
    attention_layers_only,
    drop_zero_layers,
    read_recurrent_sizes,
)
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.rope import Factors
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION

_FEED_FORWARD_WIDTH = "feed_forward_length"
_NEMOTRON_H_COUNT, _NEMOTRON_H_USED, _GATING = "expert_count", "expert_used_count", "expert_gating_func"
_NEMOTRON_H_EXPERT_WIDTH, _NEMOTRON_H_SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_NORMED, _SCALE = "expert_weights_norm", "expert_weights_scale"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_LATENT = "moe_latent_size"
_NEMOTRON_H_SIGMOID = 2  # llama.cpp's number, and what it takes where a file has none


def _with_both(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend and have a feed-forward."""
    return drop_zero_layers(attention_layers_only(_of_layers(keys, count), count), _FEED_FORWARD_WIDTH, count)


def _of_layers(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys without what is said of blocks behind the layers."""
    further = keys.count("nextn_predict_layers")
    lists = {name: value for name in (KV_HEADS, _FEED_FORWARD_WIDTH) if isinstance(value := keys.raw(name), list)}
    return keys.replaced({name: value[:count] for name, value in lists.items() if len(value) == count + further})


def _nemotron_h(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _nemotron_h_sizes(keys, config, FEED_FORWARD)


def _nemotron_h_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    scores, groups = keys.raw(_GATING), keys.count(_GROUPS) or 1
    if scores not in (None, _NEMOTRON_H_SIGMOID):
        raise LoadError(
            f"{keys.key(_GATING)} is {format_value(scores)}: these experts are chosen by sigmoids ({_NEMOTRON_H_SIGMOID})"
        )
    if latent := keys.count(_LATENT):
        raise LoadError(
            f"{keys.key(_LATENT)} is {latent}: experts that see less than the model's width (Nemotron 3 Super and Ultra) are not "
            "supported"
        )
    normed = keys.raw(_NORMED)
    return {
        **_nemotron_h_sizes(keys, config, EXPERTS),
        "n_routed_experts": keys.size(_NEMOTRON_H_COUNT),
        "num_experts_per_tok": keys.size(_NEMOTRON_H_USED),
        "moe_intermediate_size": keys.size(_NEMOTRON_H_EXPERT_WIDTH),
        "moe_shared_expert_intermediate_size": keys.size(_NEMOTRON_H_SHARED_WIDTH),
        "norm_topk_prob": False if normed is None else normed,
        "routed_scaling_factor": keys.number(_SCALE) or 1.0,
        "n_group": groups,
        "topk_group": keys.size(_USED_GROUPS, 1 if groups == 1 else None),
    }


def _nemotron_h_sizes(keys: ArchitectureKeys, config: Mapping[str, Any], feed_forward: str) -> dict[str, Any]:
    """The kinds of layers, and sizes of states. feed_forward: what those are called that have a width."""
    sizes = read_recurrent_sizes(keys)
    return {
        "layer_types": _nemotron_h_layer_types(keys, config["num_hidden_layers"], feed_forward),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_dim,
        "conv_kernel": sizes.width,
    }


def _nemotron_h_layer_types(keys: ArchitectureKeys, count: int, feed_forward: str) -> list[str]:
    keys = _of_layers(keys, count)
    values = [keys.raw(name) for name in (KV_HEADS, _FEED_FORWARD_WIDTH)]
    of_layers = zip(*(one if isinstance(one, list) else [one] * count for one in values), strict=True)
    found = []
    for index, (heads, width) in enumerate(of_layers):
        if heads and width:
            raise LoadError(
                f"layer {index} has {keys.key(KV_HEADS)} and {keys.key(_FEED_FORWARD_WIDTH)}, and layers of this architecture are one part "
                "each: get another conversion"
            )
        found.append(FULL_ATTENTION if heads else feed_forward if width else STATE_SPACE)
    return found


def _nemotron_h_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "mlp_bias": any_layer_has_bias(tensors, "ffn_up"),
        "use_bias": any_layer_has_bias(tensors, "ssm_in"),
        "use_conv_bias": any_layer_has_bias(tensors, "ssm_conv1d"),
    }


def _no_rotation(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    return {}


# Fields of `Architecture`.
NEMOTRON_H_FIELDS: dict[str, Any] = {
    "more": _nemotron_h,
    "reads": SIZE_KEYS,
    "told_by": _nemotron_h_by_tensors,
    "rotation": _no_rotation,
    "plain": _with_both,
}
NEMOTRON_H_MOE_FIELDS: dict[str, Any] = NEMOTRON_H_FIELDS | {
    "more": _nemotron_h_moe,
    "reads": (
        *SIZE_KEYS,
        *(
            _NEMOTRON_H_COUNT,
            _NEMOTRON_H_USED,
            _GATING,
            _NEMOTRON_H_EXPERT_WIDTH,
            _NEMOTRON_H_SHARED_WIDTH,
            _NORMED,
            _SCALE,
            _GROUPS,
            _USED_GROUPS,
        ),
        "expert_shared_count",  # how many make the width that is told
    ),
}
