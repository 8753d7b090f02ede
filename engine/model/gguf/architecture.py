"""Definition of one GGUF architecture, a value of `general.architecture`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.model.families.family import Family
from windlass.engine.model.gguf.gguf_rope import Factors
from windlass.engine.model.gguf.metadata_keys import ArchitectureKeys
from windlass.engine.model.loading.gguf_index import GGUFLayout
from windlass.engine.model.loading.safetensors_header import TensorLocation


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
