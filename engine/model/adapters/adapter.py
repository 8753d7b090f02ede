"""Adapters in memory: which are loaded, and which rows of a step they change. Knows no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from windlass.engine.api.adapters import AdapterInfo
from windlass.engine.errors import RequestError
from windlass.kernels import Backend, LowRank


@dataclass(frozen=True, slots=True)
class Adapter:
    """layers: for every layer of the model its changed weights, by the names that `LayerSpec.weights` gives them."""

    info: AdapterInfo
    layers: tuple[Mapping[str, LowRank], ...]


@dataclass(frozen=True, slots=True)
class LayerChanges:
    """What one layer's products change by in a step. rows: None for all of them."""

    backend: Backend
    changes: tuple[tuple[Mapping[str, LowRank], Tensor | None], ...]

    def add(self, name: str, out: Tensor, x: Tensor) -> None:
        """Add to `out` [T, N], the product of x [T, K] and the weight of this name, what the rows' adapters change."""
        for weights, rows in self.changes:
            change = weights.get(name)
            if change is not None:
                self.backend.add_low_rank(out, x, change, rows)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have adapters, by adapter. rows: [n] int64, None for all rows."""

    segments: tuple[tuple[Adapter, Tensor | None], ...]

    def of_layer(self, index: int, backend: Backend) -> LayerChanges:
        return LayerChanges(backend, tuple((adapter.layers[index], rows) for adapter, rows in self.segments))


class LoadedAdapters:
    """Those that requests may use, by id. most: that may be loaded at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_id: dict[int, Adapter] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._by_id

    @property
    def num_bytes(self) -> int:
        return sum(adapter.info.num_bytes for adapter in self._by_id.values())

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(adapter.info for adapter in self._by_id.values())

    def add(self, adapter: Adapter) -> None:
        """Let requests use it. Raises RequestError where there are too many."""
        self.check_room()
        self._by_id[adapter.info.adapter_id] = adapter

    def check_room(self) -> None:
        """Raises RequestError where one more would be too many."""
        if len(self._by_id) >= self.most:
            raise RequestError(
                f"{len(self._by_id)} adapters are loaded, as many as `adapters.max_loaded` allows: unload one first",
                "lora_name",
                "too_many_adapters",
            )

    def drop(self, adapter_id: int) -> None:
        """Forget one; unknown ids are ignored."""
        self._by_id.pop(adapter_id, None)

    def rows(self, ids: Iterable[tuple[int | None, Tensor | None]]) -> AdapterRows:
        """ids: adapters of a step with their rows; every id is loaded."""
        return AdapterRows(tuple((self._by_id[i], rows) for i, rows in ids if i is not None))
