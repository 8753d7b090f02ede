"""Writes down a planned step as a `SchedulerOutput`: of each sequence what the executing side does not know yet.

Responsible for the step numbers and for remembering what was said; what has changed in block tables the cache handles
remember. It decides nothing and changes no sequence.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from windlass.engine.cache.changes import (
    NO_TABLE_CHANGES,
    BlockCopy,
    KeyRerotation,
    LoadedBlock,
    SavedBlock,
    SwappedPages,
    TableChange,
    TableChanges,
)
from windlass.engine.cache.runs import SlotLayout
from windlass.engine.rotary.scaling import RotarySpec
from windlass.engine.scheduling.plan import (
    ForkedSequence,
    NewSequence,
    RotaryRow,
    ScheduledSequence,
    SchedulerOutput,
    Snapshot,
)
from windlass.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class PlannedChunk:
    """Tokens start .. start + num_tokens - 1 of `seq`, those proposed last. The rest as in `ScheduledSequence`."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: abc.Sequence[Sequence] = ()
    prompt_logprobs: int | None = None
    draft: tuple[int, ...] = ()
    num_drafted: int = 0

    @property
    def num_proposed(self) -> int:
        return self.num_drafted or len(self.draft)

    @property
    def is_next_token(self) -> bool:
        """Whether this is the next token of a running stream, and nothing else."""
        return self.num_tokens == 1 and len(self.samples) == 1 and self.seq.num_output_tokens > 0


@dataclass(slots=True)
class PlannedStep:
    """A step while it is being planned; see `SchedulerOutput`."""

    loaded: list[LoadedBlock] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    original_copies: list[KeyRerotation] = field(default_factory=list)
    rerotations: list[KeyRerotation] = field(default_factory=list)
    chunks: list[PlannedChunk] = field(default_factory=list)
    num_passes: int = 1
    ahead: int = 0

    @property
    def has_page_operations(self) -> bool:
        """Whether more than the tables of sequences changes before its forward pass."""
        return bool(self.loaded or self.original_copies or self.rerotations)


@dataclass(slots=True)
class _SentState:
    """What was said of a sequence. specs: of its rotary row. layout: None where nothing was said of it for sure."""

    num_tokens: int
    layout: SlotLayout | None
    rotary_id: int = -1
    specs: tuple[RotarySpec, ...] = ()


class SchedulerOutputBuilder:
    """One per scheduler. take_saved: the blocks that a plan has evicted and that are to be kept, once."""

    def __init__(self, take_saved: abc.Callable[[], list[SavedBlock]] = list) -> None:
        self._take_saved = take_saved
        self._step = 0
        self._sent: dict[int, _SentState] = {}  # by sequence
        self._removed: list[int] = []
        self._swapped_out: dict[int, SwappedPages] = {}  # by sequence
        self._swapped_in: dict[int, SwappedPages] = {}
        self._forgotten: list[int] = []
        self._rows: dict[int, tuple[RotarySpec, ...]] = {}  # by row of the rotary tables

    def remove(self, seq_id: int) -> None:
        """The sequence has ended or gives up its place: the next plan says so, if any plan has named it."""
        if self._sent.pop(seq_id, None) is not None:
            self._removed.append(seq_id)

    def swap_out(self, seq_id: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """The pages of a sequence that gives up its place are needed again; the next plan says so before anything else."""
        if self._swapped_in.pop(seq_id, None) is None:  # else they have not come back yet
            self._swapped_out[seq_id] = SwappedPages(seq_id, blocks)

    def swap_in(self, seq_id: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """A sequence goes on with its parked pages in these blocks."""
        self._swapped_in[seq_id] = SwappedPages(seq_id, blocks)

    def discard_swapped(self, seq_id: int) -> None:
        """A parked sequence has ended."""
        if self._swapped_out.pop(seq_id, None) is None:
            self._forgotten.append(seq_id)

    def build(self, step: PlannedStep) -> SchedulerOutput:
        """The plan of a step, which is taken as said."""
        self._step += 1
        rows: list[RotaryRow] = []
        new: list[NewSequence] = []
        forks: list[ForkedSequence] = []
        sequences = []
        for chunk in step.chunks:
            seq = chunk.seq
            token_ids: tuple[int, ...] = ()
            tables = NO_TABLE_CHANGES
            rotary_id = layout = None
            sent = self._sent.get(seq.seq_id)
            if sent is None:
                self._sent[seq.seq_id] = sent = _SentState(seq.num_tokens, seq.cache.layout)
                self._send_rotary_row(seq, sent, rows)
                new.append(_describe(seq, seq.cache.take_changes(whole=True)))
            else:
                known = len(seq.token_ids)
                if sent.num_tokens < known:
                    token_ids = tuple(seq.token_ids[sent.num_tokens :])
                    sent.num_tokens = known
                if sent.rotary_id != seq.rotary_id or sent.specs is not seq.stage.specs:
                    self._send_rotary_row(seq, sent, rows)
                    rotary_id = seq.rotary_id
                if sent.layout is not seq.cache.layout:
                    sent.layout = layout = seq.cache.layout
                tables = seq.cache.take_changes()
            samples: tuple[int, ...] = ()
            if chunk.samples:
                samples = (seq.seq_id,)
                for sample in chunk.samples[1:]:
                    samples += (sample.seq_id,)
                    self._sent[sample.seq_id] = _SentState(sample.num_tokens, None)
                    forks.append(ForkedSequence(sample.seq_id, sample.index, seq.seq_id))
            sequences.append(
                ScheduledSequence(  # its fields in their order: with their names it takes thrice as long, in every row of a step
                    seq.seq_id,
                    chunk.start,
                    chunk.num_tokens,
                    sent.num_tokens,
                    token_ids,
                    tables,
                    rotary_id,
                    samples,
                    chunk.prompt_logprobs,
                    chunk.draft,
                    layout,
                    chunk.num_drafted,
                )
            )
        removed, self._removed = self._removed, []
        swapped_out, self._swapped_out = self._swapped_out, {}
        swapped_in, self._swapped_in = self._swapped_in, {}
        discarded, self._forgotten = self._forgotten, []
        return SchedulerOutput(
            step=self._step,
            removed=tuple(removed),
            rotary_rows=tuple(rows),
            new=tuple(new),
            forks=tuple(forks),
            saved=tuple(self._take_saved()),
            swapped_out=tuple(swapped_out.values()),
            swapped_in=tuple(swapped_in.values()),
            discarded=tuple(discarded),
            loaded=tuple(step.loaded),
            copies=tuple(step.copies),
            original_copies=tuple(step.original_copies),
            rerotations=tuple(step.rerotations),
            sequences=tuple(sequences),
            num_passes=step.num_passes,
            ahead=step.ahead,
        )

    def snapshot(self, sequences: abc.Mapping[int, Sequence]) -> Snapshot:
        """All that was said so far of what still runs, as it stands now. sequences: the live ones by id."""
        sent = [sequences[seq_id] for seq_id in self._sent]
        # Rows that nobody holds now too: when somebody does again, no plan will say once more what stands in them.
        rows = tuple(RotaryRow(row, specs) for row, specs in self._rows.items())
        return Snapshot(self._step, rows, tuple(_describe(seq, _whole(seq)) for seq in sent))

    def _send_rotary_row(self, seq: Sequence, sent: _SentState, rows: list[RotaryRow]) -> None:
        """Say what the rotary row of `seq` holds, unless another sequence's plan has."""
        sent.rotary_id, sent.specs = seq.rotary_id, seq.stage.specs
        if self._rows.get(seq.rotary_id) != sent.specs:
            self._rows[seq.rotary_id] = sent.specs
            rows.append(RotaryRow(seq.rotary_id, sent.specs))


def _whole(seq: Sequence) -> TableChanges:
    """The tables of `seq` as they are, which does not count as telling what has changed in them."""
    tables = seq.cache.all_tables
    return TableChanges(True, tuple(TableChange(0, (), tuple(table.blocks), table.num_dropped) for table in tables))


def _describe(seq: Sequence, tables: TableChanges) -> NewSequence:
    rule = seq.request.context
    return NewSequence(
        seq_id=seq.seq_id,
        index=seq.index,
        sampling=seq.request.sampling,
        seed=seq.seed,
        num_prompt_tokens=seq.num_prompt_tokens,
        stop_ids=tuple(sorted(seq.stop_ids)),
        token_ids=tuple(seq.token_ids),
        tables=tables,
        rotary_id=seq.rotary_id,
        layout=seq.cache.layout,
        window=rule.attention_window,
        sinks=rule.attention_sinks,
        adapter=seq.request.adapter,
        pooling=seq.request.pooling,
    )
