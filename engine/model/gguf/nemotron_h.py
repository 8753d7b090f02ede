"""What a GGUF file says of Nemotron H and Nemotron 3, in the names of config.json. It opens no file.

A layer attends where it has heads of keys, is a feed-forward where that has a width, and else carries a state. None rotates,
although files have the keys of a rotation and rows in its order. All feed-forwards of `nemotron_h_moe` are experts. There a block
behind the layers may predict further tokens, which attends and has experts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.nemotron_h import EXPERTS, FEED_FORWARD, STATE_SPACE
from windlass.engine.model.gguf.carried_states import (
    KV_HEADS,
    SIZE_KEYS,
    attending,
    read_sizes,
    some_bias,
    without_zeros,
)
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.rope import Factors
from windlass.engine.model.gguf.tensor_names import PlacedTensor
from windlass.engine.rotary.fields import shown
from windlass.engine.rotary.scaling import FULL_ATTENTION

_WIDTH = "feed_forward_length"
_COUNT, _USED, _GATING = "expert_count", "expert_used_count", "expert_gating_func"
_EXPERT_WIDTH, _SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_NORMED, _SCALE = "expert_weights_norm", "expert_weights_scale"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_LATENT = "moe_latent_size"
_SIGMOID = 2  # llama.cpp's number, and what it takes where a file has none


def _with_both(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend and have a feed-forward."""
    return without_zeros(attending(_of_layers(keys, count), count), _WIDTH, count)


def _of_layers(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys without what is said of blocks behind the layers."""
    further = keys.count("nextn_predict_layers")
    lists = {name: value for name in (KV_HEADS, _WIDTH) if isinstance(value := keys.raw(name), list)}
    return keys.replaced({name: value[:count] for name, value in lists.items() if len(value) == count + further})


def _nemotron_h(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _parts(keys, config, FEED_FORWARD)


def _of_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    scores, groups = keys.raw(_GATING), keys.count(_GROUPS) or 1
    if scores not in (None, _SIGMOID):
        raise LoadError(f"{keys.key(_GATING)} is {shown(scores)}: these experts are chosen by sigmoids ({_SIGMOID})")
    if latent := keys.count(_LATENT):
        raise LoadError(
            f"{keys.key(_LATENT)} is {latent}: experts that see less than the model's width (Nemotron 3 Super and Ultra) are not "
            "supported"
        )
    normed = keys.raw(_NORMED)
    return {
        **_parts(keys, config, EXPERTS),
        "n_routed_experts": keys.size(_COUNT),
        "num_experts_per_tok": keys.size(_USED),
        "moe_intermediate_size": keys.size(_EXPERT_WIDTH),
        "moe_shared_expert_intermediate_size": keys.size(_SHARED_WIDTH),
        "norm_topk_prob": False if normed is None else normed,
        "routed_scaling_factor": keys.number(_SCALE) or 1.0,
        "n_group": groups,
        "topk_group": keys.size(_USED_GROUPS, 1 if groups == 1 else None),
    }


def _parts(keys: ArchitectureKeys, config: Mapping[str, Any], feed_forward: str) -> dict[str, Any]:
    """The kinds of layers, and sizes of states. feed_forward: what those are called that have a width."""
    sizes = read_sizes(keys)
    return {
        "layer_types": _kinds(keys, config["num_hidden_layers"], feed_forward),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_dim,
        "conv_kernel": sizes.width,
    }


def _kinds(keys: ArchitectureKeys, count: int, feed_forward: str) -> list[str]:
    keys = _of_layers(keys, count)
    values = [keys.raw(name) for name in (KV_HEADS, _WIDTH)]
    of_layers = zip(*(one if isinstance(one, list) else [one] * count for one in values), strict=True)
    found = []
    for index, (heads, width) in enumerate(of_layers):
        if heads and width:
            raise LoadError(
                f"layer {index} has {keys.key(KV_HEADS)} and {keys.key(_WIDTH)}, and layers of this architecture are one part "
                "each: get another conversion"
            )
        found.append(FULL_ATTENTION if heads else feed_forward if width else STATE_SPACE)
    return found


def _biases(tensors: Mapping[str, PlacedTensor]) -> dict[str, Any]:
    return {
        "mlp_bias": some_bias(tensors, "ffn_up"),
        "use_bias": some_bias(tensors, "ssm_in"),
        "use_conv_bias": some_bias(tensors, "ssm_conv1d"),
    }


def _none(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    return {}


# Fields of `Architecture`.
PARTS: dict[str, Any] = {
    "more": _nemotron_h,
    "reads": SIZE_KEYS,
    "told_by": _biases,
    "rotation": _none,
    "plain": _with_both,
}
PARTS_OF_EXPERTS: dict[str, Any] = PARTS | {
    "more": _of_experts,
    "reads": (
        *SIZE_KEYS,
        *(_COUNT, _USED, _GATING, _EXPERT_WIDTH, _SHARED_WIDTH, _NORMED, _SCALE, _GROUPS, _USED_GROUPS),
        "expert_shared_count",  # how many make the width that is told
    ),
}
