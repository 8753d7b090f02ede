"""Rows of blocks in memory that a device copies to and from by itself, in pieces: one of many gigabytes nobody gives at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.engine.cache.persist.rows import runs
from windlass.kernels import Copies

_PIECE = 1 << 30  # bytes: what is pinned is rounded up to a power of two


class HostRows:
    """num_rows of num_words each. Raises what torch raises where there is no memory."""

    def __init__(self, copies: Copies, num_rows: int, num_words: int, dtype: torch.dtype) -> None:
        self._each = max(1, min(num_rows, _PIECE // (num_words * dtype.itemsize)))
        counts = [min(self._each, num_rows - first) for first in range(0, num_rows, self._each)]
        self._pieces = [copies.host_memory((count, num_words), dtype) for count in counts]

    def row(self, number: int) -> Tensor:
        """[words]."""
        return self._pieces[number // self._each][number % self._each]

    def receive(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy rows [N, words] of a device here. Nobody waits."""
        for piece, first, index, end in self._spans(numbers):
            piece[first : first + end - index].copy_(rows[index:end], non_blocking=True)

    def send(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy these to rows [N, words] of a device. Nobody waits."""
        if not rows.is_contiguous():  # torch would wait
            for number, row in zip(numbers, rows, strict=True):
                row.copy_(self.row(number), non_blocking=True)
            return
        for piece, first, index, end in self._spans(numbers):
            rows[index:end].copy_(piece[first : first + end - index], non_blocking=True)

    def _spans(self, numbers: Sequence[int]) -> list[tuple[Tensor, int, int, int]]:
        """What lies side by side: piece, its first row, first entry and end of `numbers`."""
        found = []
        for index, end in runs(numbers):
            while index < end:
                piece, first = divmod(numbers[index], self._each)
                count = min(end - index, self._each - first)
                found.append((self._pieces[piece], first, index, index + count))
                index += count
        return found
