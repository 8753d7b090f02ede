"""The rows of a decode step as a backend fills them in: the same memory step after step, of which little changes.

Responsible for the shapes. It knows tensors and tables of blocks; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Takes the tables of all sequences, int32 [K, R, columns], and how many columns matter; fills everything but `metadata`.
# Raises IndexError where a row has no block or no rotary row.
BufferFiller: TypeAlias = Callable[[NDArray[np.int32], int], None]


class MultiStepInputs(NamedTuple):
    """What the rows of a step need to go on by themselves. blocks: columns of `tables` that all of their tokens lie in."""

    fill: BufferFiller
    tables: NDArray[np.int32]
    blocks: int


@dataclass(frozen=True, slots=True)
class PersistentBuffers:
    """B rows, each the next token of a sequence. Everything is contiguous and lies in host memory.

    said: [5, B] int64, what the caller writes: of each row its token, its slot's number in its sequence, the position of that
    sequence's first slot, its rotary row, and its row of the tables. The others follow: positions, lengths: [B] int64.
    slots: [K, B] int64. tables: [K, B, width] int32, of which columns past a sequence's blocks mean nothing. cos, sin:
    [G, B, d/2] float32, q_scale: [G, B] float32, score_scale: [B] float32.
    """

    metadata: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]
    cos: Tensor
    sin: Tensor
    q_scale: Tensor
    score_scale: Tensor

    @classmethod
    def zeros(cls, groups: int, rows: int, width: int, rotary_groups: int, half: int) -> PersistentBuffers:
        """For K `groups`, B `rows` and tables of `width` columns, which begin as -1."""
        positions, lengths = np.zeros((2, rows), dtype=np.int64)
        tables = np.full((groups, rows, width), -1, dtype=np.int32)
        cos, sin = (torch.from_numpy(np.zeros((rotary_groups, rows, half), dtype=np.float32)) for _ in range(2))
        scale = torch.from_numpy(np.ones((rotary_groups, rows), dtype=np.float32))
        metadata, slots = np.zeros((5, rows), dtype=np.int64), np.zeros((groups, rows), dtype=np.int64)
        score_scale = torch.from_numpy(np.ones(rows, dtype=np.float32))
        return cls(metadata, positions, lengths, slots, tables, cos, sin, scale, score_scale)
