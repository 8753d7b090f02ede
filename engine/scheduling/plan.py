"""The plan of one step, as plain data: what the scheduler decides and what the runner reports back.

A `SchedulerOutput` can be sent to other ranks as it is. Inside one process its lists are shared by reference with
the scheduler (nothing is copied per token); the runner must not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.engine.api.request import SamplingParams, TokenLogprobs
from windlass.engine.cache.changes import BlockCopy, KeyRerotation
from windlass.engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class SampleSlot:
    """One sample drawn from the last row of a scheduled sequence.

    `token_ids` is the sequence's prompt followed by its output so far; `num_prompt_tokens` splits them.
    `stop_ids` are the ids that `sampling.min_tokens` keeps masked (eos unless ignored, and stop ids).
    """

    seq_id: int
    index: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: Sequence[int]
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A chunk of one sequence: tokens `(token_ids + draft)[start : start + num_tokens]` at positions `first_position + …`.

    block_tables: per KV group the physical block of each logical block; -1 where a window group dropped it.
    table_version: while it stays the same, a step changes nothing in the tables before the chunk's first block, except
    that blocks are dropped: so a rank may keep the tables and read only what lies from there on.
    samples: empty while the chunk does not reach the last known token; several when a prompt forks into n samples.
    prompt_logprobs: set while prompt log-probabilities of this chunk's rows are wanted (see SamplingParams).
    draft: proposed tokens behind the last known one, which is all else this chunk holds then; a token is drawn from
    every row.
    """

    seq_id: int
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    block_tables: list[list[int]]
    rotary_id: int
    first_position: int
    samples: tuple[SampleSlot, ...] = ()
    prompt_logprobs: int | None = None
    num_prompt_tokens: int = 0
    table_version: int = 0
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class SchedulerOutput:
    """One step: the copies, then `set_aside` (copies of originals), then `rerotations`, then one forward pass over all
    sequences.

    No target of one list is a source of the same list.
    """

    copies: list[BlockCopy] = field(default_factory=list)
    set_aside: list[KeyRerotation] = field(default_factory=list)
    rerotations: list[KeyRerotation] = field(default_factory=list)
    sequences: list[ScheduledSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def num_draft_tokens(self) -> int:
        """Those of `num_tokens` that are only proposed."""
        return sum(len(s.draft) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step produced for one sequence id.

    token_ids: drawn tokens (empty when only prompt log-probabilities are reported; several where proposed tokens stand:
    these and the one drawn after them).
    logprobs: parallel to token_ids when asked for. prompt_logprobs: for the prompt tokens at indices
    `start + 1 .. start + num_tokens` of the scheduled chunk that lie inside the prompt, in order.
    error: sampling failed for this sequence (its logits are not finite); its request fails, no other does.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: EngineError | None = None
