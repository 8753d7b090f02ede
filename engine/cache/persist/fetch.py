"""Blocks that somebody waits for, between the engine's thread and the one that reads. Knows neither files nor tensors."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from windlass.engine.cache.persist.keys import BlockKey, PassageRecord


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """index: blocks before it in its text; None for one of a passage, which is of use without those."""

    key: BlockKey
    index: int | None


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    key: BlockKey
    ticket: int
    num_bytes: int
    passage: PassageRecord | None


class FetchReader(Protocol):
    """Whoever reads for a `Fetch`."""

    def release_staged(self, num_bytes: int) -> None:
        """So much of what was read has been taken."""
        ...

    def cancel(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        ...


class Fetch:
    """Blocks that somebody waits for. The engine's thread takes what has arrived, and may cancel the rest at any time.

    keys: of all blocks. num_read: blocks so far. is_done: no more will arrive. num_waiting: how many wait for it. num_loaded: by
    KV group, blocks that have come into the cache.
    """

    def __init__(self, wanted: Sequence[WantedBlock], reader: FetchReader) -> None:
        self.wanted, self._reader = wanted, reader
        self.keys = frozenset(block.key for block in wanted)
        self.num_waiting = 1
        self.arrived: deque[ArrivedBlock] = deque()
        self._num_distinct_blocks = len({block.key.digest if block.index is None else block.index for block in wanted})
        self.num_read = 0
        self.num_loaded: Counter[int] = Counter()
        self.is_done = self.is_cancelled = False
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.idle_seconds = 0.0  # in which it could not read, as the engine had not taken what was there

    @property
    def is_over(self) -> bool:
        """Whether nothing has to be waited for any more."""
        return self.is_cancelled or (self.is_done and not self.arrived)

    def tokens_read(self, block_size: int) -> float:
        """Of text, about: where there are several KV groups, or keys as seen from afar, several blocks hold the same tokens."""
        return self.num_read * block_size * self._num_distinct_blocks / max(1, len(self.wanted))

    def busy_seconds(self, now: float) -> float:
        """Seconds that reading has taken, or that it has waited for others to be read."""
        return now - (self.queued_at if self.started_at is None else self.started_at) - self.idle_seconds

    def take(self) -> ArrivedBlock:
        """The next block that has arrived."""
        block = self.arrived.popleft()
        self._reader.release_staged(block.num_bytes)
        return block

    def leave(self) -> None:
        """One that waits does so no more."""
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.cancel()

    def cancel(self) -> None:
        self._reader.cancel(self)
