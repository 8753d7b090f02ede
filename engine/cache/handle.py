"""What one sample holds in the cache: its blocks, how far they are computed, and what their keys stand for.

Responsible for one sequence's side of the books, and for telling what has changed in its block tables. Whether a block
is free, shared or matched is the block manager's to know. Only modules of `engine.cache` change a handle; everybody
else reads it, takes its changes, or asks the block manager.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from windlass.engine.cache.changes import UNCHANGED, TableChange, TableChanges
from windlass.engine.cache.prefix import HashChain
from windlass.engine.cache.runs import OPEN_END, SlotLayout
from windlass.engine.rotary.scaling import RotarySpec


@dataclass(slots=True)
class Originals:
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

    __slots__ = ("_known", "_removed", "_replaced", "blocks", "changed", "num_dropped")

    def __init__(self, blocks: abc.Iterable[int] = (), num_dropped: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_dropped = num_dropped  # leading entries that are -1
        self.changed = True
        self._known = 0  # leading entries that whoever took the last change has, but for those replaced
        self._replaced: dict[int, int] = {}
        self._removed: list[tuple[int, int]] = []  # (first, count), one after the other

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

    def remove(self, first: int, end: int) -> list[int]:
        """Cut out entries first .. end - 1, those behind move up; returns the blocks that no window had left behind."""
        count = end - first
        removed = [block for block in self.blocks[first:end] if block >= 0]
        del self.blocks[first:end]
        self.num_dropped -= max(0, min(self.num_dropped, end) - first)
        known = min(self._known, end) - min(self._known, first)
        if known:
            self._removed.append((first, known))
            self._known -= known
        self._replaced = {
            index - count if index >= end else index: block
            for index, block in self._replaced.items()
            if not first <= index < end
        }
        self.changed = True
        return removed

    def forget_taken(self) -> None:
        """Let the next change bring the whole table."""
        self._known = 0
        self._replaced.clear()
        self._removed.clear()

    def take_change(self) -> TableChange:
        """What has changed since this was last called, or since the beginning."""
        replaced = tuple(self._replaced.items())
        appended, removed = tuple(self.blocks[self._known :]), tuple(self._removed)
        change = TableChange(self._known, replaced, appended, self.num_dropped, removed)
        self._known = len(self.blocks)
        self._replaced.clear()
        self._removed.clear()
        self.changed = False
        return change


class CacheHandle:
    """One per sample, for its whole life; it holds nothing while the sample waits.

    tables: per KV group; none while nothing is held. num_computed_tokens: leading tokens whose keys were computed and stand
    in the cache, but for those dropped. layout: which slot holds which position. num_shifts: times that tokens were dropped.
    floor: slots that dropping never brings it below, so that what it leaves behind a window beyond them stays behind.
    specs: what the cached keys stand under, one per rotary group.
    originals: per KV group the keys as computed; none before the first re-rotation. num_rerotations: of the keys held now
    or last. private: blocks taken from now on are never hashed, matched or saved. chain, num_committed_blocks: digests of
    the full blocks, and how many of them were offered to the prefix cache.
    """

    __slots__ = (
        "_chain",
        "_layout",
        "_num_committed_blocks",
        "_num_computed_tokens",
        "_num_rerotations",
        "_num_shifts",
        "_originals",
        "_parked",
        "_private",
        "_restarted",
        "_specs",
        "_tables",
        "floor",
    )

    def __init__(
        self,
        chain: HashChain,
        specs: tuple[RotarySpec, ...],
        *,
        private: bool = False,
        first_position: int = 0,
        floor: int = OPEN_END,
    ) -> None:
        self.floor = floor
        self._chain = chain
        self._specs = specs
        self._private = private
        self._layout = SlotLayout.starting_at(first_position)
        self._tables: list[BlockTable] = []
        self._originals: list[Originals] = []
        self._num_computed_tokens = 0
        self._num_committed_blocks = 0
        self._num_rerotations = 0
        self._num_shifts = 0
        self._parked: tuple[int, list[tuple[int, int]]] | None = None
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
    def num_shifts(self) -> int:
        return self._num_shifts

    @property
    def layout(self) -> SlotLayout:
        """Another object whenever anything about it has changed."""
        return self._layout

    @property
    def num_slots(self) -> int:
        """Slots taken so far: that of the next token."""
        return self._num_computed_tokens + self._layout.slot_offset

    @property
    def is_parked(self) -> bool:
        """Whether it holds nothing but will be as it was once its pages are back."""
        return self._parked is not None

    def held_or_parked(self) -> list[int]:
        """Blocks of its tables, per KV group, held or parked."""
        if self._parked is not None:
            return [length - dropped for length, dropped in self._parked[1]]
        return [len(table.blocks) - table.num_dropped for table in self._tables]

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

    def cut_out(self, first_slot: int, end_slot: int, *, closing: bool) -> None:
        """Slots [first_slot, end_slot) are held no more, see `SlotLayout.without`; what comes from here on is nobody else's."""
        self._layout = self._layout.without(first_slot, end_slot, closing=closing)
        self._private = True
        self._num_shifts += 1

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

    def park(self) -> None:
        """Hold nothing, and remember what it was."""
        shapes = [(len(table.blocks), table.num_dropped) for table in self._tables]
        self._parked = self._num_computed_tokens, shapes
        self.release()

    def unpark(self, take: abc.Callable[[int], int]) -> None:
        """Be as before, in blocks that `take` finds for a KV group."""
        if self._parked is None:
            raise RuntimeError("the sequence is not parked")
        num_computed, shapes = self._parked
        tables = [
            BlockTable([-1] * dropped + [take(group) for _ in range(length - dropped)], dropped)
            for group, (length, dropped) in enumerate(shapes)
        ]
        self.hold(tables, num_computed, 0)
        self._parked = None

    def copy(self, parent: CacheHandle) -> None:
        """Hold what `parent` holds, and stand for the same."""
        tables = [BlockTable(table.blocks, table.num_dropped) for table in parent._tables]
        self.hold(tables, parent._num_computed_tokens, parent._num_committed_blocks)
        self._chain = parent._chain.fork()
        self._specs = parent._specs
        self._private = parent._private
        self._layout = parent._layout
        self._num_shifts = parent._num_shifts

    def start_over(self, chain: HashChain, specs: tuple[RotarySpec, ...], *, private: bool) -> None:
        """Stand for keys under other specs, of which none is computed yet."""
        if self._tables:
            raise RuntimeError("a sequence that starts over still holds blocks")
        self._parked = None
        self._chain, self._specs, self._private = chain, specs, private
        if not self._layout.is_plain:  # what was dropped comes again
            self._layout, self._num_shifts = SlotLayout.starting_at(self._layout.first_position), 0
        self._num_rerotations = 0
