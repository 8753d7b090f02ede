"""Takes blocks out of the pages and puts them back, as bytes; and holds what was read until its turn has come.

Here are pages of main memory; `device_pages` has those of a device.
Where a draft model keeps pages and states under the same block tables, a block is both models'.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import torch

from windlass.engine.cache.changes import LoadedBlock, SavedBlock
from windlass.engine.cache.persist.block_file import Bytes, PlaneForm
from windlass.engine.cache.storage import KVCache

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
_NAMES[torch.float8_e4m3fn] = "F8_E4M3"


class BlockTransfer(ABC):
    """Pages that blocks are taken from and put back into.

    forms: of a block's planes, per KV group; block_bytes: of all of them. max_staged_bytes: bytes that are held before their turn has
    come. load_budget_streaming, alone: bytes that come into the cache before one step, where streams run and where none do.
    """

    max_staged_bytes = 64 << 20
    load_budget_streaming, load_budget_idle = 8 << 20, 64 << 20

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        self.forms = [[_form(plane) for plane in of_group] for of_group in planes]
        self.block_bytes = bytes_of_blocks(planes)
        self._tickets = itertools.count()

    @abstractmethod
    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        """The bytes of a block as they are: [layers, bytes] for each plane, until the next copy is made.

        full_since: when its last token was computed or about to be, by the monotonic clock.
        """

    @abstractmethod
    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        """Hold what was read; returns the ticket that `put` or `drop` are given, None where `stop` came before there was room."""

    @abstractmethod
    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        """Put what was held into blocks."""

    @abstractmethod
    def drop(self, ticket: int) -> None:
        """Give up what was held."""

    def save(self, saved: Sequence[SavedBlock]) -> None:
        """Copy blocks of a device into the host's memory before they are overwritten."""
        raise RuntimeError("these blocks lie in the host's memory already")


class CPUBlockTransfer(BlockTransfer):
    """Those of main memory. planes: see `planes_of`."""

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        super().__init__(planes)
        self._views = [[_bytes_of(plane) for plane in of_group] for of_group in planes]  # [layers, blocks, bytes] each
        self._staged: dict[int, tuple[Bytes, ...]] = {}

    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        return [view[:, block].copy() for view in self._views[group]]

    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        ticket = next(self._tickets)
        self._staged[ticket] = planes
        return ticket

    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        for one in loaded:
            for view, plane in zip(self._views[one.group], self._staged.pop(one.ticket), strict=True):
                view[:, one.block] = plane

    def drop(self, ticket: int) -> None:
        self._staged.pop(ticket, None)


def bytes_of_blocks(planes: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Of a block, per KV group. planes: see `planes_of`."""
    return [sum(_form(plane).num_bytes for plane in of_group) for of_group in planes]


def planes_of(storages: Sequence[KVCache]) -> list[list[torch.Tensor]]:
    """Of each group all that a block has. storages: of the model and, if there is one, of its draft model, which has one KV
    group, and states only where the model has them too."""
    first, *others = [storage.planes for storage in storages]
    groups = [list(planes) for planes in first]
    for other in others:
        for group, planes in zip(groups, other, strict=False):
            group += planes
    return [[plane for plane in planes if plane.numel()] for planes in groups]


def _form(plane: torch.Tensor) -> PlaneForm:
    layers, _, *shape = plane.shape
    return PlaneForm((layers, *shape), _NAMES[plane.dtype], layers * prod(shape) * plane.dtype.itemsize)


def _bytes_of(plane: torch.Tensor) -> Bytes:
    """[layers, blocks, …] as bytes [layers, blocks, bytes], the same memory."""
    view: Bytes = plane.flatten(2).view(torch.uint8).numpy()
    return view
