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
from windlass.engine.cache.persist.counts import PersistCounts
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord
from windlass.engine.cache.persist.known import KnownBlocks
from windlass.kernels import Mark

_CANNOT_COPY = "blocks that the cache evicts cannot be copied to the host's memory"
_COPY_SECONDS = 1.0  # that a plan with a copy in it may take to begin


@dataclass(slots=True)
class _HostPlace:
    """mark: behind the copy that fills it; None before that is asked for. num_readers: who copies from it now."""

    slot: int
    mark: Mark | None = None
    num_readers: int = 0


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block that stays where it is until it is given back. mark: from then on it is there."""

    key: BlockKey
    slot: int
    mark: Mark
    passage: PassageRecord | None


class HostTier:
    """num_slots: blocks of each KV group that there is room for. The engine's thread tells; any thread may ask.

    block_size: tokens of a block. block_bytes: of each KV group's.
    """

    def __init__(self, num_slots: int, block_bytes: Sequence[int], block_size: int, counts: PersistCounts) -> None:
        self.num_slots, self._block_bytes, self._counts = num_slots, block_bytes, counts
        self.known = KnownBlocks(block_size)  # for what is found as a passage
        # Called with a lock held: it must not ask back.
        self.tell_forgotten: Callable[[BlockKey], None] = lambda _: None
        self._places: list[OrderedDict[bytes, _HostPlace]] = [
            OrderedDict() for _ in block_bytes
        ]  # longest unused first
        self._free = [list(range(num_slots - 1, -1, -1)) for _ in block_bytes]
        self._passages: dict[bytes, PassageRecord] = {}  # of blocks whose first group's is still in the device's cache
        self._leaving: list[SavedBlock] = []
        self._loaded: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def __contains__(self, key: BlockKey) -> bool:
        return key.digest in self._places[key.group]

    @property
    def num_blocks(self) -> int:
        return sum(len(places) for places in self._places)

    @property
    def num_bytes(self) -> int:
        """Of the blocks."""
        return sum(len(places) * size for places, size in zip(self._places, self._block_bytes, strict=True))

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
            places = self._places[key.group]
            if key.digest in places:
                places.move_to_end(key.digest)
            elif (key.group, block) in self._loaded or (not self._free[key.group] and not self._evict(key.group)):
                self._counts.host_lost += (key.group, block) not in self._loaded
                return False
            else:
                slot = self._free[key.group].pop()
                places[key.digest] = _HostPlace(slot)
                self._leaving.append(SavedBlock(*key, block, slot))
        if not key.group:
            self.known.add(key, 0, passage)
        return True

    def note_loaded(self, group: int, block: int) -> None:
        """A block is brought in by the plan that is being made: should that evict it, what lies there is not it yet."""
        self._loaded.add((group, block))

    def take_leaving(self) -> list[SavedBlock]:
        """What a plan has to have copied before anything else, as it has evicted these."""
        leaving, self._leaving = self._leaving, []
        self._loaded.clear()
        return leaving

    def filled(self, saved: Sequence[SavedBlock], mark: Mark) -> None:
        """The copies of these are asked for. mark: behind them."""
        with self._changed:
            for one in saved:
                self._places[one.group][one.digest].mark = mark
                self._counts.host_saved += 1
                self._counts.host_saved_bytes += self._block_bytes[one.group]
            self._counts.succeed(_CANNOT_COPY)
            self._changed.notify_all()

    def failed(self, saved: Sequence[SavedBlock], error: Exception) -> None:
        """These could not be copied, and are gone."""
        self._counts.fail(_CANNOT_COPY, error)
        with self._changed:
            for one in saved:
                self._counts.host_lost += 1
                self._forget(BlockKey(one.group, one.digest))
            self._changed.notify_all()

    def acquire(self, key: BlockKey) -> HostBlock | None:
        """A block, to be given back by `release`; None where it is not here."""
        places = self._places[key.group]

        def is_said() -> bool:
            place = places.get(key.digest)
            return place is None or place.mark is not None

        with self._changed:
            if not self._changed.wait_for(is_said, _COPY_SECONDS):
                return None
            place = places.get(key.digest)
            if place is None or place.mark is None:
                return None
            place.num_readers += 1
            places.move_to_end(key.digest)
            return HostBlock(key, place.slot, place.mark, self.known.passage_of(key))

    def release(self, block: HostBlock) -> None:
        with self._changed:
            self._places[block.key.group][block.key.digest].num_readers -= 1

    def use(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are of use once more: its end goes first."""
        with self._changed:
            for key in reversed(keys):
                if key in self:
                    self._places[key.group].move_to_end(key.digest)

    def _evict(self, group: int) -> bool:
        """Whether there was one that nobody needs at the moment."""
        for digest, place in self._places[group].items():
            if place.mark is not None and not place.num_readers:
                self._forget(BlockKey(group, digest))
                self._counts.host_evicted += 1
                return True
        return False

    def _forget(self, key: BlockKey) -> None:
        self._free[key.group].append(self._places[key.group].pop(key.digest).slot)
        self.known.remove(key)
        self.tell_forgotten(key)
