"""What a GGUF file says of Gemma 4, in the names of config.json. It opens no file.

Sizes of layers that see everything stand under the plain keys, those of the others under keys that end in `_swa`, and what
differs from layer to layer is a list. That keys are values is told by tensors which are not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.local_layers import PATTERN, WINDOW, local_layers
from windlass.engine.model.gguf.rope import Factors, read_proportional_rope, required_theta
from windlass.engine.model.gguf.tensor_names import LAYER_TABLE, GGUFTensorLocation
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION

_SHARED, _KV_HEADS, _WIDTH = "attention.shared_kv_layers", "attention.head_count_kv", "feed_forward_length"
_KEY, _VALUE, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
_LOCAL = "_swa"
_LOCAL_THETA = "rope.freq_base_swa"
_INPUT, _CAP = "embedding_length_per_layer_input", "final_logit_softcapping"
_EXPERT_COUNT, _USED, _GEMMA4_EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"

GEMMA4_KEYS = (
    *(WINDOW, PATTERN, _SHARED, _LOCAL_THETA, _INPUT, _CAP, _EXPERT_COUNT, _USED, _GEMMA4_EXPERT_WIDTH),
    *(key + _LOCAL for key in (_KEY, _VALUE, _ROTATED)),
)


def gemma4_local(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers have a window, and keys of their own. count: of layers."""
    return keys.replaced(
        {
            _KEY: keys.size(_KEY + _LOCAL),
            _VALUE: keys.size(_VALUE + _LOCAL),
            _KV_HEADS: _kv_heads(keys, _gemma4_layer_types(keys, count))[SLIDING_ATTENTION],
            _WIDTH: keys.sizes(_WIDTH, count)[0],
        }
    )


def gemma4(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What its layers have besides, and what those that see everything have of their own."""
    count = config["num_hidden_layers"]
    kinds, width, shared = _gemma4_layer_types(keys, count), keys.size(_KEY), keys.count(_SHARED)
    if keys.size(_VALUE, width) != width:
        raise LoadError("has keys and values of different widths, which is not supported: choose another model")
    if shared >= count:
        raise LoadError(f"{keys.key(_SHARED)} is {shared} of {count} layers: none is left whose keys are read")
    experts = keys.count(_EXPERT_COUNT)
    found = {
        "layer_types": kinds,
        "sliding_window": keys.size(WINDOW),
        "global_head_dim": width,
        "num_global_key_value_heads": _kv_heads(keys, kinds)[FULL_ATTENTION],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_doubled(keys, keys.sizes(_WIDTH, count), shared),
        "hidden_size_per_layer_input": keys.count(_INPUT),
        "final_logit_softcapping": keys.number(_CAP),
        "enable_moe_block": experts > 0,
    }
    if experts:
        found |= {
            "num_experts": experts,
            "top_k_experts": keys.size(_USED),
            "moe_intermediate_size": keys.size(_GEMMA4_EXPERT_WIDTH),
        }
    return found


def gemma4_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """Whether keys are values in layers that see everything, and how many tokens have an input of the layers."""
    layer, found = 0, {"attention_k_eq_v": False}
    while f"blk.{layer}.attn_k.weight" in tensors and not found["attention_k_eq_v"]:
        found["attention_k_eq_v"] = f"blk.{layer}.attn_v.weight" not in tensors
        layer += 1
    table = tensors.get(LAYER_TABLE)
    return found if table is None else {**found, "vocab_size_per_layer_input": table.shape[0]}


def gemma4_rotation(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    """That of both kinds of layers."""
    for key, head_dim in ((_ROTATED, config["global_head_dim"]), (_ROTATED + _LOCAL, config["head_dim"])):
        if (rotated := keys.size(key, head_dim)) != head_dim:
            raise LoadError(f"{keys.key(key)} is {rotated}, not the {head_dim} of a head: get another conversion")
    return {
        "rope_parameters": {
            FULL_ATTENTION: read_proportional_rope(keys, factors, config["global_head_dim"]),
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": required_theta(keys, _LOCAL_THETA)},
        }
    }


def _gemma4_layer_types(keys: ArchitectureKeys, count: int) -> list[str]:
    """What each layer sees: the file lists it, and the last one sees everything."""
    pattern = keys.raw(PATTERN)
    if not isinstance(pattern, list):
        raise LoadError(
            f"{keys.key(PATTERN)} must be a list of flags, got {format_value(pattern)}: get another conversion"
        )
    kinds = local_layers(keys, count, 0)
    if kinds[-1] != FULL_ATTENTION:
        raise LoadError(f"{keys.key(PATTERN)} gives the last layer a window, which is not supported")
    return kinds


def _kv_heads(keys: ArchitectureKeys, kinds: Sequence[str]) -> dict[str, int]:
    """Those of each kind of layers; where there are none of a kind, the other's."""
    found: dict[str, int] = {}
    for kind, heads in zip(kinds, keys.sizes(_KV_HEADS, len(kinds)), strict=True):
        if found.setdefault(kind, heads) != heads:
            raise LoadError(f"{keys.key(_KV_HEADS)} differs among layers that see alike: choose another model")
    return {kind: found.get(kind, found[FULL_ATTENTION]) for kind in (SLIDING_ATTENTION, FULL_ATTENTION)}


def _is_doubled(keys: ArchitectureKeys, widths: Sequence[int], shared: int) -> bool:
    """Whether layers that read the keys of earlier ones are twice as wide as those."""
    own, narrow = len(widths) - shared, widths[0]
    if all(width == narrow for width in widths):
        return False
    if list(widths) != [narrow] * own + [2 * narrow] * shared:
        raise LoadError(
            f"{keys.key(_WIDTH)} must be the same for all layers, or twice as much for the last {shared}, which read the keys of "
            "earlier ones: choose another model"
        )
    return True
