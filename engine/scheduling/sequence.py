"""Sequence: one sample of one request while the engine works on it.

Plain state that the scheduler changes, and rules that need nothing else, such as when a sequence ends. `cache` holds its blocks.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum, auto

from windlass.engine.cache.block_store import Fetch
from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.outputs import FinishReason, TokenLogprobs
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryStage
from windlass.engine.scheduling.context_shift import SequenceContextLimits
from windlass.engine.scheduling.fairness import FairQueueEntry
from windlass.engine.scheduling.ngram_proposer import DraftState

EVICTION_RETRIED = -1


class SequenceStatus(Enum):
    """What a sequence may hold, and which of its fields go with it. `Places` changes it.

    WAITING: no blocks and no rotary row, but for pages that are parked (`cache.is_swapped_out`); `awaited_prefix` and `fetch` may be set.
    FORKING: nothing yet, of a sample whose first token its parent's row draws.
    RUNNING: blocks and a rotary row; `rerotations`, `num_inflight_tokens` and `num_dropped_early` may be set.
    FINISHED: nothing; nobody looks at it any more.
    """

    WAITING = auto()
    FORKING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, sampling and status of one sample.

    Set when it is made (`LiveRequests`):
    token_ids: the prompt followed by the output so far; grows in place, by what `ResultProcessor` takes in.
    cache: what it holds in the cache; its computed length chases `num_tokens`. held: how much that may be.
    rotation: how frequencies depend on the length.
    turn: where its request stands among those of all callers (see `turns`).
    arrival_number: order of arrival among requests; (priority, where the turn starts, arrival_number, index) ranks sequences.
    arrival_time, and the other *_time: seconds on the scheduler's clock.

    Its place (`Places`, `FrequencyChanges`):
    stage: the frequencies that the cached keys are under now. rotary_id: row of the rotary tables, -1 while not running.
    rerotations: those of its keys that are still to be done before it computes anything; it runs, and nothing is drawn.

    Tokens that are computed again (`SchedulerCounters`, `FrequencyChanges`, `ResultProcessor`):
    max_computed_tokens: the longest computed length so far; what is computed below it is recomputed.
    recompute_reason: why, as the counters name it.
    full_hit_end: end of the tokens that are recomputed because the cache held all of them.
    cached_tokens: prompt tokens taken from the cache at the first admission, None before it.

    What it waits for (`Admission`; of files `KVRestorer`, which tells of the combinations there are):
    awaited_prefix: a running sequence that is about to compute a prefix this one can share, and how many tokens of it.
    restore_checked, fetch: whether those who keep blocks were asked for what the cache lacks since it began to wait, and what it waits
    for of that. num_expected_blocks: of its prefix, that were cached then or came; `EVICTION_RETRIED` where they were gone at its
    admission.

    Other samples of its request (`Scheduler`, `ResultProcessor`), which sample 0 alone has:
    children: None until the prompt is planned to its end; then the other samples, until they stand on their own.
    ended_samples: those that were ended before they stood on their own.

    What steps left behind (`Scheduler`, `ResultProcessor`, `Speculation`, `AsyncScheduling`):
    prompt_logprobs: those known so far, None if not asked for or handed out already.
    drafting: what speculation remembers of it, None before its first proposal.
    num_inflight_tokens: tokens of steps that were planned before the results of those in front of them were known, and are not
    taken in yet. num_dropped_early: tokens that were dropped for one of those while what is in front of it is not taken in.
    last_scheduled_step: the step that last scheduled it.
    """

    seq_id: int
    request: EngineRequest
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    rotation: RotaryPlan
    stage: RotaryStage
    seed: int
    cache: SequenceCache
    context_limits: SequenceContextLimits
    stop_ids: frozenset[int]
    queue_entry: FairQueueEntry
    arrival_number: int
    arrival_time: float
    # Its place.
    status: SequenceStatus = SequenceStatus.WAITING
    rotary_id: int = -1
    rerotations: list[KeyRerotation] = field(default_factory=list)
    # Tokens that are computed again.
    max_computed_tokens: int = 0
    recompute_reason: str = "preemption"
    full_hit_end: int = 0
    cached_tokens: int | None = None
    # What it waits for.
    awaited_prefix: tuple[Sequence, int] | None = None
    restore_checked: bool = False
    num_expected_blocks: int = 0
    fetch: Fetch | None = None
    # Other samples.
    children: list[Sequence] | None = None
    ended_samples: set[int] = field(default_factory=set)
    # What steps left behind.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    draft_state: DraftState | None = None
    num_inflight_tokens: int = 0
    num_dropped_early: int = 0
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
        """Lower is better. It becomes better while it waits, where its turn does."""
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
        """Uncomputed tokens that one chunk may hold: up to a passage, before blocks have to go, under `rotate` of one stage."""
        uncomputed, last = (
            min(self.num_uncomputed_tokens, self.context_limits.num_free_slots(self.cache)),
            self.stage.last_length,
        )
        if self.cache.passages:
            uncomputed = min(uncomputed, self.cache.passages[0].first - self.cache.num_computed_tokens)
        if last is None or self.rotation.policy != "rotate":
            return uncomputed
        computed = self.cache.num_computed_tokens
        if computed >= last:
            last = self.rotation.stage(computed + 1).last_length
        return uncomputed if last is None else min(uncomputed, last - computed)

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens behind the last known one that the next step may compute too, if somebody knows them by then.

        One more is drawn behind them, and no token past the end of the sequence is ever computed. Where frequencies
        depend on the length, all must be computed under those of the moment, and no block is dropped for them.
        """
        length = self.num_tokens
        num_free_slots = min(self.num_remaining_tokens, self.context_limits.num_free_slots(self.cache)) - 1
        last = self.stage.last_length
        return num_free_slots if last is None else min(num_free_slots, last - length)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that it may draw yet."""
        left = self.request.sampling.max_tokens - self.num_output_tokens
        return min(left, self.context_limits.longest - self.num_tokens)

    @property
    def num_shareable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: computed under `stage`, before any is dropped, and none whose row
        is wanted."""
        last = self.num_tokens if self.stage.last_length is None else self.stage.last_length
        wanted = self.num_tokens if self.prompt_logprobs is None else self.request.sampling.prompt_logprobs_from - 1
        return max(0, min(self.num_tokens, last, self.context_limits.floor, wanted))

    def stage_to_recompute(self) -> RotaryStage | None:
        """Under `recompute`, the stage of all tokens known now if it is another one: everything is to be computed anew."""
        last = self.stage.last_length
        if last is None or self.rotation.policy != "recompute" or self.num_tokens <= last:
            return None
        return self.rotation.stage(self.num_tokens)

    def stage_to_rerotate(self) -> RotaryStage | None:
        """Under `rotate`, the stage of the next token to compute if it is another one: cached keys are to be re-rotated."""
        last = self.stage.last_length
        if last is None or self.rotation.policy != "rotate" or self.cache.num_computed_tokens < last:
            return None
        return self.rotation.stage(self.cache.num_computed_tokens + 1)

    @property
    def will_rerotate(self) -> bool:
        """Whether cached keys are re-rotated before all tokens known now are computed."""
        last = self.stage.last_length
        return self.rotation.policy == "rotate" and last is not None and last < self.num_tokens

    @property
    def is_before_fork(self) -> bool:
        """Whether this is sample 0 and the others, if there are any, do not stand on their own yet."""
        return self.index == 0 and self.children != []

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of some prompt token are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def needs_full_prefill(self) -> bool:
        """Whether all of the prompt has to pass through the model, so that none of it may come from the prefix cache."""
        pooling = self.request.pooling
        scored = self.prompt_logprobs is not None and self.request.sampling.prompt_logprobs_from <= 1
        return scored or (pooling is not None and pooling.reads_every_token)

    def add_prompt_logprobs(self, start: int, entries: abc.Sequence[TokenLogprobs]) -> None:
        """Take the entries of the prompt tokens from index start + 1 on, skipping those known before a preemption."""
        known = self.prompt_logprobs
        if known is None or start + 1 > len(known):
            raise RuntimeError(f"sequence {self.seq_id}: prompt log-probabilities out of order at token {start + 1}")
        known.extend(entries[len(known) - start - 1 :])

    def append_tokens(self, token_ids: abc.Sequence[int]) -> tuple[int, FinishReason | None, int | None]:
        """Append drawn tokens until one ends the sequence.

        Returns how many were kept, the reason if the sequence has ended, and the eos or stop id if one ended it. The
        first `min_tokens` tokens never end it by their id, unless its grammar lets nothing else follow.
        """
        sampling = self.request.sampling
        least = sampling.min_tokens if sampling.grammar is None else 0  # the sampler masks what ends it too early
        for kept, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if token in self.stop_ids and self.num_output_tokens > least:
                return kept, "stop", token
            if self.num_output_tokens >= sampling.max_tokens or self.num_tokens >= self.context_limits.longest:
                return kept, "length", None
        return len(token_ids), None, None


def rank_key(seq: Sequence) -> tuple[int, float, int, int]:
    """Sort key: whoever ranks lower is served first and preempted last."""
    return seq.rank
