"""The books of a device's blocks that are kept in the host's memory: which lies in which place there, and which goes next.

A block comes when the device's cache evicts it. What is copied, and how, others know: here is only whether it has been.
The longest unused goes first; of one text the end, as its end is evicted first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.engine.cache.changes import SavedBlock
from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord
from windlass.engine.cache.persist.known import TierIndex
from windlass.kernels import DeviceEvent

_CANNOT_COPY = "blocks that the cache evicts cannot be copied to the host's memory"
_COPY_SECONDS = 1.0  # that a plan with a copy in it may take to begin


@dataclass(slots=True)
class _HostSlot:
    """mark: behind the copy that fills it; None before that is asked for. num_readers: who copies from it now."""

    slot: int
    mark: DeviceEvent | None = None
    num_readers: int = 0


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block that stays where it is until it is given back. mark: from then on it is there."""

    key: BlockKey
    slot: int
    mark: DeviceEvent
    passage: PassageRecord | None


class HostTier:
    """num_slots: blocks of each KV group that there is room for. The engine's thread tells; any thread may ask.

    block_size: tokens of a block. block_bytes: of each KV group's.
    """

    def __init__(self, num_slots: int, block_bytes: Sequence[int], block_size: int, counts: PersistCounters) -> None:
        self.num_slots, self._block_bytes, self._counts = num_slots, block_bytes, counts
        self.known = TierIndex(block_size)  # for what is found as a passage
        # Called with a lock held: it must not ask back.
        self.on_evicted: Callable[[BlockKey], None] = lambda _: None
        self._entries: list[OrderedDict[bytes, _HostSlot]] = [
            OrderedDict() for _ in block_bytes
        ]  # longest unused first
        self._free = [list(range(num_slots - 1, -1, -1)) for _ in block_bytes]
        self._passages: dict[bytes, PassageRecord] = {}  # of blocks whose first group's is still in the device's cache
        self._pending_saves: list[SavedBlock] = []
        self._loaded: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def __contains__(self, key: BlockKey) -> bool:
        return key.digest in self._entries[key.group]

    @property
    def num_blocks(self) -> int:
        return sum(len(entries) for entries in self._entries)

    @property
    def num_bytes(self) -> int:
        """Of the blocks."""
        return sum(len(entries) * size for entries, size in zip(self._entries, self._block_bytes, strict=True))

    def admit(self, key: BlockKey, block: int, passage: PassageRecord | None) -> bool:
        """A block is evicted, and overwritten by the plan that is being made or a later one. Whether it is kept here.

        passage: what is known of it as a passage.
        """
        with self._changed:
            if key.group and passage is not None:
                self._passages[key.digest] = passage
            elif not key.group:
                kept = self._passages.pop(key.digest, None)
                passage = passage or kept
            entries = self._entries[key.group]
            if key.digest in entries:
                entries.move_to_end(key.digest)
            elif (key.group, block) in self._loaded or (not self._free[key.group] and not self._evict(key.group)):
                self._counts.host_lost += (key.group, block) not in self._loaded
                return False
            else:
                slot = self._free[key.group].pop()
                entries[key.digest] = _HostSlot(slot)
                self._pending_saves.append(SavedBlock(*key, block, slot))
        if not key.group:
            self.known.add(key, 0, passage)
        return True

    def note_loaded(self, group: int, block: int) -> None:
        """A block is brought in by the plan that is being made: should that evict it, what lies there is not it yet."""
        self._loaded.add((group, block))

    def take_pending_saves(self) -> list[SavedBlock]:
        """What a plan has to have copied before anything else, as it has evicted these."""
        pending, self._pending_saves = self._pending_saves, []
        self._loaded.clear()
        return pending

    def copy_started(self, saved: Sequence[SavedBlock], mark: DeviceEvent) -> None:
        """The copies of these are asked for. mark: behind them."""
        with self._changed:
            for one in saved:
                self._entries[one.group][one.digest].mark = mark
                self._counts.host_saved += 1
                self._counts.host_saved_bytes += self._block_bytes[one.group]
            self._counts.succeed(_CANNOT_COPY)
            self._changed.notify_all()

    def copy_failed(self, saved: Sequence[SavedBlock], error: Exception) -> None:
        """These could not be copied, and are gone."""
        self._counts.fail(_CANNOT_COPY, error)
        with self._changed:
            for one in saved:
                self._counts.host_lost += 1
                self._forget(BlockKey(one.group, one.digest))
            self._changed.notify_all()

    def acquire(self, key: BlockKey) -> HostBlock | None:
        """A block, to be given back by `release`; None where it is not here."""
        entries = self._entries[key.group]

        def is_ready() -> bool:
            entry = entries.get(key.digest)
            return entry is None or entry.mark is not None

        with self._changed:
            if not self._changed.wait_for(is_ready, _COPY_SECONDS):
                return None
            entry = entries.get(key.digest)
            if entry is None or entry.mark is None:
                return None
            entry.num_readers += 1
            entries.move_to_end(key.digest)
            return HostBlock(key, entry.slot, entry.mark, self.known.passage_of(key))

    def release(self, block: HostBlock) -> None:
        with self._changed:
            self._entries[block.key.group][block.key.digest].num_readers -= 1

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are of use once more: its end goes first."""
        with self._changed:
            for key in reversed(keys):
                if key in self:
                    self._entries[key.group].move_to_end(key.digest)

    def _evict(self, group: int) -> bool:
        """Whether there was one that nobody needs at the moment."""
        for digest, entry in self._entries[group].items():
            if entry.mark is not None and not entry.num_readers:
                self._forget(BlockKey(group, digest))
                self._counts.host_evicted += 1
                return True
        return False

    def _forget(self, key: BlockKey) -> None:
        self._free[key.group].append(self._entries[key.group].pop(key.digest).slot)
        self.known.remove(key)
        self.on_evicted(key)
