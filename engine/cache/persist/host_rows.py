"""Rows of blocks in memory that a device copies to and from by itself, in pieces: one of many gigabytes nobody gives at once.

What is pinned is rounded up to a power of two. So a piece has the rows that one of these has room for, and smaller ones have the
rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from windlass.engine.cache.persist.rows import consecutive_runs
from windlass.kernels import Copies

_PIECE = 1 << 30  # bytes


def pinned_rows_within(num_bytes: int, row_bytes: Sequence[int]) -> int:
    """As many rows of each of these sizes as can be pinned without more bytes than these."""
    count = num_bytes // sum(row_bytes)
    while (
        count and sum(pieces * size for each in row_bytes for pieces, _, size in _piece_sizes(count, each)) > num_bytes
    ):
        count -= 1
    return count


def _piece_sizes(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(pieces, rows in each, bytes that each takes), the largest first."""
    size = max(_PIECE, 1 << (row_bytes - 1).bit_length())
    while num_rows:
        each = size // row_bytes
        count, num_rows = divmod(num_rows, each)
        if count:
            yield count, each, size
        size //= 2


class PinnedRows:
    """num_rows of num_words each. Raises what torch raises where there is no memory."""

    def __init__(self, copies: Copies, num_rows: int, num_words: int, dtype: torch.dtype) -> None:
        counts = [each for pieces, each, _ in _piece_sizes(num_rows, num_words * dtype.itemsize) for _ in range(pieces)]
        self._pieces = [copies.host_memory((count, num_words), dtype) for count in counts]
        self._firsts = [0, *accumulate(counts)]  # of each piece its first row

    def row(self, number: int) -> Tensor:
        """[words]."""
        piece, first = self._locate(number)
        return piece[first]

    def _locate(self, number: int) -> tuple[Tensor, int]:
        """A piece, and the row in it."""
        piece = bisect_right(self._firsts, number) - 1
        return self._pieces[piece], number - self._firsts[piece]

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
        for index, end in consecutive_runs(numbers):
            while index < end:
                piece, first = self._locate(numbers[index])
                count = min(end - index, len(piece) - first)
                found.append((piece, first, index, index + count))
                index += count
        return found
