"""Cache operations between two steps, as plain data: block table changes, block copies, loads, saves, swaps and key re-rotation.

Their size depends on what has changed, never on the context length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.engine.rotary.rope_scaling import RotarySpec


@dataclass(frozen=True, slots=True)
class TableChange:
    """How one block table has changed, in the order in which a copy of it follows.

    removed: (first, count) of entries that are cut out one after the other, before anything else; those behind move up.
    length: leading entries that the copy keeps then; those behind are cut off. replaced: (index, block) of entries below
    `length` that are other blocks now. appended: entries behind `length`. num_dropped: leading entries that are -1 then,
    in total.
    """

    length: int = 0
    replaced: tuple[tuple[int, int], ...] = ()
    appended: tuple[int, ...] = ()
    num_dropped: int = 0
    removed: tuple[tuple[int, int], ...] = ()

    def apply(self, table: list[int]) -> None:
        """Let a copy of the table follow."""
        for first, count in self.removed:
            del table[first : first + count]
        del table[self.length :]
        for index, block in self.replaced:
            table[index] = block
        table += self.appended
        for index in range(min(self.num_dropped, self.length) - 1, -1, -1):
            if table[index] < 0:
                break
            table[index] = -1


@dataclass(frozen=True, slots=True)
class TableChanges:
    """How the block tables of one sequence have changed since this was last asked.

    restart: the sequence was new, or had given up everything it held; `groups` brings its tables in full. groups: one
    change per KV group, or none where no table has changed.
    """

    restart: bool = False
    groups: tuple[TableChange, ...] = ()

    def apply(self, tables: list[list[int]]) -> None:
        """Let copies of the tables, one per KV group, follow."""
        if self.restart:
            tables[:] = [[] for _ in self.groups]
        for table, change in zip(tables, self.groups, strict=bool(self.groups)):
            change.apply(table)


NO_TABLE_CHANGES = TableChanges()  # one value for the many steps in which no table changes


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block (all layers of the group) from `source` to `target` before the forward pass."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """Put what was read from a file or the host's memory, and is held under this ticket, into a block."""

    group: int
    block: int
    ticket: int


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """Copy a block, which is evicted, to a place in the host's memory before anything else. digest: of what it holds."""

    group: int
    digest: bytes
    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """Whole blocks of a sequence, per KV group, whose contents go into memory of their own or come back from it."""

    seq_id: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KeyRerotation:
    """Take the cached keys of tokens start .. end - 1 of a sequence from one spec to another, by one rotation each.

    sources, targets: the block of each logical block from start // block_size on; -1 where a window dropped it. Values go
    along unless `values` is false: then the targets have them already. first_position: of token `start`; the others
    follow one by one. from_specs, to_specs: one per rotary group; where they are equal the keys are copied as they are.
    seq_id: whose keys they are, where that is known.
    """

    group: int
    start: int
    end: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    first_position: int
    from_specs: tuple[RotarySpec, ...]
    to_specs: tuple[RotarySpec, ...]
    values: bool = True
    seq_id: int | None = None

    def reversed(self, start: int, end: int, block_size: int) -> KeyRerotation:
        """Of tokens start .. end - 1 of these, the way back, values too."""
        column = slice(start // block_size - self.start // block_size, -(-end // block_size) - self.start // block_size)
        return replace(
            self,
            start=start,
            end=end,
            sources=self.targets[column],
            targets=self.sources[column],
            first_position=self.first_position + start - self.start,
            from_specs=self.to_specs,
            to_specs=self.from_specs,
            values=True,
        )

    def split(self, end: int, block_size: int) -> tuple[KeyRerotation, KeyRerotation]:
        """The same in two, the first up to slot `end`, which lies inside and begins a block."""
        count = end // block_size - self.start // block_size
        head = replace(self, end=end, sources=self.sources[:count], targets=self.targets[:count])
        return head, replace(
            self,
            start=end,
            sources=self.sources[count:],
            targets=self.targets[count:],
            first_position=self.first_position + end - self.start,
        )
