"""Scheduler output: one step as plain data, what workers report back, and the builder of the diff.

A `SchedulerOutput` contains only changes since the previous step and no references to scheduler objects, so it can be sent to
other ranks as it is. Its size depends on what happens in a step, not on context lengths: a sequence's tokens and blocks are sent
once when it starts to run, then only what is appended. Sampled tokens are sent too, although the worker that sampled them knows
them, because the scheduler alone decides which count (a stop string or a limit may have ended a sequence).

`SchedulerOutputBuilder` numbers the steps and remembers what was sent. It decides nothing and changes no sequence.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from windlass.engine.cache.cache_operations import (
    NO_TABLE_CHANGES,
    BlockCopy,
    KeyRerotation,
    LoadedBlock,
    SavedBlock,
    SwappedPages,
    TableChange,
    TableChanges,
)
from windlass.engine.cache.sequence_cache import PLAIN_LAYOUT, SlotLayout
from windlass.engine.errors import EngineError
from windlass.engine.interface.outputs import PooledRows, TokenLogprobs
from windlass.engine.interface.request import PoolingRule, SamplingParams
from windlass.engine.rotary.rope_scaling import RotarySpec
from windlass.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All there is to know of a sequence that the executing side does not hold.

    token_ids: prompt and output so far. stop_ids: those that `sampling.min_tokens` keeps masked (eos unless ignored, and
    stop ids). tables: whole; none while it holds no blocks. layout: which slots of them hold which positions. window, sinks:
    keys that its tokens see, and leading tokens that they see besides; None where the request asks for no window. adapter: the
    id of its adapter. pooling: set where its prompt is pooled and nothing is drawn.
    """

    seq_id: int
    index: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    tables: TableChanges
    rotary_id: int
    layout: SlotLayout = PLAIN_LAYOUT
    window: int | None = None
    sinks: int = 0
    adapter: int | None = None
    pooling: PoolingRule | None = None


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """Another sample of a sequence whose prompt ends in this step: the same tokens and settings, no blocks yet."""

    seq_id: int
    index: int
    parent: int


class ScheduledSequence(NamedTuple):
    """A chunk of one sequence: tokens `start .. start + num_tokens - 1`, the proposed ones of `draft` last.

    num_known_tokens: tokens of the sequence without proposed ones. token_ids: the last of these, as far as they have been
    appended since the sequence was last scheduled. tables: what has changed since then. rotary_id: the row of the rotary
    tables, None while it is still the same. layout: None likewise; it holds from this step on.
    samples: ids of the sequences for which a token is drawn from the last row. Empty while the chunk does not reach the
    last known token; several when a prompt forks into n samples.
    prompt_logprobs: set while prompt log-probabilities of this chunk's rows are wanted (see SamplingParams).
    draft: proposed tokens behind the last known one, which is all else this chunk holds then; a token is drawn from
    every row. num_drafted: how many the draft model is to propose there instead; `num_tokens` counts them already.
    A tuple, because every step makes one for each of its sequences.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_known_tokens: int
    token_ids: tuple[int, ...] = ()
    tables: TableChanges = NO_TABLE_CHANGES
    rotary_id: int | None = None
    samples: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    draft: tuple[int, ...] = ()
    layout: SlotLayout | None = None
    num_drafted: int = 0

    @property
    def num_proposed(self) -> int:
        """Those of `num_tokens` that are only proposed, by whomever."""
        return self.num_drafted or len(self.draft)


@dataclass(frozen=True, slots=True)
class RotaryRow:
    """A row of the rotary tables holds these specs from now on, one per rotary group."""

    row: int
    specs: tuple[RotarySpec, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what has changed since the step before, and what to compute.

    step: counts up by one; whoever misses a number cannot follow any more and needs a `Snapshot`.
    removed: sequences that have ended or lost their places; one of these may come again as a new one, even in this step.
    saved: blocks that are evicted, which go into the host's memory before anything is written to pages.
    parked, unparked, forgotten: pages of sequences that lose their places and will go on as they were, those that come
    back, and sequences whose parked pages nobody needs any more.
    loaded: blocks that were read from files or the host's memory; nobody may have been told of them before.
    The rest in order: what is saved, what is parked, what is loaded, what is unparked, the copies, then `original_copies` (copies of
    originals), then `rerotations`, then one forward pass over all sequences. No target of one list is a source of the same list.
    passes: so many forward passes instead, where every sequence is a running stream: each computes the token that the one
    before it drew. `sequences` describes the first; the tables have room for all.
    ahead: 0, or how many passes of the plan before this one were not known to be over when it was made. Then every sequence is a
    stream of that plan, and goes on `ahead` tokens behind the last one that is known.
    """

    step: int
    removed: tuple[int, ...] = ()
    rotary_rows: tuple[RotaryRow, ...] = ()
    new: tuple[NewSequence, ...] = ()
    forks: tuple[ForkedSequence, ...] = ()
    saved: tuple[SavedBlock, ...] = ()
    swapped_out: tuple[SwappedPages, ...] = ()
    swapped_in: tuple[SwappedPages, ...] = ()
    discarded: tuple[int, ...] = ()
    loaded: tuple[LoadedBlock, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    original_copies: tuple[KeyRerotation, ...] = ()
    rerotations: tuple[KeyRerotation, ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()
    num_passes: int = 1
    ahead: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_passes * sum(s.num_tokens for s in self.sequences)

    @property
    def num_draft_tokens(self) -> int:
        """Those of `num_tokens` that are only proposed."""
        return sum(s.num_proposed for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the plans up to number `step` have said of what still runs, and perhaps a little more.

    Whoever takes it in can follow the plans from `step + 1` on: what those say is said by index, so that hearing it twice
    does no harm.
    """

    step: int
    rotary_rows: tuple[RotaryRow, ...] = ()
    sequences: tuple[NewSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step produced for one sequence id.

    token_ids: drawn tokens (empty when only prompt log-probabilities are reported; several where proposed tokens are accepted:
    these and the one drawn after them; as many as passes where there were several, fewer if any ended or failed meanwhile).
    logprobs: parallel to token_ids when asked for. prompt_logprobs: for the prompt tokens at indices
    `start + 1 .. start + num_tokens` of the scheduled chunk that lie inside the prompt, in order.
    error: sampling or pooling failed for this sequence (what it goes by is not finite); its request fails, no other does.
    pooled: with the last chunk of a prompt that is pooled.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: EngineError | None = None
    pooled: PooledRows | None = None


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
