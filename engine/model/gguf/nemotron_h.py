"""What a GGUF file says of Nemotron H, in the names of config.json. It opens no file.

A layer attends where it has heads of keys, is a feed-forward where that has a width, and else carries a state. None rotates,
although files have the keys of a rotation and rows in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.nemotron_h import FEED_FORWARD, STATE_SPACE
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
from windlass.engine.rotary.scaling import FULL_ATTENTION

_WIDTH = "feed_forward_length"


def _with_both(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend and have a feed-forward."""
    return without_zeros(attending(keys, count), _WIDTH, count)


def _nemotron_h(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = read_sizes(keys)
    return {
        "layer_types": _kinds(keys, config["num_hidden_layers"]),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_dim,
        "conv_kernel": sizes.width,
    }


def _kinds(keys: ArchitectureKeys, count: int) -> list[str]:
    values = [keys.raw(name) for name in (KV_HEADS, _WIDTH)]
    of_layers = zip(*(one if isinstance(one, list) else [one] * count for one in values), strict=True)
    found = []
    for index, (heads, width) in enumerate(of_layers):
        if heads and width:
            raise LoadError(
                f"layer {index} has {keys.key(KV_HEADS)} and {keys.key(_WIDTH)}, and layers of this architecture are one part "
                "each: get another conversion"
            )
        found.append(FULL_ATTENTION if heads else FEED_FORWARD if width else STATE_SPACE)
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
