"""Decides what each step computes: one token budget over all sequences, with no prefill phase and no decode phase.

Responsible for who computes how much in a step: admission, chunking, preemption. What its result means for a sequence is
`results`' to say. It plans with plain data and knows neither tensors nor kernels nor text.

Every sequence has a rank: (priority, its caller's turn, arrival, sample index), lower is better. One step goes like this:

1. Sequences that need one token (running streams) get one each; what is left of the budget, bounded by the step timer,
   goes to prefills. If the budget is smaller than the running set, those scheduled least recently go first.
2. Waiting sequences are admitted best rank first, as long as there is a place and all of their known tokens fit beside
   what the running ones still need.
3. The prefill tokens are dealt out: half to the best-ranked prefill, so that it always advances, the rest to the
   shortest, so that a new arrival does not wait behind a long prompt. Where prompts are cut (`chunk_cuts`), chunks end at
   cuts, and a few tokens of the budget may be left over.
4. Blocks are taken in order of rank. Whoever finds none preempts the worst-ranked sequence that has not been planned
   yet, or gives up its own place if that is itself. So no planned sequence is ever preempted, the best-ranked one
   never is, and, since `add` refuses what does not fit alone, it always finishes.
5. Under speculation running streams add proposed tokens to theirs, from what budget and blocks are left.
6. Where running streams are alone and their steps are short, they draw several tokens in one step (`multi_step`).

Where frequencies depend on the length, a sequence that outgrows its rotary stage starts over in place (`recompute`), or
its cached keys are re-rotated before its next chunk (`rotate`), over several steps where one would last too long. Both
follow from its own tokens alone, so a preempted sequence comes to the same keys again by computing from the start,
re-rotations included. Where a sequence drops tokens, or what its tokens see, is a rule of its request (see `shifting`).
"""

from __future__ import annotations

import random
import time
from collections import abc
from typing import TYPE_CHECKING

from windlass.engine.api.config import SchedulerConfig
from windlass.engine.api.request import EngineRequest, EngineStats, RequestOutput
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.errors import DeadlineError, QueueFullError, RequestError
from windlass.engine.rotary.policy import RotaryPlan
from windlass.engine.rotary.slots import RotaryRows
from windlass.engine.scheduling.admission import Admission
from windlass.engine.scheduling.bursts import MultiStepDecoding
from windlass.engine.scheduling.chunk_cuts import NO_BOUNDARIES, ChunkBoundaries
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.places import SchedulerQueues
from windlass.engine.scheduling.plan import SchedulerOutput, Snapshot, StepResult
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep, SchedulerOutputBuilder
from windlass.engine.scheduling.requests import LiveRequests
from windlass.engine.scheduling.restoring import KVRestorer
from windlass.engine.scheduling.results import ResultProcessor
from windlass.engine.scheduling.reuse import NonPrefixReuse
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_key
from windlass.engine.scheduling.shifting import ContextLimits
from windlass.engine.scheduling.speculation import Speculation
from windlass.engine.scheduling.stages import FrequencyChanges
from windlass.engine.scheduling.step_timer import StepLimiter, split_prefill_budget, split_whole_prompt_budget
from windlass.engine.scheduling.steps_ahead import AsyncScheduling
from windlass.engine.scheduling.turns import FairQueue

if TYPE_CHECKING:
    from windlass.engine.cache.persist.store import BlockStore


def _by_id(adapter_id: int) -> bytes:
    return adapter_id.to_bytes(8, "little", signed=True)


class Scheduler:
    """Plans steps for requests; `schedule` and `update` alternate, and `add`, `abort`, `expire` may come in between.

    ahead: plans steps behind those that are not taken in yet. limits: what a sequence may hold, prompt and output together.
    namespace: digest of everything but the request that keys depend on (weights, dtypes, layout version). whole_prompts: a
    prompt is computed in one step or not at all, as its tokens see those behind them too. cuts: where chunks of prompts end.
    adapter_key: what tells an adapter from others, by its id. store: where blocks are kept that the cache loses, which `blocks`
    offers them to. clock: seconds, monotonic. fresh_seed: a seed for requests that bring none. draft_tracks_all_tokens: see `Speculation`.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        limits: ContextLimits,
        blocks: BlockManager,
        rotary: RotaryRows,
        namespace: bytes,
        eos_token_ids: tuple[int, ...],
        clock: abc.Callable[[], float] = time.monotonic,
        fresh_seed: abc.Callable[[], int] | None = None,
        whole_prompts: bool = False,
        cuts: ChunkBoundaries = NO_BOUNDARIES,
        adapter_key: abc.Callable[[int], bytes] = _by_id,
        store: BlockStore | None = None,
        draft_tracks_all_tokens: bool = False,
    ) -> None:
        self.config = config
        self._whole_prompts, self._cuts = whole_prompts, cuts
        self.limits = limits
        self.blocks = blocks
        self.step_limiter = StepLimiter(config.target_step_seconds, config.max_num_batched_tokens)
        self._clock = clock
        self.counters = SchedulerCounters()
        self._reuse = NonPrefixReuse(blocks, self.counters)
        self._kv_restorer = None if store is None else KVRestorer(blocks, store, self._reuse, clock)
        self._admission = Admission(config, limits, blocks, self._reuse, self._kv_restorer)
        self._frequency_changes = FrequencyChanges(blocks, rotary, self.counters, namespace, limits, adapter_key)
        self._output_builder = SchedulerOutputBuilder() if store is None else SchedulerOutputBuilder(store.take_saved)
        seeds = fresh_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._fair_queue = FairQueue()
        self._requests = LiveRequests(
            eos_token_ids, seeds, self._frequency_changes.new_handle, limits.context_limits, self._fair_queue
        )
        self._queues = SchedulerQueues(
            config.max_num_seqs, blocks, rotary, self._frequency_changes, self._output_builder, self.counters
        )
        self._speculation = Speculation(
            config.speculation,
            blocks,
            self.counters,
            config.max_num_batched_tokens,
            draft_tracks_all_tokens=draft_tracks_all_tokens,
        )
        # Proposals are the other way to several tokens a step, and are counted by the tokens between them.
        speculates = config.speculation.max_proposed_tokens > 0
        self._multi_step = MultiStepDecoding(0.0 if speculates else config.burst_seconds, blocks)
        self.ahead = AsyncScheduling(
            self._requests,
            self._queues,
            blocks,
            self._multi_step,
            self._output_builder,
            self.counters,
            proposes=speculates,
        )
        self._results = ResultProcessor(
            self._requests,
            self._queues,
            blocks,
            self._frequency_changes,
            self._speculation,
            self._reuse,
            self.counters,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self, request: EngineRequest, rotation: RotaryPlan, retained: object = None, other_waiting_tokens: int = 0
    ) -> None:
        """Queue a request under its rotary plan.

        kept: what is not to be dropped before it ends. beside: tokens of requests that wait elsewhere.
        Raises QueueFullError when too many wait, RequestError when the request could never run.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        self._admission.validate(request, rotation)
        if self.num_waiting >= self.config.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests are waiting already: try again later")
        self.check_waiting_tokens(request, other_waiting_tokens)
        self._queues.queue(self._requests.add(request, rotation, self._clock(), retained))

    def check_waiting_tokens(self, request: EngineRequest, other_waiting_tokens: int) -> None:
        """QueueFullError where it may not wait beside those that do, of which others keep so many tokens."""
        tokens = other_waiting_tokens + sum(seq.num_tokens for seq in self._queues.waiting)
        if tokens and tokens + len(request.prompt_token_ids) > self.config.max_waiting_tokens:
            raise QueueFullError(f"requests of {tokens:,} tokens are waiting already: try again later")

    def abort(self, request_id: str) -> None:
        """Forget a request and free what its samples hold, at once. Unknown ids are ignored."""
        for seq in self._requests.samples(request_id):
            self._results.end(seq)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request, without an output, and free what it holds at once. The others go on.

        The last one ends the request. As long as the prompt is computed for all samples, sample 0 computes it even if it
        has been ended itself, and a sample that has been ended never begins. Unknown ids and samples that have ended are
        ignored.
        """
        live = self._requests.samples(request_id)
        if live and live[0].is_before_fork:
            first, num_samples = live[0], live[0].request.sampling.n
            first.ended_samples |= {index} & set(range(num_samples))
            if len(first.ended_samples) == num_samples:
                self.abort(request_id)
                return
            if index == 0:
                return
        for seq in live:
            if seq.index == index:
                self._results.end(seq)

    def fail(self, request_id: str, error: Exception) -> list[RequestOutput]:
        """End a request with an error: its last output, or none if the id is unknown."""
        if request_id not in self._requests:
            return []
        self.abort(request_id)
        return [RequestOutput(request_id, error=error)]

    def fail_sequence(self, seq_id: int, error: Exception) -> list[RequestOutput]:
        """End the request that a sequence belongs to with an error; nothing if the sequence has ended already."""
        seq = self._requests.by_id.get(seq_id)
        return [] if seq is None else self.fail(seq.request.request_id, error)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose deadline lies before `now` (seconds, the scheduler's clock), all samples at once."""
        outputs = []
        for first in self._requests.overdue(now):
            request_id, cached = first.request.request_id, first.cached_tokens or 0
            self.abort(request_id)
            error = DeadlineError("the deadline passed before the request finished: allow it more time")
            outputs.append(RequestOutput(request_id, finish_reason="timeout", cached_tokens=cached, error=error))
        return outputs

    def wait_for_restore(self, seconds: float) -> None:
        """Where all that could be done waits for files to be read: until something has been, or so many seconds."""
        if self._kv_restorer is not None and self._is_waiting_for_restore:
            self._kv_restorer.wait(seconds)

    @property
    def _is_waiting_for_restore(self) -> bool:
        """Whether nothing runs, and a sequence is held back until files are read."""
        return self._kv_restorer is not None and bool(self._kv_restorer.fetches) and not self._queues.running

    def restart_sequences(self, seq_ids: abc.Iterable[int]) -> None:
        """Let sequences wait that had a part in a step whose pages are nobody's to read."""
        for seq in map(self._requests.by_id.__getitem__, seq_ids):
            seq.num_inflight_tokens = 0
            self._queues.preempt(seq, may_swap=False)

    def has_work(self) -> bool:
        """Whether any request is waiting, running or between `schedule` and `update`."""
        return len(self._requests) > 0

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """The sequences that run, the best rank first."""
        return self._queues.running

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    def live_sequences(self) -> list[Sequence]:
        """Every sample that has not ended yet."""
        return list(self._requests.by_id.values())

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. It computes nothing only if there is no work."""
        step = PlannedStep()
        if self._kv_restorer is not None:
            step.loaded = self._kv_restorer.take_loaded_blocks(streams=self.num_running > 0)
        for _ in range(self.config.max_num_seqs + 1):
            self._plan_chunks(step)
            if step.chunks or step.rerotations or not self.has_work() or self._is_waiting_for_restore:
                break
            # Those chosen have given up their places to better-ranked ones that were not: choose among the rest.
        self._speculation.extend(step)
        if not self._queues.waiting:
            self._multi_step.extend(step)
        # Rows of one token side by side, which is what attention kernels like; otherwise by rank.
        step.chunks.sort(key=lambda chunk: (len(chunk.seq.token_ids) - chunk.start > 1, chunk.num_proposed > 0))
        if step.chunks or step.rerotations:
            self.counters.count_step(step.num_passes * sum(chunk.num_tokens for chunk in step.chunks))
        return self._output_builder.build(step)

    def snapshot(self) -> Snapshot:
        """For whoever has missed a plan: all that those until now have said and that still matters."""
        return self._output_builder.snapshot(self._requests.by_id)

    def _plan_chunks(self, step: PlannedStep) -> None:
        """Take blocks for the chunks of one plan, best rank first, preempting from the other end."""
        plan = self._plan()
        pending = [seq for seq in self._queues.running if seq in plan]
        idle = [seq for seq in self._queues.running if seq not in plan]
        now = self._clock()
        while pending:
            seq = pending.pop(0)
            if step.rerotations and (seq.rerotations or seq.stage_to_rerotate() is not None):
                continue  # re-rotating keys takes time, and a step should not: one sequence a step
            if not self._can_compute(seq, step):
                continue
            self._drop_context(seq)
            fewest = plan[seq] if self._whole_prompts else 1
            num_tokens = self._frequency_changes.capacity(seq, plan[seq])
            while num_tokens < fewest:
                # Both lists are sorted by rank, so the worst of each is its last.
                worst = max([seq, *pending[-1:], *idle[-1:]], key=rank_key)
                self._queues.preempt(worst)
                if worst is seq:
                    break
                (pending if pending and pending[-1] is worst else idle).pop()
                num_tokens = self._frequency_changes.capacity(seq, plan[seq])
            if num_tokens >= fewest:
                self._frequency_changes.rerotate_if_due(seq, step)
                if not self._can_compute(seq, step):
                    continue
                step.copies += self.blocks.allocate(seq.cache, num_tokens)
                step.chunks.append(self._plan_chunk(seq, num_tokens, now))

    def _can_compute(self, seq: Sequence, step: PlannedStep) -> bool:
        """Whether `seq` may compute in this step, once as many of its keys are re-rotated as a step has time for."""
        if seq.rerotations:
            self._frequency_changes.continue_rerotation(seq, step, self.step_limiter.rerotation_limit)
        return not seq.rerotations

    def _drop_context(self, seq: Sequence) -> None:
        """Let `seq` give up the blocks that its next token does not need or leaves no room for."""
        dropped = seq.context_limits.drop_blocks(self.blocks, seq.cache)
        if dropped:
            self.counters.count_shift(dropped)

    def _plan(self) -> dict[Sequence, int]:
        """Tokens to try for each sequence this step, in no particular order; admits what can be admitted."""
        budget = self.config.max_num_batched_tokens
        if len(self._queues.running) >= budget and not self._whole_prompts:
            chosen = sorted(self._queues.running, key=lambda seq: (seq.last_scheduled_step, seq.rank))[:budget]
            return dict.fromkeys(chosen, 1)
        plan = {seq: 1 for seq in self._queues.running if seq.num_schedulable_tokens == 1}
        budget = min(budget - len(plan), self.step_limiter.limit(len(plan)))
        self._admit()
        prefills = [seq for seq in self._queues.running if seq not in plan]
        needs = [seq.num_schedulable_tokens for seq in prefills]
        if self._whole_prompts:
            grants = split_whole_prompt_budget(needs, budget)
        else:
            starts = [seq.cache.num_computed_tokens for seq in prefills]
            grants = split_prefill_budget(needs, budget, starts, self._cuts)
        plan.update((seq, granted) for seq, granted in zip(prefills, grants, strict=True) if granted)
        return plan

    def _plan_chunk(self, seq: Sequence, num_tokens: int, now: float) -> PlannedChunk:
        start = seq.cache.num_computed_tokens
        end = start + num_tokens
        seq.last_scheduled_step = self.counters.num_steps
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = now
            self.counters.queue_seconds.append(now - seq.arrival_time)
        self.counters.count_chunk(seq, num_tokens)
        wants_logprobs = seq.wants_prompt_logprobs and end >= len(seq.prompt_logprobs or ())
        return PlannedChunk(
            seq,
            start,
            num_tokens,
            samples=self._samples(seq) if end == seq.num_tokens else (),
            prompt_logprobs=seq.request.sampling.prompt_logprobs if wants_logprobs else None,
        )

    def _samples(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Who draws from the last row of `seq`: itself, and at the end of the prompt the other samples."""
        sampling = seq.request.sampling
        if sampling.max_tokens == 0:
            return ()
        if sampling.n > 1 and seq.index == 0 and seq.children is None:
            seq.children = self._requests.add_children(seq)
        return (seq, *(child for child in seq.children or () if child.status is SequenceStatus.FORKING))

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting sequences run, best rank first, until one finds no place or no room."""
        if self._fair_queue.order_changed():
            self._queues.sort_waiting()
        waiting, running = self._queues.waiting, self._queues.running
        while self._queues.has_capacity and (
            chosen := self._admission.choose(waiting, running, self.counters.num_steps)
        ):
            seq, full = chosen
            self._queues.start(seq)
            self._fair_queue.start_service(seq.queue_entry)
            if seq.cache.is_swapped_out:
                self._queues.swap_in(seq)
                seq.full_hit_end = 0
                continue
            looked_up = self.blocks.enable_prefix_caching and not seq.needs_full_prefill
            self.counters.count_hit(seq, full, looked_up=looked_up)
            self._reuse.attach_passage(seq)

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Tell how long a step took, before `update`; the next prefill chunks are sized by it, and the next burst."""
        self._multi_step.observe(output, seconds)
        if output.num_passes > 1 or output.ahead:
            return
        decodes = sum(1 for item in output.sequences if item.start + 1 == item.num_known_tokens)
        if output.rerotations:  # these take time that no token is to blame for
            self.step_limiter.observe_rerotations(sum(piece.end - piece.start for piece in output.rerotations), seconds)
        else:
            self.step_limiter.observe(output.num_tokens - output.num_draft_tokens, decodes, seconds)
        self._speculation.observe_step(output, seconds)

    # -- results -------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, results: list[StepResult]) -> list[RequestOutput]:
        """Take in what a planned step produced: see `ResultProcessor.process`."""
        if self._kv_restorer is not None:
            self._kv_restorer.note_applied()
        outputs = self._results.process(output, results, self._clock())
        self._fair_queue.advance(self.counters.prompt_tokens + self.counters.generation_tokens)
        return outputs

    # -- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and counters; drains the samples of seconds. `rotary_specs_live` is left to the core."""
        return self.counters.snapshot(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_blocks_total=self.blocks.num_blocks,
            kv_blocks_used=self.blocks.num_used_blocks,
            kv_cache_usage=self.blocks.usage,
        )
