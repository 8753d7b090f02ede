"""Fills the rows of a decode step with numpy and whatever forms angles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.step_rows import BufferFiller, PersistentBuffers

Angles = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def buffer_filler(
    rows: PersistentBuffers, q_scale: Tensor, score_scale: Tensor, block_size: int, angles: Angles
) -> BufferFiller:
    """See `Backend.buffer_filler`. angles: cosines and sines of rotary rows [B] at positions [B]."""
    place = np.arange(rows.metadata.shape[1])
    positions = torch.from_numpy(rows.positions)

    def fill(tables: NDArray[np.int32], blocks: int) -> None:
        _, index, first, rotary, table = rows.metadata
        np.add(index, first, out=rows.positions)
        np.add(index, 1, out=rows.lengths)
        rows.tables[:, :, :blocks] = tables[:, table, :blocks]
        block, offset = np.divmod(index, block_size)
        np.multiply(rows.tables[:, place, block], np.int64(block_size), out=rows.slots)
        if rows.slots.min() < 0:
            raise IndexError("a scheduled token has no block to go to")
        rows.slots[...] += offset
        ids = torch.from_numpy(rotary)
        for target, found in zip((rows.cos, rows.sin), angles(ids, positions), strict=True):
            target.numpy()[...] = found.numpy()
        rows.q_scale.numpy()[...] = q_scale.index_select(1, ids).numpy()
        rows.score_scale.numpy()[...] = score_scale.index_select(0, ids).numpy()

    return fill
