"""What a GGUF file says of layers that carry a state, where others attend. It opens no file.

Those attend that have heads of keys. llama.cpp has sizes of the others under the keys of Mamba: a group is a head of keys, a time
step's rank the number of heads of values, the inner size that of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation
from windlass.engine.rotary.scaling import FULL_ATTENTION

KV_HEADS = "attention.head_count_kv"
_SSM_CONV, _SSM_STATE, _SSM_GROUPS, _SSM_HEADS, _SSM_INNER = SIZE_KEYS = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """heads: of values, each of head_dim numbers. groups: heads of keys, each of state_dim. width: of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int

    @property
    def values(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim


def read_recurrent_sizes(keys: ArchitectureKeys) -> RecurrentSizes:
    """Raises LoadError where one is missing, or heads do not share the values."""
    heads, inner = keys.size(_SSM_HEADS), keys.size(_SSM_INNER)
    if inner % heads:
        raise LoadError(f"{keys.key(_SSM_INNER)} {inner} is not a multiple of {keys.key(_SSM_HEADS)} {heads}")
    return RecurrentSizes(heads, inner // heads, keys.size(_SSM_GROUPS), keys.size(_SSM_STATE), keys.size(_SSM_CONV))


def attention_layers_only(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend."""
    return drop_zero_layers(keys, KV_HEADS, count)


def drop_zero_layers(keys: ArchitectureKeys, name: str, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers have what this one counts. Raises LoadError unless all `count` layers are told."""
    values = keys.raw(name)
    if not isinstance(values, list):
        return keys
    if len(values) != count:
        raise LoadError(f"{keys.key(name)} has {len(values)} entries for {count} layers: get another conversion")
    return keys.replaced({name: [one for one in values if one != 0] or None})


def layer_types_of(keys: ArchitectureKeys, count: int, other: str) -> list[str]:
    """What `layer_types` says of each layer. other: what those are called that carry a state."""
    heads = keys.raw(KV_HEADS)
    found = [other if one == 0 else FULL_ATTENTION for one in heads] if isinstance(heads, list) else None
    return found or [FULL_ATTENTION] * count


def any_layer_has_bias(tensors: Mapping[str, GGUFTensorLocation], name: str) -> bool:
    """Whether any layer has this bias: the first may be of another kind."""
    return any(one.endswith(f".{name}.bias") for one in tensors)
