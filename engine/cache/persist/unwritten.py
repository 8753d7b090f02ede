"""The cached blocks that no file holds yet, in the order in which they became full.

The engine's thread offers blocks and withdraws those that it evicts; the writer's takes one after the other and copies it from
the pages as it lies there. A block is never held for that: if it was withdrawn while it was copied, the copy is worth nothing.
So nothing here makes the engine wait, and there are never more entries than blocks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from windlass.engine.cache.persist.keys import BlockKey, PassageRecord


@dataclass(frozen=True, slots=True)
class UnwrittenBlock:
    """block: where it lies. index: blocks before it in its text."""

    key: BlockKey
    block: int
    index: int
    passage: PassageRecord | None = None


class UnwrittenBlocks:
    """num_lost: blocks that were evicted before they were written."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockKey, UnwrittenBlock] = OrderedDict()
        self._copied: BlockKey | None = None
        self._changed = threading.Condition()
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def offer(self, item: UnwrittenBlock) -> None:
        with self._changed:
            if item.key not in self._blocks or item.passage is not None:
                self._blocks[item.key] = item
                self._changed.notify()

    def withdraw(self, key: BlockKey) -> None:
        """The block is about to be overwritten."""
        with self._changed:
            if self._blocks.pop(key, None) is not None:
                self.num_lost += 1
            if self._copied == key:
                self._copied = None

    def take(self, seconds: float) -> UnwrittenBlock | None:
        """The next one, to be copied now; None where none comes within so many seconds."""
        with self._changed:
            deadline = time.monotonic() + seconds
            while not self._blocks:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            key, item = self._blocks.popitem(last=False)
            self._copied = key
            return item

    def put_back(self, item: UnwrittenBlock) -> None:
        """It could not be written, and comes first again, unless it is gone."""
        with self._changed:
            if self._copied == item.key and item.key not in self._blocks:
                self._blocks[item.key] = item
                self._blocks.move_to_end(item.key, last=False)
            self._copied = None

    def is_copied(self, item: UnwrittenBlock) -> bool:
        """Whether the block lay there as it is until now."""
        with self._changed:
            if self._copied == item.key:
                return True
            self.num_lost += 1
            return False

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify_all()
