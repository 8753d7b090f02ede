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
6. Where running streams are alone and their steps are short, they draw several tokens in one step (`bursts`).

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
from windlass.engine.rotary.slots import RotarySlots
from windlass.engine.scheduling.admission import Admission
from windlass.engine.scheduling.bursts import Bursts
from windlass.engine.scheduling.chunk_cuts import NO_CUTS, ChunkCuts
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.places import Places
from windlass.engine.scheduling.plan import SchedulerOutput, Snapshot, StepResult
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep, PlanWriter
from windlass.engine.scheduling.requests import LiveRequests
from windlass.engine.scheduling.restoring import Restoring
from windlass.engine.scheduling.results import ResultIntake
from windlass.engine.scheduling.reuse import PassageReuser
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_of
from windlass.engine.scheduling.shifting import ContextLimits
from windlass.engine.scheduling.speculation import Speculation
from windlass.engine.scheduling.stages import StageChanges
from windlass.engine.scheduling.step_timer import StepTimer, deal_prefill_tokens, deal_whole_prompts
from windlass.engine.scheduling.steps_ahead import StepsAhead
from windlass.engine.scheduling.turns import CallerTurns

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
    offers them to. clock: seconds, monotonic. fresh_seed: a seed for requests that bring none. draft_keeps_up: see `Speculation`.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        limits: ContextLimits,
        blocks: BlockManager,
        rotary: RotarySlots,
        namespace: bytes,
        eos_token_ids: tuple[int, ...],
        clock: abc.Callable[[], float] = time.monotonic,
        fresh_seed: abc.Callable[[], int] | None = None,
        whole_prompts: bool = False,
        cuts: ChunkCuts = NO_CUTS,
        adapter_key: abc.Callable[[int], bytes] = _by_id,
        store: BlockStore | None = None,
        draft_keeps_up: bool = False,
    ) -> None:
        self.config = config
        self._whole_prompts, self._cuts = whole_prompts, cuts
        self.limits = limits
        self.blocks = blocks
        self.timer = StepTimer(config.target_step_seconds, config.max_num_batched_tokens)
        self._clock = clock
        self.counters = SchedulerCounters()
        self._reuse = PassageReuser(blocks, self.counters)
        self._restoring = None if store is None else Restoring(blocks, store, self._reuse, clock)
        self._admission = Admission(config, limits, blocks, self._reuse, self._restoring)
        self._stages = StageChanges(blocks, rotary, self.counters, namespace, limits, adapter_key)
        self._writer = PlanWriter() if store is None else PlanWriter(store.take_saved)
        seeds = fresh_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._turns = CallerTurns()
        self._requests = LiveRequests(eos_token_ids, seeds, self._stages.new_handle, limits.held, self._turns)
        self._places = Places(config.max_num_seqs, blocks, rotary, self._stages, self._writer, self.counters)
        self._speculation = Speculation(
            config.speculation, blocks, self.counters, config.max_num_batched_tokens, draft_keeps_up=draft_keeps_up
        )
        # Proposals are the other way to several tokens a step, and are counted by the tokens between them.
        speculates = config.speculation.most_proposed > 0
        self._bursts = Bursts(0.0 if speculates else config.burst_seconds, blocks)
        self.ahead = StepsAhead(
            self._requests, self._places, blocks, self._bursts, self._writer, self.counters, proposes=speculates
        )
        self._intake = ResultIntake(
            self._requests,
            self._places,
            blocks,
            self._stages,
            self._speculation,
            self._reuse,
            self.counters,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, rotation: RotaryPlan, kept: object = None, beside: int = 0) -> None:
        """Queue a request under its rotary plan.

        kept: what is not to be dropped before it ends. beside: tokens of requests that wait elsewhere.
        Raises QueueFullError when too many wait, RequestError when the request could never run.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        self._admission.validate(request, rotation)
        if self.num_waiting >= self.config.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests are waiting already: try again later")
        self.check_waiting_tokens(request, beside)
        self._places.queue(self._requests.add(request, rotation, self._clock(), kept))

    def check_waiting_tokens(self, request: EngineRequest, beside: int) -> None:
        """QueueFullError where it may not wait beside those that do, of which others keep so many tokens."""
        tokens = beside + sum(seq.num_tokens for seq in self._places.waiting)
        if tokens and tokens + len(request.prompt_token_ids) > self.config.max_waiting_tokens:
            raise QueueFullError(f"requests of {tokens:,} tokens are waiting already: try again later")

    def abort(self, request_id: str) -> None:
        """Forget a request and free what its samples hold, at once. Unknown ids are ignored."""
        for seq in self._requests.samples(request_id):
            self._intake.end(seq)

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
                self._intake.end(seq)

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

    def wait_for_files(self, seconds: float) -> None:
        """Where all that could be done waits for files to be read: until something has been, or so many seconds."""
        if self._restoring is not None and self._waits_for_files:
            self._restoring.wait(seconds)

    @property
    def _waits_for_files(self) -> bool:
        """Whether nothing runs, and a sequence is held back until files are read."""
        return self._restoring is not None and bool(self._restoring.fetches) and not self._places.running

    def begin_again(self, seq_ids: abc.Iterable[int]) -> None:
        """Let sequences wait that had a part in a step whose pages are nobody's to read."""
        for seq in map(self._requests.by_id.__getitem__, seq_ids):
            seq.num_planned_ahead = 0
            self._places.preempt(seq, parks=False)

    def has_work(self) -> bool:
        """Whether any request is waiting, running or between `schedule` and `update`."""
        return len(self._requests) > 0

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """The sequences that run, the best rank first."""
        return self._places.running

    @property
    def num_running(self) -> int:
        return len(self._places.running)

    @property
    def num_waiting(self) -> int:
        return len(self._places.waiting)

    def live_sequences(self) -> list[Sequence]:
        """Every sample that has not ended yet."""
        return list(self._requests.by_id.values())

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. It computes nothing only if there is no work."""
        step = PlannedStep()
        if self._restoring is not None:
            step.loaded = self._restoring.bring_in(streams=self.num_running > 0)
        for _ in range(self.config.max_num_seqs + 1):
            self._plan_chunks(step)
            if step.chunks or step.rerotations or not self.has_work() or self._waits_for_files:
                break
            # Those chosen have given up their places to better-ranked ones that were not: choose among the rest.
        self._speculation.extend(step)
        if not self._places.waiting:
            self._bursts.extend(step)
        # Rows of one token side by side, which is what attention kernels like; otherwise by rank.
        step.chunks.sort(key=lambda chunk: (len(chunk.seq.token_ids) - chunk.start > 1, chunk.num_proposed > 0))
        if step.chunks or step.rerotations:
            self.counters.count_step(step.passes * sum(chunk.num_tokens for chunk in step.chunks))
        return self._writer.write(step)

    def snapshot(self) -> Snapshot:
        """For whoever has missed a plan: all that those until now have said and that still matters."""
        return self._writer.snapshot(self._requests.by_id)

    def _plan_chunks(self, step: PlannedStep) -> None:
        """Take blocks for the chunks of one plan, best rank first, preempting from the other end."""
        plan = self._plan()
        pending = [seq for seq in self._places.running if seq in plan]
        idle = [seq for seq in self._places.running if seq not in plan]
        now = self._clock()
        while pending:
            seq = pending.pop(0)
            if step.rerotations and (seq.rerotations or seq.due_rerotation() is not None):
                continue  # re-rotating keys takes time, and a step should not: one sequence a step
            if not self._goes_on(seq, step):
                continue
            self._make_room(seq)
            fewest = plan[seq] if self._whole_prompts else 1
            num_tokens = self._stages.capacity(seq, plan[seq])
            while num_tokens < fewest:
                # Both lists are sorted by rank, so the worst of each is its last.
                worst = max([seq, *pending[-1:], *idle[-1:]], key=rank_of)
                self._places.preempt(worst)
                if worst is seq:
                    break
                (pending if pending and pending[-1] is worst else idle).pop()
                num_tokens = self._stages.capacity(seq, plan[seq])
            if num_tokens >= fewest:
                self._stages.rerotate_if_due(seq, step)
                if not self._goes_on(seq, step):
                    continue
                step.copies += self.blocks.allocate(seq.cache, num_tokens)
                step.chunks.append(self._plan_chunk(seq, num_tokens, now))

    def _goes_on(self, seq: Sequence, step: PlannedStep) -> bool:
        """Whether `seq` may compute in this step, once as many of its keys are re-rotated as a step has time for."""
        if seq.rerotations:
            self._stages.go_on_rerotating(seq, step, self.timer.rerotation_limit)
        return not seq.rerotations

    def _make_room(self, seq: Sequence) -> None:
        """Let `seq` give up the blocks that its next token does not need or leaves no room for."""
        dropped = seq.held.make_room(self.blocks, seq.cache)
        if dropped:
            self.counters.count_shift(dropped)

    def _plan(self) -> dict[Sequence, int]:
        """Tokens to try for each sequence this step, in no particular order; admits what can be admitted."""
        budget = self.config.max_num_batched_tokens
        if len(self._places.running) >= budget and not self._whole_prompts:
            chosen = sorted(self._places.running, key=lambda seq: (seq.last_step, seq.rank))[:budget]
            return dict.fromkeys(chosen, 1)
        plan = {seq: 1 for seq in self._places.running if seq.num_due_tokens == 1}
        budget = min(budget - len(plan), self.timer.limit(len(plan)))
        self._admit()
        prefills = [seq for seq in self._places.running if seq not in plan]
        needs = [seq.num_due_tokens for seq in prefills]
        if self._whole_prompts:
            grants = deal_whole_prompts(needs, budget)
        else:
            starts = [seq.cache.num_computed_tokens for seq in prefills]
            grants = deal_prefill_tokens(needs, budget, starts, self._cuts)
        plan.update((seq, granted) for seq, granted in zip(prefills, grants, strict=True) if granted)
        return plan

    def _plan_chunk(self, seq: Sequence, num_tokens: int, now: float) -> PlannedChunk:
        start = seq.cache.num_computed_tokens
        end = start + num_tokens
        seq.last_step = self.counters.num_steps
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
        if self._turns.have_moved():
            self._places.sort_waiting()
        waiting, running = self._places.waiting, self._places.running
        while self._places.is_free and (chosen := self._admission.choose(waiting, running, self.counters.num_steps)):
            seq, full = chosen
            self._places.start(seq)
            self._turns.begin(seq.turn)
            if seq.cache.is_parked:
                self._places.unpark(seq)
                seq.full_hit_end = 0
                continue
            looked_up = self.blocks.enable_prefix_caching and not seq.needs_every_row
            self.counters.count_hit(seq, full, looked_up=looked_up)
            self._reuse.take_up(seq)

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Tell how long a step took, before `update`; the next prefill chunks are sized by it, and the next burst."""
        self._bursts.observe(output, seconds)
        if output.passes > 1 or output.ahead:
            return
        decodes = sum(1 for item in output.sequences if item.start + 1 == item.num_known_tokens)
        if output.rerotations:  # these take time that no token is to blame for
            self.timer.observe_rerotations(sum(piece.end - piece.start for piece in output.rerotations), seconds)
        else:
            self.timer.observe(output.num_tokens - output.num_draft_tokens, decodes, seconds)
        self._speculation.observe_step(output, seconds)

    # -- results -------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, results: list[StepResult]) -> list[RequestOutput]:
        """Take in what a planned step produced: see `ResultIntake.take`."""
        if self._restoring is not None:
            self._restoring.note_followed()
        outputs = self._intake.take(output, results, self._clock())
        self._turns.serve(self.counters.prompt_tokens + self.counters.generation_tokens)
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
