"""Scheduler output: one step as plain data, the workers' results, and the builder of the diff.

A `SchedulerOutput` contains only changes since the previous step and no references to scheduler objects, so it can be sent to
other ranks as it is. Its size depends on what happens in a step, not on context lengths: a sequence's tokens and blocks are sent
once when it starts to run, then only what is appended. Sampled tokens are sent too, although the worker that sampled them knows
them, because the scheduler alone decides which count (a stop string or a limit may have ended a sequence).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
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
    """A sequence that the workers do not hold yet: the fields of `Sequence` that they need, for other processes."""

    seq_id: int
    index: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_ids: tuple[int, ...]  # ids that `sampling.min_tokens` masks: eos unless ignored, and stop ids
    token_ids: tuple[int, ...]  # prompt and output so far
    tables: TableChanges  # complete; empty while it holds no blocks
    rotary_id: int
    layout: SlotLayout = PLAIN_LAYOUT  # which slots of the tables hold which positions
    window: int | None = None  # attention window in keys
    sinks: int = 0  # leading tokens visible beyond the window
    adapter: int | None = None  # id
    pooling: PoolingRule | None = None  # set if its prompt is pooled and nothing is sampled


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """Another sample of a sequence whose prompt ends in this step, with the same tokens and settings and no blocks yet."""

    seq_id: int
    index: int
    parent: int


class ScheduledSequence(NamedTuple):
    """A chunk of one sequence: tokens `start .. start + num_tokens - 1`, proposed ones last.

    A tuple, because every step creates one for each of its sequences.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_known_tokens: int  # tokens of the sequence without proposed ones
    token_ids: tuple[int, ...] = ()  # the last of these, appended since the sequence was last scheduled
    tables: TableChanges = NO_TABLE_CHANGES  # since then
    rotary_id: int | None = None  # row of the rotary tables, None if unchanged
    # Ids of the sequences for which a token is sampled from the last row. Empty if the chunk does not include the last known
    # token; several if a prompt forks into n samples.
    samples: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # set if those of this chunk's rows are requested (see SamplingParams)
    # Proposed tokens. The chunk then holds only the last known token and these; a token is sampled from every row.
    draft: tuple[int, ...] = ()
    layout: SlotLayout | None = None  # slot layout from this step on, None if unchanged
    num_drafted: int = 0  # tokens that the draft model proposes within the step instead, included in `num_tokens`

    @property
    def num_proposed(self) -> int:
        """Proposed tokens among `num_tokens`."""
        return self.num_drafted or len(self.draft)


@dataclass(frozen=True, slots=True)
class RotaryRow:
    """New contents of a row of the rotary tables: one spec per rotary group."""

    row: int
    specs: tuple[RotarySpec, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: changes since the previous step, and what to compute.

    Operations are executed in this order: saved, swapped_out, loaded, swapped_in, copies, original_copies, rerotations, then one
    forward pass over all sequences. No target in one list is a source in the same list.
    """

    step: int  # increases by one; a worker that misses a number needs a `Snapshot`
    removed: tuple[int, ...] = ()  # ended or preempted; one of these may be in `new` again, even in this step
    rotary_rows: tuple[RotaryRow, ...] = ()
    new: tuple[NewSequence, ...] = ()
    forks: tuple[ForkedSequence, ...] = ()
    saved: tuple[SavedBlock, ...] = ()  # evicted; copied to main memory before anything is written to the device cache
    swapped_out: tuple[SwappedPages, ...] = ()  # of preempted sequences that will continue
    swapped_in: tuple[SwappedPages, ...] = ()
    discarded: tuple[int, ...] = ()  # sequences whose swapped-out blocks are no longer needed
    loaded: tuple[LoadedBlock, ...] = ()  # from the disk or host tier; may be in no block table yet
    copies: tuple[BlockCopy, ...] = ()
    original_copies: tuple[KeyRerotation, ...] = ()  # of retained original keys
    rerotations: tuple[KeyRerotation, ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()
    # Forward passes; more than one only if every sequence is a running stream (multi-step decoding). Each pass computes the
    # token that the previous one sampled. `sequences` describes the first; the tables have slots for all.
    num_passes: int = 1
    # Passes of the previous step that were not known to be finished when this one was planned (async scheduling), else 0.
    # If set, every sequence is a stream of the previous step, and `start` counts the tokens in flight.
    num_inflight_passes: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_passes * sum(s.num_tokens for s in self.sequences)

    @property
    def num_draft_tokens(self) -> int:
        """Proposed tokens among `num_tokens`."""
        return sum(s.num_proposed for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that outputs up to number `step` have sent about running sequences, and possibly more, for a worker that missed one.

    The worker continues with the outputs from `step + 1`. Applying one of them twice is harmless, as it addresses by index.
    """

    step: int
    rotary_rows: tuple[RotaryRow, ...] = ()
    sequences: tuple[NewSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step for one sequence."""

    seq_id: int
    # Sampled tokens. Empty if only prompt log-probabilities are returned; several if proposed tokens are accepted (these and
    # the one sampled after them) or in multi-step decoding (one per pass, fewer if the sequence ended or failed).
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # parallel to token_ids, if requested
    # Of the prompt tokens at indices `start + 1 .. start + num_tokens` of the chunk that are part of the prompt, in order.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: EngineError | None = None  # sampling or pooling failed, for example on NaN; only this request fails
    pooled: PooledRows | None = None  # with the last chunk of a prompt that is pooled


@dataclass(slots=True)
class PlannedChunk:
    """A `ScheduledSequence` in the making: it refers to scheduler objects, and speculation may add proposed tokens."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: abc.Sequence[Sequence] = ()
    prompt_logprobs: int | None = None
    draft: tuple[int, ...] = ()
    num_drafted: int = 0

    @property
    def is_next_token(self) -> bool:
        """Whether this is the next token of a running stream, and nothing else."""
        return self.num_tokens == 1 and len(self.samples) == 1 and self.seq.num_output_tokens > 0


@dataclass(slots=True)
class _SentState:
    """State sent for a sequence. specs: those of its rotary row. layout: None if it may not have been sent."""

    num_tokens: int
    layout: SlotLayout | None
    rotary_id: int = -1
    specs: tuple[RotarySpec, ...] = ()


class SchedulerOutputBuilder:
    """Collects the chunks and block operations of the next step, and turns them into a diff against what was sent.

    It makes no decisions and changes no sequence. The public lists and counts belong to the next step; see `SchedulerOutput`.
    take_saved: returns evicted blocks that must be saved, each once.
    """

    def __init__(self, take_saved: abc.Callable[[], abc.Iterable[SavedBlock]] = tuple) -> None:
        self._take_saved = take_saved
        self._step = 0
        self._sent: dict[int, _SentState] = {}  # by sequence
        self._rows: dict[int, tuple[RotarySpec, ...]] = {}  # by row of the rotary tables
        self._reset()

    def _reset(self) -> None:
        self.chunks: list[PlannedChunk] = []
        self.loaded: list[LoadedBlock] = []
        self.copies: list[BlockCopy] = []
        self.original_copies: list[KeyRerotation] = []
        self.rerotations: list[KeyRerotation] = []
        self.num_passes, self.num_inflight_passes = 1, 0
        self._removed: list[int] = []
        self._swapped_out: dict[int, SwappedPages] = {}  # by sequence
        self._swapped_in: dict[int, SwappedPages] = {}
        self._discarded: list[int] = []

    @property
    def has_key_operations(self) -> bool:
        """Whether keys are loaded or re-rotated before the forward pass."""
        return bool(self.loaded or self.original_copies or self.rerotations)

    def remove(self, seq_id: int) -> None:
        """Report a sequence as ended or preempted, if it was sent before."""
        if self._sent.pop(seq_id, None) is not None:
            self._removed.append(seq_id)

    def swap_out(self, seq_id: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """Copy the blocks of a preempted sequence to main memory. blocks: per KV group."""
        if self._swapped_in.pop(seq_id, None) is None:  # otherwise they are still in main memory
            self._swapped_out[seq_id] = SwappedPages(seq_id, blocks)

    def swap_in(self, seq_id: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """Copy swapped-out blocks back into these ones."""
        self._swapped_in[seq_id] = SwappedPages(seq_id, blocks)

    def discard_swapped(self, seq_id: int) -> None:
        """Free the main memory of a swapped-out sequence that has ended."""
        if self._swapped_out.pop(seq_id, None) is None:
            self._discarded.append(seq_id)

    def build(self) -> SchedulerOutput:
        """The output of the collected step. It counts as sent, and the next step begins empty."""
        self._step += 1
        rows: list[RotaryRow] = []
        new: list[NewSequence] = []
        forks: list[ForkedSequence] = []
        sequences = []
        for chunk in self.chunks:
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
                ScheduledSequence(  # positional, because keyword arguments take three times as long
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
        output = SchedulerOutput(
            step=self._step,
            removed=tuple(self._removed),
            rotary_rows=tuple(rows),
            new=tuple(new),
            forks=tuple(forks),
            saved=tuple(self._take_saved()),
            swapped_out=tuple(self._swapped_out.values()),
            swapped_in=tuple(self._swapped_in.values()),
            discarded=tuple(self._discarded),
            loaded=tuple(self.loaded),
            copies=tuple(self.copies),
            original_copies=tuple(self.original_copies),
            rerotations=tuple(self.rerotations),
            sequences=tuple(sequences),
            num_passes=self.num_passes,
            num_inflight_passes=self.num_inflight_passes,
        )
        self._reset()
        return output

    def snapshot(self, sequences: abc.Mapping[int, Sequence]) -> Snapshot:
        """The sequences and rotary rows that were sent, in their present state. sequences: the live ones by id."""
        sent = [sequences[seq_id] for seq_id in self._sent]
        # Includes unused rows: if one is used again with the same specs, it is not sent a second time.
        rows = tuple(RotaryRow(row, specs) for row, specs in self._rows.items())
        return Snapshot(self._step, rows, tuple(_describe(seq, _whole(seq)) for seq in sent))

    def _send_rotary_row(self, seq: Sequence, sent: _SentState, rows: list[RotaryRow]) -> None:
        """Add the rotary row of `seq` to `rows`, unless it was sent for another sequence."""
        sent.rotary_id, sent.specs = seq.rotary_id, seq.stage.specs
        if self._rows.get(seq.rotary_id) != sent.specs:
            self._rows[seq.rotary_id] = sent.specs
            rows.append(RotaryRow(seq.rotary_id, sent.specs))


def _whole(seq: Sequence) -> TableChanges:
    """The complete tables of `seq`, without marking their changes as sent."""
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
