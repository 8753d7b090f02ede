"""Rank group: the processes that each hold a shard of one model, and the shared memory through which they exchange tensors."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from itertools import accumulate

HEADER_BYTES = 4096  # the same as in cpu/src/collectives.h

SLOT_BYTES = 256 << 10  # per exchange; two slots of each rank stay in a core's cache

MOST_RANKS = 32

_LINE_BYTES = 64


class RankEndedError(RuntimeError):
    """Another rank of the model has ended, so collectives are no longer possible."""


def shared_memory_bytes(ranks: int) -> int:
    """Size of the memory file for this number of ranks."""
    return HEADER_BYTES + 2 * ranks * SLOT_BYTES


class RankGroup:
    """The rank group as seen by one rank. fault: why collectives no longer work, or None.

    number: descriptor of a memory file of `shared_memory_bytes`, initially zeros. rank: of this process, below `count`.
    columns: columns of the model's logits that each rank computes. store: descriptor of an empty file for exchanging
    addresses, if the ranks do not use shared memory; -1: none.
    """

    def __init__(self, number: int, rank: int, count: int, columns: tuple[int, ...], store: int = -1) -> None:
        if not 0 <= rank < count <= MOST_RANKS or len(columns) != count:
            raise ValueError(f"rank {rank} of {count}, of at most {MOST_RANKS}, with columns of {len(columns)}")
        self.rank, self.count, self.store = rank, count, store
        self.bounds = (0, *accumulate(columns))
        self.fault: str | None = None
        self._on_end: Callable[[], object] | None = None
        self._map = mmap.mmap(os.dup(number), shared_memory_bytes(count))
        self._first = ctypes.c_char.from_buffer(self._map)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._first)

    def end(self, reason: str) -> None:
        """Make every rank fail that waits for others, now or later. Any thread may call it."""
        first, self.fault = self.fault is None, self.fault or reason
        self._map[self.count * _LINE_BYTES] = 1
        if first and self._on_end is not None:
            self._on_end()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Register a function for the thread that calls `end`, to stop other kinds of waiting."""
        self._on_end = callback
        if self.fault is not None:
            callback()
