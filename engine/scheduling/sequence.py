"""Sequence: one sample of one request while the engine works on it.

Contains plain state that the scheduler changes, and rules that depend on this state only, such as when a sequence ends.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from windlass.engine.cache.block_store import Fetch
from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextSize
from windlass.engine.interface.outputs import FinishReason, TokenLogprobs
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryStage
from windlass.engine.scheduling.context_shift import num_free_slots
from windlass.engine.scheduling.fairness import FairQueueEntry

EVICTION_RETRIED = -1


class SequenceStatus(Enum):
    """Resources of a sequence, and fields that may be set. `SchedulerQueues` changes it.

    WAITING: no blocks and no rotary row, except for swapped-out blocks (`cache.is_swapped_out`); `awaited_prefix` and `fetch`
    may be set.
    FORKING: nothing yet; the first token of this sample is sampled from its parent's row.
    RUNNING: blocks and a rotary row; `rerotations`, `num_inflight_tokens` and `num_dropped_early` may be set.
    FINISHED: nothing.
    """

    WAITING = auto()
    FORKING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sample. *_time: seconds on the scheduler's clock."""

    # Set at creation (`LiveRequests`).
    seq_id: int
    request: EngineRequest
    index: int
    token_ids: list[int]  # prompt, then output; `Scheduler.update` appends in place
    num_prompt_tokens: int
    rotation: RotaryPlan  # how frequencies depend on the length
    stage: RotaryStage  # frequencies of the cached keys; `FrequencyChanges` changes it
    seed: int
    cache: SequenceCache  # block tables and computed length
    context_limits: ContextSize  # how many tokens and blocks it may hold
    stop_ids: frozenset[int]
    queue_entry: FairQueueEntry
    arrival_number: int  # order among requests
    arrival_time: float
    # Resources (`SchedulerQueues`, `FrequencyChanges`).
    status: SequenceStatus = SequenceStatus.WAITING
    rotary_id: int = -1  # row of the rotary tables, -1 while not running
    rerotations: list[KeyRerotation] = field(default_factory=list)  # must be done before it computes further tokens
    # Recomputation (`SchedulerCounters`, `FrequencyChanges`, `Scheduler`).
    max_computed_tokens: int = 0  # largest computed length so far; tokens computed below it are recomputed
    recompute_reason: str = "preemption"  # as named by the counters
    full_hit_end: int = 0  # end of the tokens that are recomputed because the cache held all of them
    cached_tokens: int | None = None  # prompt tokens from the cache at the first admission, None before it
    # Waiting (`Scheduler`, `KVRestorer`; see `kv_restore` for the combinations of the last three).
    awaited_prefix: tuple[Sequence, int] | None = None  # a running sequence about to compute this many shared tokens
    restore_checked: bool = False  # whether the disk and host tiers were searched since it began to wait
    num_expected_blocks: int = 0  # of its prefix, cached then or loaded since; `EVICTION_RETRIED` if found evicted
    fetch: Fetch | None = None  # blocks being read for it
    # Other samples of the request, for sample 0 only (`Scheduler`).
    children: list[Sequence] | None = None  # None until the prompt is planned to its end; empty once they have forked
    ended_samples: set[int] = field(default_factory=set)  # ended before they forked
    # Results of steps (`Scheduler`, `AsyncScheduling`).
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # known so far; None if not requested or already returned
    num_inflight_tokens: int = 0  # of steps that async scheduling submitted and whose results are not processed
    num_dropped_early: int = 0  # dropped for such a step while an earlier one is not processed
    last_scheduled_step: int = -1
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        if self.prompt_logprobs is None and sampling.prompt_logprobs is not None and self.index == 0:
            # The first token has no context.
            self.prompt_logprobs = [None] * min(max(1, sampling.prompt_logprobs_from), self.num_prompt_tokens)

    @property
    def rank(self) -> tuple[int, float, int, int]:
        """Sort key: the lowest rank is served first and preempted last. It may fall while the request waits."""
        return (self.request.priority, self.queue_entry.start, self.arrival_number, self.index)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.cache.num_computed_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Uncomputed tokens that one chunk may hold: up to a reused passage, a context shift, or a re-rotation."""
        uncomputed = min(self.num_uncomputed_tokens, num_free_slots(self.context_limits, self.cache))
        last = self.stage.last_length
        if self.cache.passages:
            uncomputed = min(uncomputed, self.cache.passages[0].start - self.cache.num_computed_tokens)
        if last is None or self.rotation.policy != "rotate":
            return uncomputed
        computed = self.cache.num_computed_tokens
        if computed >= last:
            last = self.rotation.stage(computed + 1).last_length
        return uncomputed if last is None else min(uncomputed, last - computed)

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens after the last known one that the next step may compute too, if they are proposed or sampled in it.

        One more token is sampled after them, and no token past the end of the sequence is ever computed. All are computed
        under the present stage, and no block is dropped for them.
        """
        lookahead = min(self.num_remaining_tokens, num_free_slots(self.context_limits, self.cache)) - 1
        last = self.stage.last_length
        return lookahead if last is None else min(lookahead, last - self.num_tokens)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be sampled."""
        left = self.request.sampling.max_tokens - self.num_output_tokens
        return min(left, self.context_limits.longest - self.num_tokens)

    @property
    def num_shareable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: computed under `stage`, before any is dropped, and without
        those whose log-probabilities are requested."""
        last = self.num_tokens if self.stage.last_length is None else self.stage.last_length
        wanted = self.num_tokens if self.prompt_logprobs is None else self.request.sampling.prompt_logprobs_from - 1
        return max(0, min(self.num_tokens, last, self.context_limits.floor, wanted))

    def stage_to_recompute(self) -> RotaryStage | None:
        """Under `recompute`, the stage of all tokens if it differs from the present one: all tokens must be recomputed."""
        last = self.stage.last_length
        if last is None or self.rotation.policy != "recompute" or self.num_tokens <= last:
            return None
        return self.rotation.stage(self.num_tokens)

    def stage_to_rerotate(self) -> RotaryStage | None:
        """Under `rotate`, the stage of the next token if it differs from the present one: cached keys must be re-rotated."""
        last = self.stage.last_length
        if last is None or self.rotation.policy != "rotate" or self.cache.num_computed_tokens < last:
            return None
        return self.rotation.stage(self.cache.num_computed_tokens + 1)

    @property
    def will_rerotate(self) -> bool:
        """Whether cached keys are re-rotated before all known tokens are computed."""
        last = self.stage.last_length
        return self.rotation.policy == "rotate" and last is not None and last < self.num_tokens

    @property
    def is_before_fork(self) -> bool:
        """Whether this is sample 0 and the other samples, if any, have not forked yet."""
        return self.index == 0 and self.children != []

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of some prompt token are still missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def needs_full_prefill(self) -> bool:
        """Whether the model must compute the entire prompt, so that none of it may come from the prefix cache."""
        pooling = self.request.pooling
        scored = self.prompt_logprobs is not None and self.request.sampling.prompt_logprobs_from <= 1
        return scored or (pooling is not None and pooling.reads_every_token)

    @property
    def can_share_prefix(self) -> bool:
        """Whether the prefix cache may hold blocks for this sequence that others computed."""
        return not (self.needs_full_prefill or self.cache.private)

    def add_prompt_logprobs(self, start: int, entries: abc.Sequence[TokenLogprobs]) -> None:
        """Add the entries of the prompt tokens from index start + 1, skipping those known before a preemption.

        Raises RuntimeError if entries before them are missing.
        """
        known = self.prompt_logprobs
        if known is None or start + 1 > len(known):
            raise RuntimeError(f"sequence {self.seq_id}: prompt log-probabilities out of order at token {start + 1}")
        known.extend(entries[len(known) - start - 1 :])

    def append_tokens(self, token_ids: abc.Sequence[int]) -> tuple[int, FinishReason | None, int | None]:
        """Append sampled tokens until one ends the sequence.

        Returns the number of appended tokens, the reason if the sequence has ended, and the eos or stop id if one ended it.
        The first `min_tokens` tokens never end it by their id, unless its grammar allows nothing else.
        """
        sampling = self.request.sampling
        min_tokens = (
            sampling.min_tokens if sampling.grammar is None else 0
        )  # with a grammar, the sampler masks early ends
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if token in self.stop_ids and self.num_output_tokens > min_tokens:
                return count, "stop", token
            if self.num_output_tokens >= sampling.max_tokens or self.num_tokens >= self.context_limits.longest:
                return count, "length", None
        return len(token_ids), None, None


rank_key = attrgetter("rank")
