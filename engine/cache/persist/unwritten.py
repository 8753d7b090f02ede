"""The cached blocks that no file holds yet, in the order in which they became full.

The engine's thread offers blocks and withdraws those that it evicts; the writer's takes one after the other and copies it from
the pages as it lies there. A block is never held for that: if it was withdrawn while it was copied, the copy is worth nothing.
So nothing here makes the engine wait, and there are never more entries than blocks in the pages and in the host's memory: it
tells which it has no more. A block whose bytes are on their way into the pages comes once they are there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from windlass.engine.cache.persist.keys import BlockKey, PassageRecord

EVICTED = -1


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """block: where it lies, `EVICTED` where the host's memory has it. index: blocks before it in its text. full_since: at least
    so long, by the monotonic clock."""

    key: BlockKey
    block: int
    index: int
    passage: PassageRecord | None = None
    full_since: float = field(default_factory=time.monotonic)


class WriteQueue:
    """num_lost: blocks that were evicted before they were written."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockKey, QueuedBlock] = OrderedDict()
        self._loading: dict[BlockKey, QueuedBlock] = {}
        self._copying: QueuedBlock | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def offer(self, item: QueuedBlock, *, is_loading: bool = False) -> None:
        """comes: what lies in the block is not it before `finish_loading`."""
        with self._changed:
            if self._closed:
                return
            if is_loading:
                self._loading[item.key] = item
                return
            waiting = self._blocks.get(item.key)
            if waiting is not None and item.passage is None:
                if waiting.block != EVICTED:
                    return
                item = replace(item, passage=waiting.passage)  # it is computed anew, and lies in the pages again
            self._blocks[item.key] = item
            self._changed.notify()

    def finish_loading(self) -> None:
        """All that comes was put into its blocks, or the device was asked to: whoever copies from now on has it."""
        if not self._loading:
            return
        with self._changed:
            loading, self._loading = self._loading, {}
            for item in loading.values():
                self.offer(replace(item, full_since=time.monotonic()))

    def withdraw(self, key: BlockKey, *, in_host_memory: bool) -> None:
        """The block is about to be overwritten. kept: the host's memory has it from then on."""
        with self._changed:
            loading = self._loading.pop(key, None)
            copied = self._copying if self._copying is not None and self._copying.key == key else None
            if copied is not None:
                self._copying = None
            if in_host_memory:
                item = loading or self._blocks.get(key, copied)
                if item is not None:
                    self._blocks[key] = replace(item, block=EVICTED)
            elif (self._blocks.pop(key, None) or loading) is not None:
                self.num_lost += 1

    def host_evicted(self, key: BlockKey) -> None:
        """The host's memory has the block no more."""
        with self._changed:
            item = self._blocks.get(key)
            if item is not None and item.block == EVICTED:
                del self._blocks[key]
                self.num_lost += 1

    def take(self, seconds: float) -> QueuedBlock | None:
        """The next one, to be copied now; None where none comes within so many seconds."""
        with self._changed:
            deadline = time.monotonic() + seconds
            while not self._blocks:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            _, item = self._blocks.popitem(last=False)
            self._copying = item
            return item

    def put_back(self, item: QueuedBlock) -> None:
        """It could not be written, and comes first again, unless it is gone."""
        with self._changed:
            if self._copying is item and item.key not in self._blocks:
                self._blocks[item.key] = item
                self._blocks.move_to_end(item.key, last=False)
            self._copying = None

    def finish_copy(self, item: QueuedBlock) -> bool:
        """Whether the block lay there as it is until now."""
        with self._changed:
            if self._copying is item:
                return True
            self.num_lost += item.key not in self._blocks  # else it waits once more
            return False

    def count_lost(self) -> None:
        """What was taken is nowhere any more."""
        with self._changed:
            self.num_lost += 1

    def close(self) -> None:
        """Nobody will take any of these, nor what is offered from now on."""
        with self._changed:
            self._closed = True
            self._blocks.clear()
            self._loading.clear()

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify_all()
