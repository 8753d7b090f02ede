"""Cache operations between two steps, as plain data: table changes, block copies, loads, saves, swaps, key re-rotation.

Their size depends on what has changed, never on the context length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.engine.rotary.rope_scaling import RotarySpec


@dataclass(frozen=True, slots=True)
class TableChange:
    """Change of one block table. The fields apply in the order of their descriptions.

    removed: (first, count) of entries that are cut out one after the other; later entries move up. length: leading
    entries that remain; later ones are cut off. replaced: (index, block) of changed entries below `length`.
    appended: entries after `length`. num_dropped: leading entries that are -1 afterwards, in total.
    """

    length: int = 0
    replaced: tuple[tuple[int, int], ...] = ()
    appended: tuple[int, ...] = ()
    num_dropped: int = 0
    removed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of the block tables of one sequence since they were last taken.

    restart: the sequence is new or had released everything; `groups` contains its whole tables. groups: one change
    per KV group, or empty if no table has changed.
    """

    restart: bool = False
    groups: tuple[TableChange, ...] = ()


NO_TABLE_CHANGES = TableChanges()  # one value for the many steps in which no table changes


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block (all layers of the group) from `source` to `target` before the forward pass."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """Write staged data, read from a file or from host memory under this ticket, into a block."""

    group: int
    block: int
    ticket: int


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """Copy an evicted block to a slot in host memory before anything else. digest: of the block's content."""

    group: int
    digest: bytes
    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class SwappedPages:
    """Whole blocks of a sequence, per KV group, that are swapped out to main memory or swapped in."""

    seq_id: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KeyRerotation:
    """Rotate the cached keys of slots start .. end - 1 of a sequence from one spec to another, by one rotation each.

    sources, targets: the block of each logical block from start // block_size on; -1 if a window dropped it.
    values: whether values are copied as well; otherwise the targets have them already. first_position: of slot `start`;
    positions are consecutive. from_specs, to_specs: one per rotary group; keys are copied unchanged where they are equal.
    seq_id: of the sequence, where it is known.
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

    def part(self, start: int, end: int, block_size: int) -> KeyRerotation:
        """The same rotation for slots start .. end - 1 of these."""
        column = slice(start // block_size - self.start // block_size, -(-end // block_size) - self.start // block_size)
        return replace(
            self,
            start=start,
            end=end,
            sources=self.sources[column],
            targets=self.targets[column],
            first_position=self.first_position + start - self.start,
        )

    def inverse(self) -> KeyRerotation:
        """The rotation back, values included."""
        return replace(
            self,
            sources=self.targets,
            targets=self.sources,
            from_specs=self.to_specs,
            to_specs=self.from_specs,
            values=True,
        )
