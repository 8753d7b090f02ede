"""What one sample holds in the cache: its blocks, how far they are computed, and what their keys stand for.

Responsible for one sequence's side of the books, and for telling what has changed in its block tables. Whether a block
is free, shared or matched is the block manager's to know. Only modules of `engine.cache` change a handle; everybody
else reads it, takes its changes, or asks the block manager.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from dataclasses import dataclass, field

from windlass.engine.cache.changes import UNCHANGED, TableChange, TableChanges
from windlass.engine.cache.prefix import HashChain
from windlass.engine.rotary.scaling import RotarySpec


@dataclass(frozen=True, slots=True)
class PositionSegment:
    """A run of slots whose tokens stand at consecutive positions; it lasts until the next one begins.

    first_slot: index of its first token in the cache of its sequence. first_position: that token's absolute position.
    """

    first_slot: int
    first_position: int


@dataclass(slots=True)
class Originals:
    """Where the keys of one KV group stand as they were computed, once they have been re-rotated.

    Every re-rotation starts from these, so that a key is rounded once however often the frequencies change.
    blocks: parallel to the leading entries of the block table. origins: ends of consecutive token spans, and the specs
    they were computed under.
    """

    blocks: list[int] = field(default_factory=list)
    origins: list[tuple[int, tuple[RotarySpec, ...]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.origins[-1][0] if self.origins else 0

    def drop(self, first: int, end: int) -> list[int]:
        """The blocks of entries first .. end - 1, as far as there are any; they are -1 from now on."""
        dropped = self.blocks[first:end]
        self.blocks[first:end] = [-1] * len(dropped)
        return dropped


class BlockTable:
    """The physical block of each logical block in one KV group; -1 where a window has left it behind.

    It remembers what has changed since its change was last taken, at a cost that does not grow with the table.
    """

    __slots__ = ("_known", "_replaced", "blocks", "changed", "num_dropped")

    def __init__(self, blocks: abc.Iterable[int] = (), num_dropped: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_dropped = num_dropped  # leading entries that are -1
        self.changed = True
        self._known = 0  # leading entries that whoever took the last change has, but for those replaced
        self._replaced: dict[int, int] = {}

    def append(self, block: int) -> None:
        self.blocks.append(block)
        self.changed = True

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        if index < self._known:
            self._replaced[index] = block
        self.changed = True

    def pop(self) -> int:
        """Cut off the last entry, which no window has left behind."""
        block = self.blocks.pop()
        self._replaced.pop(len(self.blocks), None)
        self._known = min(self._known, len(self.blocks))
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

    def forget_taken(self) -> None:
        """Let the next change bring the whole table."""
        self._known = 0
        self._replaced.clear()

    def take_change(self) -> TableChange:
        """What has changed since this was last called, or since the beginning."""
        replaced = tuple(self._replaced.items())
        change = TableChange(self._known, replaced, tuple(self.blocks[self._known :]), self.num_dropped)
        self._known = len(self.blocks)
        self._replaced.clear()
        self.changed = False
        return change


class CacheHandle:
    """One per sample, for its whole life; it holds nothing while the sample waits.

    tables: per KV group; none while nothing is held. num_computed_tokens: leading tokens whose keys stand in the cache.
    segments: runs of slots and the positions they start at. specs: what the cached keys stand under, one per rotary group.
    originals: per KV group the keys as computed; none before the first re-rotation. num_rerotations: of the keys held now
    or last. private: blocks taken from now on are never hashed, matched or saved. chain, num_committed_blocks: digests of
    the full blocks, and how many of them were offered to the prefix cache.
    """

    __slots__ = (
        "_chain",
        "_num_committed_blocks",
        "_num_computed_tokens",
        "_num_rerotations",
        "_originals",
        "_private",
        "_restarted",
        "_segments",
        "_specs",
        "_tables",
    )

    def __init__(
        self, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool = False, first_position: int = 0
    ) -> None:
        self._chain = chain
        self._specs = specs
        self._private = private
        self._segments = (PositionSegment(0, first_position),)
        self._tables: list[BlockTable] = []
        self._originals: list[Originals] = []
        self._num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._num_rerotations = 0
        self._restarted = True

    # -- read by everybody -----------------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    @property
    def num_committed_blocks(self) -> int:
        return self._num_committed_blocks

    @property
    def tables(self) -> abc.Sequence[BlockTable]:
        return self._tables

    @property
    def block_tables(self) -> list[list[int]]:
        """The blocks alone, per KV group; shared by reference."""
        return [table.blocks for table in self._tables]

    @property
    def originals(self) -> abc.Sequence[Originals]:
        return self._originals

    @property
    def chain(self) -> HashChain:
        return self._chain

    @property
    def specs(self) -> tuple[RotarySpec, ...]:
        return self._specs

    @property
    def private(self) -> bool:
        return self._private

    @property
    def num_rerotations(self) -> int:
        return self._num_rerotations

    @property
    def segments(self) -> tuple[PositionSegment, ...]:
        return self._segments

    def position_of(self, slot: int) -> int:
        """The absolute position of the token at index `slot` of the sequence, computed or still to come."""
        segment = self._segments[bisect_right(self._segments, slot, key=_first_slot) - 1]
        return segment.first_position + slot - segment.first_slot

    def runs(self, start: int, end: int) -> abc.Iterator[tuple[int, int, int]]:
        """(first slot, end slot, position of the first) of the runs that slots start .. end - 1 fall into, in order."""
        while start < end:
            following = bisect_right(self._segments, start, key=_first_slot)
            segment = self._segments[following - 1]
            stop = end if following == len(self._segments) else min(end, self._segments[following].first_slot)
            yield start, stop, segment.first_position + start - segment.first_slot
            start = stop

    def take_changes(self, *, whole: bool = False) -> TableChanges:
        """What has happened to the tables since this was last called; everything if it is new, held nothing since, or `whole`.

        Whoever applies every answer to its copies of the tables has exactly the tables.
        """
        if whole or self._restarted:
            self._restarted = False
            for table in self._tables:
                table.forget_taken()
            return TableChanges(True, tuple([table.take_change() for table in self._tables]))
        for table in self._tables:
            if table.changed:
                return TableChanges(False, tuple([table.take_change() for table in self._tables]))
        return UNCHANGED

    # -- written by engine.cache alone -----------------------------------------------------------------------------

    def hold(self, tables: list[BlockTable], num_computed_tokens: int, num_committed_blocks: int) -> None:
        """Begin to hold blocks."""
        if self._tables:
            raise RuntimeError("the sequence already holds blocks")
        self._tables = tables
        self._restarted = True
        self._num_computed_tokens = num_computed_tokens
        self._num_committed_blocks = num_committed_blocks

    def set_computed(self, num_tokens: int) -> None:
        self._num_computed_tokens = num_tokens

    def set_committed(self, num_blocks: int) -> None:
        self._num_committed_blocks = num_blocks

    def begin_originals(self) -> list[Originals]:
        """Those of every KV group, empty at first."""
        if not self._originals:
            self._originals = [Originals() for _ in self._tables]
        return self._originals

    def enter(self, specs: tuple[RotarySpec, ...]) -> None:
        """The cached keys stand under other specs now; what is computed from here on is nobody else's."""
        self._specs = specs
        self._private = True
        self._num_rerotations += 1

    def release(self) -> None:
        """Hold nothing any more."""
        self._tables = []
        self._originals = []
        self._num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._restarted = True

    def copy(self, parent: CacheHandle) -> None:
        """Hold what `parent` holds, and stand for the same."""
        tables = [BlockTable(table.blocks, table.num_dropped) for table in parent._tables]
        self.hold(tables, parent._num_computed_tokens, parent._num_committed_blocks)
        self._chain = parent._chain.fork()
        self._specs = parent._specs
        self._private = parent._private
        self._segments = parent._segments

    def start_over(self, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Stand for keys under other specs, of which none is computed yet."""
        if self._tables:
            raise RuntimeError("a sequence that starts over still holds blocks")
        self._chain, self._specs, self._private = chain, specs, private
        self._num_rerotations = 0


def _first_slot(segment: PositionSegment) -> int:
    return segment.first_slot
