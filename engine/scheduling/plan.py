"""The plan of one step, as plain data: what the scheduler decides and what the runner reports back.

A `SchedulerOutput` says what is new since the step before and refers to nothing of the scheduler's, so it can be sent
to other ranks as it is, and its size depends on what happens and not on the length of any context: a sequence brings its
tokens and blocks once, when it begins to run, and afterwards what is appended to them. Drawn tokens travel too, although
the side that drew them knows them: a few integers a step, and the scheduler alone says which of them count (a stop string
or a limit may have ended them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from windlass.engine.api.pooling import PooledRows, PoolingRule
from windlass.engine.api.request import SamplingParams, TokenLogprobs
from windlass.engine.cache.changes import (
    NO_TABLE_CHANGES,
    BlockCopy,
    KeyRerotation,
    LoadedBlock,
    SavedBlock,
    SwappedPages,
    TableChanges,
)
from windlass.engine.cache.runs import PLAIN_LAYOUT, SlotLayout
from windlass.engine.errors import EngineError
from windlass.engine.rotary.scaling import RotarySpec


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
