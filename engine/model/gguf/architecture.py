"""GGUF architectures: checked access to metadata keys, their definition, and what several of them read: windows and experts.

Model keys begin with the architecture's name ("llama.block_count"); here they are named without it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.loading.gguf_index import GGUFLayout
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

_MOST = 2**31 - 1
T = TypeVar("T")


class ArchitectureKeys:
    """The metadata under one architecture's prefix. A list with one value per layer must have equal values, except in `sizes`."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._prefix = f"{architecture}."
        self._metadata = metadata

    def replaced(self, values: Mapping[str, Any]) -> ArchitectureKeys:
        """A copy with other values of these keys."""
        own = {self.key(name): value for name, value in values.items()}
        return ArchitectureKeys(self._prefix[:-1], {**self._metadata, **own})

    def key(self, name: str) -> str:
        """The key as the file has it."""
        return self._prefix + name

    def names(self) -> Iterator[str]:
        """Every key, without the prefix."""
        return (key.removeprefix(self._prefix) for key in self._metadata if key.startswith(self._prefix))

    def raw(self, name: str) -> Any:
        """The unchecked value; None if the key is absent."""
        return self._metadata.get(self.key(name))

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer, or `default` if the key is absent. Raises LoadError if there is no default either."""
        value = self._single(name)
        return self._positive(name, self._present(name, default if value is None else value))

    def sizes(self, name: str, layers: int) -> list[int]:
        """A positive integer for each layer, from a list or from one that all layers share."""
        value = self.raw(name)
        if not isinstance(value, list):
            return [self.size(name)] * layers
        if len(value) != layers:
            raise LoadError(f"{self.key(name)} has {len(value)} entries for {layers} layers: get another conversion")
        return [self._positive(name, one) for one in value]

    def count(self, name: str) -> int:
        """A non-negative integer; 0 if the key is absent."""
        value = self._single(name)
        return 0 if value is None or (not isinstance(value, bool) and value == 0) else self.size(name)

    def number(self, name: str) -> float | None:
        """A positive, finite number; None if the key is absent or 0."""
        value = self._single(name)
        if value is None or (not isinstance(value, bool) and value == 0):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise LoadError(f"{self.key(name)} must be a positive number, got {format_value(value)}")
        return decimal(float(value))

    def required_number(self, name: str) -> float:
        """A positive, finite number. Raises LoadError if the key is absent."""
        return self._present(name, self.number(name))

    def text(self, name: str) -> str | None:
        """A string, or None."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise LoadError(f"{self.key(name)} must be a string, got {format_value(value)}")
        return value

    def _present(self, name: str, value: T | None) -> T:
        if value is None:
            raise LoadError(f"{self.key(name)} is missing: get another conversion of the model")
        return value

    def _positive(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise LoadError(f"{self.key(name)} must be a positive integer, got {format_value(value)}")
        return value

    def _single(self, name: str) -> Any:
        value = self.raw(name)
        if not isinstance(value, list):
            return value
        if not value or any(one != value[0] for one in value):
            raise LoadError(
                f"{self.key(name)} differs from layer to layer, which is not supported: choose another model"
            )
        return value[0]


def decimal(value: float) -> float:
    """The shortest decimal number that has this value as a float32: 1e-05 for what the file holds as 9.99999974e-06.

    GGUF stores numbers as float32; the models' own configurations have them in decimal.
    """
    try:
        bits = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", bits)[0] != value:
        return value  # not a float32
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == bits:
            return short
    return value


# Contents of the tensors of per-frequency factors, by their names.
Factors: TypeAlias = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    family: the usual family of such models; select_family: another one, of `other_families`, if the metadata identify it.
    layout: differences from a checkpoint, made by llama.cpp's converter or because the family stores rows like that.

    config_keys: keys of config.json that only this architecture has, from the metadata and the config read so far.
    understood_keys: further metadata keys that are read. from_tensors: keys of config.json that follow from tensor names.
    uniform_keys: the metadata, and the number of layers, to metadata in which keys that differ between layers have the value
    of config.json. aliases: tensor names in a layer that mean another name here, if a layer has all of them.

    rope: the rope parameters of full-attention layers, from those that the shared keys give. rope_parameters: those of all
    kinds of layers, used instead.
    """

    family: Family
    layout: GGUFLayout = field(default_factory=GGUFLayout)
    select_family: Callable[[ArchitectureKeys], Family | None] = lambda keys: None
    other_families: tuple[Family, ...] = ()
    config_keys: Callable[[ArchitectureKeys, Mapping[str, Any]], dict[str, Any]] = lambda keys, config: {}
    understood_keys: tuple[str, ...] = ()
    from_tensors: Callable[[Mapping[str, TensorLocation]], dict[str, Any]] = lambda tensors: {}
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope: Callable[[Mapping[str, Any], ArchitectureKeys], dict[str, Any]] = lambda rope, keys: dict(rope)
    rope_parameters: Callable[[ArchitectureKeys, Mapping[str, Any], Factors], dict[str, Any]] | None = None
    uniform_keys: Callable[[ArchitectureKeys, int], ArchitectureKeys] = lambda keys, layers: keys

    @property
    def families(self) -> tuple[Family, ...]:
        """Every family that a model of this architecture may have."""
        return self.family, *self.other_families


WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"


def local_layers(keys: ArchitectureKeys, count: int, interval: int) -> list[str]:
    """Attention type of each layer: from a list of flags, else full attention in every n-th layer."""
    pattern = keys.raw(PATTERN)
    if pattern is None or (isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1):
        local = [(i + 1) % (pattern or interval) != 0 for i in range(count)]
    elif isinstance(pattern, list):
        local = [bool(flag) for flag in pattern]
    else:
        raise LoadError(f"{keys.key(PATTERN)} must be a list of flags or an interval, got {format_value(pattern)}")
    if len(local) < count:
        raise LoadError(f"{keys.key(PATTERN)} has {len(local)} entries for {count} layers: get another conversion")
    return [SLIDING_ATTENTION if one else FULL_ATTENTION for one in local[:count]]


def local_and_global(interval: int) -> Callable[[ArchitectureKeys, Mapping[str, Any]], dict[str, Any]]:
    """A reader of windows: full attention in every n-th layer unless the file lists the layers, or no windows at all."""

    def config_keys(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
        window, count = keys.count(WINDOW), config["num_hidden_layers"]
        kinds = local_layers(keys, count, interval) if window else [FULL_ATTENTION] * count
        return {"sliding_window": window or None, "layer_types": kinds}

    return config_keys


# llama.cpp's keys and numbers for mixtures of experts.
EXPERT_COUNT, EXPERTS_USED, EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
SHARED_WIDTH, DENSE_WIDTH = "expert_shared_feed_forward_length", "feed_forward_length"
DENSE_BLOCKS = "leading_dense_block_count"
EXPERT_KEYS = (EXPERT_COUNT, EXPERTS_USED, EXPERT_WIDTH)
GATING = "expert_gating_func"
SOFTMAX, SIGMOID = 1, 2


def moe_config(
    keys: ArchitectureKeys, *, experts: str = "num_experts", used: str = "num_experts_per_tok"
) -> dict[str, Any]:
    """Number and width of the experts. experts, used: the family's names of the numbers of all and of used experts."""
    return {
        experts: keys.size(EXPERT_COUNT),
        used: keys.size(EXPERTS_USED),
        "moe_intermediate_size": keys.size(EXPERT_WIDTH),
    }


def check_sigmoid_gating(keys: ArchitectureKeys, *unset: int) -> None:
    """Raise LoadError if experts are not chosen by sigmoids. unset: values that mean the same as absence."""
    gating = keys.raw(GATING)
    if gating not in (None, SIGMOID, *unset):
        raise LoadError(
            f"{keys.key(GATING)} is {format_value(gating)}: experts of this architecture are chosen by sigmoids ({SIGMOID})"
        )
