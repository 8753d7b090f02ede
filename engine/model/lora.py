"""Low-rank adapters (LoRA, 2106.09685) in memory: the loaded ones, and the rows of a step to which they apply. Reads no files."""

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

PartTables = Mapping[str, LowRankTable]  # by the names that `ModelSpec.adapted_parts` gives the matrices of a part


@dataclass(frozen=True, slots=True)
class Adapter:
    """parts: of each of `ModelSpec.adapted_parts` the changed weights, by the names that it has."""

    info: AdapterInfo
    parts: tuple[Mapping[str, LowRankUpdate], ...]


@dataclass(frozen=True, slots=True)
class LayerLoRA:
    """What products of a layer, or of what lies around layers, change by in a step. prefix: of the names that `add` is given."""

    backend: Backend
    tables: PartTables
    rows: AdapterSlots
    prefix: str = ""

    def add(self, name: str, out: Tensor, x: Tensor) -> None:
        """Add to `out` [T, N], the product of x [T, K] and the weight of this name, what the rows' adapters change."""
        self.backend.add_low_rank(out, x, self.tables[self.prefix + name], self.rows)

    def with_prefix(self, prefix: str) -> LayerLoRA:
        """For a part of the layer that knows its weights without this prefix."""
        return replace(self, prefix=self.prefix + prefix)


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """The adapters of a step. parts: the tables of every layer, then of what lies around them, as long as the engine lives."""

    parts: Sequence[PartTables]
    rows: AdapterSlots

    @property
    def slots(self) -> Tensor:
        """[T] int64, -1 where a row has none."""
        return self.rows.slots

    def with_slots(self, slots: Tensor) -> BatchAdapters:
        return BatchAdapters(self.parts, AdapterSlots(slots))

    def at(self, rows: Tensor) -> BatchAdapters:
        """Of these rows alone. rows: [n] int64."""
        return BatchAdapters(self.parts, self.rows.at(rows))

    def for_layer(self, index: int, backend: Backend) -> LayerLoRA:
        return LayerLoRA(backend, self.parts[index], self.rows)

    def for_outer_weights(self, backend: Backend) -> LayerLoRA:
        return LayerLoRA(backend, self.parts[-1], self.rows)


class LoadedAdapters:
    """Those that requests may use, by id, each in a slot of the tables. most: that may be loaded at once.

    matrices: of every part what may change, by name.
    """

    def __init__(self, most: int, matrices: Iterable[Mapping[str, LowRankTarget]], backend: Backend) -> None:
        self.most = most
        self._slots: dict[int | None, int] = {None: -1}
        self._infos: dict[int, AdapterInfo] = {}
        self._parts = tuple(
            {name: backend.low_rank_table(most, matrix) for name, matrix in part.items()} for part in matrices
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
        """Of all that it adds to the model."""
        return self._infos[adapter_id].digest

    def add(self, adapter: Adapter) -> None:
        """Let requests use it, between two steps, in place of one with its id. Raises RequestError where there are too many."""
        self.drop(adapter.info.adapter_id)
        self.check_capacity()
        slot = min(set(range(self.most)).difference(self._slots.values()))
        for tables, changes in zip(self._parts, adapter.parts, strict=True):
            for name, change in changes.items():
                tables[name].put(slot, change)
        self._slots[adapter.info.adapter_id] = slot
        self._infos[adapter.info.adapter_id] = adapter.info

    def check_capacity(self) -> None:
        """Raises RequestError where one more would be too many."""
        if len(self._infos) >= self.most:
            raise RequestError(
                f"{len(self._infos)} adapters are loaded, as many as `adapters.max_loaded` allows: unload one first",
                "lora_name",
                "too_many_adapters",
            )

    def drop(self, adapter_id: int) -> None:
        """Forget one, between two steps; unknown ids are ignored."""
        if self._infos.pop(adapter_id, None) is not None:
            slot = self._slots.pop(adapter_id)
            for tables in self._parts:
                for table in tables.values():
                    table.put(slot, None)

    def slots_of(self, ids: Iterable[int | None], counts: Sequence[int]) -> NDArray[np.int64]:
        """Of a step that has so many rows of each of these adapters, in order, every id loaded or None: [T], -1 for none."""
        return np.repeat(np.array([self._slots[i] for i in ids], dtype=np.int64), counts)

    def rows(self, ids: Iterable[int | None], counts: Sequence[int], out: Tensor | None = None) -> BatchAdapters | None:
        """Of such a step; None without any. out: [T] int64 on the host, to be filled in."""
        if not self._infos:
            return None
        slots = self.slots_of(ids, counts)
        if slots.max() < 0:
            return None
        found = torch.from_numpy(slots)
        return self.with_slots(found if out is None else out.copy_(found))

    def with_slots(self, slots: Tensor) -> BatchAdapters:
        """Of a step whose rows have these, [T] int64."""
        return BatchAdapters(self._parts, AdapterSlots(slots))
