"""Key rotator: re-rotates the cached keys of every layer of a KV group by the angles of its rotary group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.rotary_tables import rerotation_angles
from windlass.kernels import Backend, is_out_of_memory

_MAX_TOKENS_AT_ONCE = 4096  # limits the memory of their angles


class KeyRotator:
    """Applies re-rotations to the KV cache of one model."""

    def __init__(self, spec: ModelSpec, cache: KVCache, block_size: int, backend: Backend) -> None:
        self._layers = [
            [(layer, spec.attention[layer].rotary_group) for layer in group.layers] for group in spec.kv_groups
        ]
        self._cache, self._block_size, self._backend = cache, block_size, backend

    def apply_all(self, rerotations: Iterable[KeyRerotation]) -> frozenset[int]:
        """Apply re-rotations in order, and return the sequences for which there was not even memory for one block.

        The contents of their target blocks must not be read. Raises torch's error if the re-rotation has no sequence id.
        """
        failed: set[int] = set()
        for rerotation in rerotations:
            seq_id = rerotation.seq_id
            if seq_id in failed:
                continue
            try:
                self.apply(rerotation)
            except RuntimeError as error:
                if seq_id is None or not is_out_of_memory(error):
                    raise
                failed.add(seq_id)
        return frozenset(failed)

    def apply(self, rerotation: KeyRerotation) -> None:
        """Re-rotate each key of one span once; keys whose frequencies do not change are copied bit for bit."""
        for start in range(rerotation.start, rerotation.end, _MAX_TOKENS_AT_ONCE):
            self._apply(rerotation, start, min(start + _MAX_TOKENS_AT_ONCE, rerotation.end))

    def _apply(self, rerotation: KeyRerotation, start: int, end: int) -> None:
        """Re-rotate tokens start .. end - 1, in halves if the device has no memory for all at once."""
        try:
            self._apply_at_once(rerotation, start, end)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error) or end - start <= self._block_size:
                raise
        # No key is re-rotated in place, so those already done can be done again.
        middle = (start + end) // 2
        self._apply(rerotation, start, middle)
        self._apply(rerotation, middle, end)

    def _apply_at_once(self, rerotation: KeyRerotation, start: int, end: int) -> None:
        size = self._block_size
        tokens = np.arange(start, end)
        column = tokens // size - rerotation.start // size
        sources, targets = np.array(rerotation.sources)[column], np.array(rerotation.targets)[column]
        present = sources >= 0
        tokens, sources, targets = tokens[present], sources[present], targets[present]
        if not tokens.size:
            return
        source_slots = self._tensor(sources * size + tokens % size)
        target_slots = self._tensor(targets * size + tokens % size)
        positions = self._tensor(tokens - rerotation.start + rerotation.first_position)
        angles: dict[int | None, tuple[Tensor, Tensor]] = {}
        for layer, group in self._layers[rerotation.group]:
            if group not in angles:
                angles[group] = self._angles(rerotation, group, positions)
            self._backend.rerotate_cached_keys(
                self._cache.pages(layer), source_slots, target_slots, *angles[group], values=rerotation.values
            )

    def _angles(self, rerotation: KeyRerotation, group: int | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        if group is None or rerotation.from_specs[group].inv_freq == rerotation.to_specs[group].inv_freq:
            return rerotation_angles(self._backend, (), (), positions)  # nothing rotates: a plain copy
        old, new = rerotation.from_specs[group].inv_freq, rerotation.to_specs[group].inv_freq
        return rerotation_angles(self._backend, old, new, positions)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._backend.device)
