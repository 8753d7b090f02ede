"""Takes blocks out of the pages and puts them back, as bytes; and holds what was read until its turn has come.

Pages of main memory only. Where a draft model keeps pages under the same block tables, a block of the first KV group is both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from windlass.engine.cache.changes import LoadedBlock
from windlass.engine.cache.persist.block_file import Bytes, PlaneForm
from windlass.engine.cache.storage import KVStorage

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}


class PersistedPages:
    """storages: of the model and, if there is one, of its draft model, which has one KV group."""

    def __init__(self, storages: Sequence[KVStorage]) -> None:
        first, *others = [storage.planes for storage in storages]
        groups = [list(planes) for planes in first]
        for planes in others:
            groups[0] += planes[0]
        kept = [[plane for plane in planes if plane.numel()] for planes in groups]
        self.forms = [[_form(plane) for plane in planes] for planes in kept]
        self._views = [[_bytes_of(plane) for plane in planes] for planes in kept]  # [layers, blocks, bytes] each
        self._tickets = itertools.count()
        self._staged: dict[int, tuple[Bytes, ...]] = {}

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block, per KV group."""
        return [sum(form.num_bytes for form in forms) for forms in self.forms]

    def copy_of(self, group: int, block: int) -> list[Bytes]:
        """The bytes of a block as they are: [layers, bytes] for each plane."""
        return [np.ascontiguousarray(view[:, block]) for view in self._views[group]]

    def stage(self, planes: tuple[Bytes, ...]) -> int:
        """Hold what was read; returns the ticket that `put` or `drop` are given."""
        ticket = next(self._tickets)
        self._staged[ticket] = planes
        return ticket

    def put(self, loaded: LoadedBlock) -> None:
        """Put what was held into a block."""
        for view, plane in zip(self._views[loaded.group], self._staged.pop(loaded.ticket), strict=True):
            view[:, loaded.block] = plane

    def drop(self, ticket: int) -> None:
        """Give up what was held."""
        self._staged.pop(ticket, None)


def _form(plane: torch.Tensor) -> PlaneForm:
    layers, _, *shape = plane.shape
    return PlaneForm((layers, *shape), _NAMES[plane.dtype], layers * prod(shape) * plane.dtype.itemsize)


def _bytes_of(plane: torch.Tensor) -> Bytes:
    """[layers, blocks, …] as bytes [layers, blocks, bytes], the same memory."""
    view: Bytes = plane.flatten(2).view(torch.uint8).numpy()
    return view
