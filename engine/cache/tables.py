"""The block tables of one sequence: where its logical blocks lie, and where their keys stand as they were computed.

Plain books of one KV group: who else holds a block is the block manager's to know.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from windlass.engine.cache.changes import TableChange
from windlass.engine.rotary.scaling import RotarySpec


@dataclass(slots=True)
class OriginalKeys:
    """Where the keys of one KV group stand as they were computed, once they have been re-rotated.

    Every re-rotation starts from these, so that a key is rounded once however often the frequencies change.
    blocks: parallel to the leading entries of the block table. origins: ends of consecutive spans of slots, and the specs
    they were computed under.
    """

    blocks: list[int] = field(default_factory=list)
    origins: list[tuple[int, tuple[RotarySpec, ...]]] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return self.origins[-1][0] if self.origins else 0

    def remove(self, first: int, end: int, block_size: int) -> list[int]:
        """Cut out entries first .. end - 1; returns the blocks that were there."""
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        low, high = first * block_size, end * block_size
        self.origins = [(stop - max(0, min(stop, high) - low), specs) for stop, specs in self.origins]
        return removed

    def drop(self, first: int, end: int) -> list[int]:
        """The blocks of entries first .. end - 1, as far as there are any; they are -1 from now on."""
        dropped = self.blocks[first:end]
        self.blocks[first:end] = [-1] * len(dropped)
        return dropped


class BlockTable:
    """The physical block of each logical block in one KV group; -1 where a window has left it behind.

    It remembers what has changed since its change was last taken, at a cost that does not grow with the table.
    """

    __slots__ = ("_num_sent", "_removed", "_replaced", "blocks", "changed", "num_dropped")

    def __init__(self, blocks: abc.Iterable[int] = (), num_dropped: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_dropped = num_dropped  # leading entries that are -1
        self.changed = True
        self._num_sent = 0  # leading entries that whoever took the last change has, but for those replaced
        self._replaced: dict[int, int] = {}
        self._removed: list[tuple[int, int]] = []  # (first, count), one after the other

    def append(self, block: int) -> None:
        self.blocks.append(block)
        self.changed = True

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        if index < self._num_sent:
            self._replaced[index] = block
        self.changed = True

    def pop(self) -> int:
        """Cut off the last entry, which no window has left behind."""
        block = self.blocks.pop()
        self._replaced.pop(len(self.blocks), None)
        self._num_sent = min(self._num_sent, len(self.blocks))
        self.changed = True
        return block

    def drop(self, num_dropped: int) -> list[int]:
        """The blocks of the entries up to `num_dropped` that were still there; they are -1 from now on."""
        first, self.num_dropped = self.num_dropped, num_dropped
        blocks = self.blocks[first:num_dropped]
        for index in range(first, num_dropped):
            self.blocks[index] = -1
            self._replaced.pop(index, None)
        self.changed = True
        return blocks

    def remove(self, first: int, end: int) -> list[int]:
        """Cut out entries first .. end - 1, those behind move up; returns the blocks that no window had left behind."""
        count = end - first
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        self.num_dropped -= max(0, min(self.num_dropped, end) - first)
        known = min(self._num_sent, end) - min(self._num_sent, first)
        if known:
            self._removed.append((first, known))
            self._num_sent -= known
        self._replaced = {
            index - count if index >= end else index: block
            for index, block in self._replaced.items()
            if not first <= index < end
        }
        self.changed = True
        return removed

    def resend_all(self) -> None:
        """Let the next change bring the whole table."""
        self._num_sent = 0
        self._replaced.clear()
        self._removed.clear()

    def take_change(self) -> TableChange:
        """What has changed since this was last called, or since the beginning."""
        replaced = tuple(self._replaced.items())
        appended, removed = tuple(self.blocks[self._num_sent :]), tuple(self._removed)
        change = TableChange(self._num_sent, replaced, appended, self.num_dropped, removed)
        self._num_sent = len(self.blocks)
        self._replaced.clear()
        self._removed.clear()
        self.changed = False
        return change
