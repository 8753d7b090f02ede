"""LoRA adapters (2106.09685) in memory: the loaded ones, and the adapter of each row of a step. Reads no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.errors import RequestError
from windlass.engine.interface.model_info import AdapterInfo
from windlass.kernels import AdapterSlots, Backend, LowRankTable, LowRankTarget, LowRankUpdate

PartTables = Mapping[str, LowRankTable]  # by name of the matrix in `ModelSpec.adapted_parts`


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. parts: for each of `ModelSpec.adapted_parts`, its changes by name of the matrix."""

    info: AdapterInfo
    parts: tuple[Mapping[str, LowRankUpdate], ...]


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """Adapters of a step for one layer, or for the matrices outside the layers. prefix: added to the names given to
    `add`."""

    backend: Backend
    tables: PartTables
    rows: AdapterSlots
    prefix: str = ""

    def add(self, name: str, out: Tensor, x: Tensor) -> None:
        """Add the low-rank product of x [T, K] with each row's adapter to `out` [T, N], the product of x and weight
        `name`."""
        self.backend.add_low_rank(out, x, self.tables[self.prefix + name], self.rows)

    def with_prefix(self, prefix: str) -> LayerLoRA:
        """For a part of the layer that omits this prefix from its weights' names."""
        return replace(self, prefix=self.prefix + prefix)


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """Adapters of a step. parts: tables of every layer, then of the matrices outside; they exist as long as the engine."""

    parts: Sequence[PartTables]
    rows: AdapterSlots

    @property
    def slots(self) -> Tensor:
        """[T] int64, -1: no adapter."""
        return self.rows.slots

    def with_slots(self, slots: Tensor) -> BatchAdapters:
        return BatchAdapters(self.parts, AdapterSlots(slots))

    def at(self, rows: Tensor) -> BatchAdapters:
        """For the given rows [n] int64 only."""
        return BatchAdapters(self.parts, self.rows.at(rows))

    def for_layer(self, index: int, backend: Backend) -> LayerLoRA:
        return LayerLoRA(backend, self.parts[index], self.rows)

    def for_outer_weights(self, backend: Backend) -> LayerLoRA:
        return LayerLoRA(backend, self.parts[-1], self.rows)


class LoadedAdapters:
    """Adapters that requests may use, by id, each in a slot of the tables."""

    def __init__(self, max_loaded: int, matrices: Iterable[Mapping[str, LowRankTarget]], backend: Backend) -> None:
        """matrices: for each part of the model, the matrices that may change, by name."""
        self.max_loaded = max_loaded
        self._slots: dict[int | None, int] = {None: -1}
        self._infos: dict[int, AdapterInfo] = {}
        self._parts = tuple(
            {name: backend.low_rank_table(max_loaded, matrix) for name, matrix in part.items()} for part in matrices
        )

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._infos

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self._infos.values())

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._infos.values())

    def digest_of(self, adapter_id: int) -> str:
        """Digest of the adapter's weights."""
        return self._infos[adapter_id].digest

    def add(self, adapter: Adapter) -> None:
        """Make an adapter available between two steps, replacing one with the same id. Raises RequestError if there are
        too many."""
        self.drop(adapter.info.adapter_id)
        self.check_capacity()
        slot = min(set(range(self.max_loaded)).difference(self._slots.values()))
        for tables, changes in zip(self._parts, adapter.parts, strict=True):
            for name, change in changes.items():
                tables[name].put(slot, change)
        self._slots[adapter.info.adapter_id] = slot
        self._infos[adapter.info.adapter_id] = adapter.info

    def check_capacity(self) -> None:
        """Raise RequestError if no more adapters can be loaded."""
        if len(self._infos) >= self.max_loaded:
            raise RequestError(
                f"{len(self._infos)} adapters are loaded, as many as `adapters.max_loaded` allows: unload one first",
                "lora_name",
                "too_many_adapters",
            )

    def drop(self, adapter_id: int) -> None:
        """Unload an adapter between two steps; unknown ids are ignored."""
        if self._infos.pop(adapter_id, None) is not None:
            slot = self._slots.pop(adapter_id)
            for tables in self._parts:
                for table in tables.values():
                    table.put(slot, None)

    def slots_of(self, ids: Iterable[int | None], counts: Sequence[int]) -> NDArray[np.int64]:
        """Slots [T] of the rows of a step, -1 for none. ids: of loaded adapters or None, each for counts[i] consecutive
        rows."""
        return np.repeat(np.array([self._slots[i] for i in ids], dtype=np.int64), counts)

    def rows(self, ids: Iterable[int | None], counts: Sequence[int], out: Tensor | None = None) -> BatchAdapters | None:
        """The same as the adapters of a step; None if no row has one. out: [T] int64 on the host, filled in place."""
        if not self._infos:
            return None
        slots = self.slots_of(ids, counts)
        if slots.max() < 0:
            return None
        tensor = torch.from_numpy(slots)
        return self.with_slots(tensor if out is None else out.copy_(tensor))

    def with_slots(self, slots: Tensor) -> BatchAdapters:
        """Adapters of a step whose rows have these slots, [T] int64."""
        return BatchAdapters(self._parts, AdapterSlots(slots))
