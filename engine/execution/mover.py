"""Executes key moves: turns the cached keys of every layer of a KV group, by the angles of its rotary group.

Knows nothing of who holds the blocks or why keys move.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from windlass.engine.cache.storage import KVStorage
from windlass.engine.model.spec import ModelSpec
from windlass.engine.rotary.scaling import RotarySpec
from windlass.engine.rotary.tables import rerotation_angles
from windlass.engine.scheduling.plan import KeyMove
from windlass.kernels import Backend

_SLICE = 4096  # tokens turned at once, which bounds the memory of their angles


class KeyMover:
    """Key moves on the pages of one model."""

    def __init__(self, spec: ModelSpec, cache: KVStorage, block_size: int, backend: Backend) -> None:
        self._layers = [
            [(layer, spec.layers[layer].attention.rotary_group) for layer in group.layers] for group in spec.kv_groups
        ]
        self._cache = cache
        self._block_size = block_size
        self._backend = backend

    def apply(self, move: KeyMove) -> None:
        """Turn the keys of one move by one rotation each; keys whose frequencies do not change are copied bit by bit."""
        for start in range(move.start, move.end, _SLICE):
            self._apply(move, start, min(start + _SLICE, move.end))

    def _apply(self, move: KeyMove, start: int, end: int) -> None:
        size = self._block_size
        tokens = np.arange(start, end)
        column = tokens // size - move.start // size
        sources, targets = np.array(move.sources)[column], np.array(move.targets)[column]
        there = sources >= 0
        tokens, sources, targets = tokens[there], sources[there], targets[there]
        if not tokens.size:
            return
        source_slots = self._tensor(sources * size + tokens % size)
        target_slots = self._tensor(targets * size + tokens % size)
        positions = self._tensor(tokens + move.first_position)
        angles: dict[int | None, tuple[Tensor, Tensor]] = {}
        for layer, group in self._layers[move.group]:
            if group not in angles:
                angles[group] = self._angles(move, group, positions)
            pages = self._cache.pages(layer)
            self._backend.rerotate_cached_keys(pages, source_slots, target_slots, *angles[group], values=move.values)

    def _angles(self, move: KeyMove, group: int | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        old: tuple[float, ...] = ()
        new: tuple[float, ...] = ()
        if group is not None:
            source: RotarySpec = move.from_specs[group]
            old, new = source.inv_freq, move.to_specs[group].inv_freq
        if old == new:
            old = new = ()  # no pair turns: a plain copy
        return rerotation_angles(self._backend, old, new, positions)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._backend.device)
