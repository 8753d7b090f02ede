"""Decides what each step computes: one token budget over all sequences, with no prefill phase and no decode phase.

Responsible for the queue, admission, chunking, preemption, forking into samples, finishing, and the counters. It plans
with plain data and knows neither tensors nor kernels nor text.

Every sequence has a rank: (priority, arrival, sample index), lower is better. One step goes like this:

1. Sequences that need one token (running streams) get one each; what is left of the budget, bounded by the step timer,
   goes to prefills. If the budget is smaller than the running set, those scheduled least recently go first.
2. Waiting sequences are admitted best rank first, as long as there is a place and all of their known tokens fit beside
   what the running ones still need.
3. The prefill tokens are dealt out: half to the best-ranked prefill, so that it always advances, the rest to the
   shortest, so that a new arrival does not wait behind a long prompt.
4. Blocks are taken in order of rank. Whoever finds none preempts the worst-ranked sequence that has not been planned
   yet, or gives up its own place if that is itself. So no planned sequence is ever preempted, the best-ranked one
   never is, and, since `add` refuses what does not fit alone, it always finishes.
5. Under speculation running streams add proposed tokens to theirs, from what budget and blocks are left.

Where frequencies depend on the length, a sequence that outgrows its rotary stage starts over in place (`recompute`), or
its cached keys are re-rotated before its next chunk (`rotate`). Both follow from its own tokens alone, so a preempted
sequence comes to the same keys again by computing from the start, re-rotations included.
"""

from __future__ import annotations

import random
import time
from bisect import insort
from collections import abc
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.engine.api.config import SchedulerConfig
from windlass.engine.api.request import EngineRequest, EngineStats, RequestOutput
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.errors import DeadlineError, QueueFullError, RequestError
from windlass.engine.rotary.slots import RotarySlots
from windlass.engine.scheduling.admission import Admission
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.deadlines import Deadlines
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, Snapshot, StepResult
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep, PlanWriter
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_of
from windlass.engine.scheduling.speculation import Speculation
from windlass.engine.scheduling.stages import StageChanges
from windlass.engine.scheduling.step_timer import StepTimer, deal_prefill_tokens

if TYPE_CHECKING:
    from windlass.engine.rotary.policy import RotaryPlan


class Scheduler:
    """Plans steps for requests; `schedule` and `update` alternate, and `add`, `abort`, `expire` may come in between.

    max_model_len: the longest sequence, prompt and output together.
    namespace: digest of everything but the request that keys depend on (weights, dtypes, layout version).
    clock: seconds, monotonic. fresh_seed: a seed for requests that bring none.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        max_model_len: int,
        blocks: BlockManager,
        rotary: RotarySlots,
        namespace: bytes,
        eos_token_ids: tuple[int, ...],
        clock: abc.Callable[[], float] = time.monotonic,
        fresh_seed: abc.Callable[[], int] | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.blocks = blocks
        self.timer = StepTimer(config.target_step_seconds, config.max_num_batched_tokens)
        self._admission = Admission(config, max_model_len, blocks)
        self._rotary = rotary
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._fresh_seed = fresh_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._requests: dict[str, list[Sequence]] = {}  # live samples of each request
        self._sequences: dict[int, Sequence] = {}  # live samples by id
        self._waiting: list[Sequence] = []  # sorted by rank
        self._running: list[Sequence] = []  # sorted by rank
        self._deadlines = Deadlines()
        self._next_seq_id = 0
        self._next_arrival = 0
        self.counters = SchedulerCounters()
        self._stages = StageChanges(blocks, rotary, self.counters, namespace)
        self._writer = PlanWriter()
        self._speculation = Speculation(
            config.speculation,
            blocks,
            self.counters,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, rotation: RotaryPlan) -> None:
        """Queue a request under its rotary plan.

        Raises QueueFullError when too many wait, RequestError when the request could never run.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        self._admission.validate(request, rotation)
        if len(self._waiting) >= self.config.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already: try again later")
        seed = request.sampling.seed if request.sampling.seed is not None else self._fresh_seed()
        stage = rotation.stage(len(request.prompt_token_ids))
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self._eos_token_ids
        seq = Sequence(
            seq_id=self._new_seq_id(),
            request=request,
            index=0,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            rotation=rotation,
            stage=stage,
            seed=seed,
            cache=self._stages.new_handle(request, stage),
            stop_ids=stop_ids,
            arrival_number=self._next_arrival,
            arrival_time=self._clock(),
        )
        self._next_arrival += 1
        self._requests[request.request_id] = [seq]
        self._sequences[seq.seq_id] = seq
        insort(self._waiting, seq, key=rank_of)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id, self._requests, len(self._requests))

    def abort(self, request_id: str) -> None:
        """Forget a request and free what its samples hold, at once. Unknown ids are ignored."""
        for seq in list(self._requests.get(request_id, ())):
            self._end(seq)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request, without an output, and free what it holds at once. The others go on.

        The last one ends the request. As long as the prompt is computed for all samples, sample 0 computes it even if it
        has been ended itself, and a sample that has been ended never begins. Unknown ids and samples that have ended are ignored.
        """
        live = self._requests.get(request_id, [])
        if live and live[0].is_before_fork:
            first, num_samples = live[0], live[0].request.sampling.n
            first.ended_samples |= {index} & set(range(num_samples))
            if len(first.ended_samples) == num_samples:
                self.abort(request_id)
            elif index == 0:
                return
        for seq in list(live):
            if seq.index == index:
                self._end(seq)

    def fail(self, request_id: str, error: Exception) -> list[RequestOutput]:
        """End a request with an error: its last output, or none if the id is unknown."""
        if request_id not in self._requests:
            return []
        self.abort(request_id)
        return [RequestOutput(request_id, error=error)]

    def fail_sequence(self, seq_id: int, error: Exception) -> list[RequestOutput]:
        """End the request that a sequence belongs to with an error; nothing if the sequence has ended already."""
        seq = self._sequences.get(seq_id)
        return [] if seq is None else self.fail(seq.request.request_id, error)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose deadline lies before `now` (seconds, the scheduler's clock), all samples at once."""
        outputs = []
        for request_id in self._deadlines.passed(now):
            live = self._requests.get(request_id)
            # The id may have been used again since, with a later deadline or none.
            if live and live[0].request.deadline is not None and live[0].request.deadline <= now:
                cached = live[0].cached_tokens or 0
                self.abort(request_id)
                error = DeadlineError("the deadline passed before the request finished: allow it more time")
                outputs.append(RequestOutput(request_id, finish_reason="timeout", cached_tokens=cached, error=error))
        return outputs

    def has_work(self) -> bool:
        """Whether any request is waiting, running or between `schedule` and `update`."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def live_sequences(self) -> list[Sequence]:
        """Every sample not ended yet, for integrity checks."""
        return list(self._sequences.values())

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. It computes nothing only if there is no work."""
        step = PlannedStep()
        for _ in range(self.config.max_num_seqs + 1):
            self._plan_chunks(step)
            if step.chunks:
                break
            # Those chosen have given up their places to better-ranked ones that were not: choose among the rest.
        self._speculation.extend(step)
        # Rows of one token side by side, which is what attention kernels like; otherwise by rank.
        step.chunks.sort(key=lambda chunk: (chunk.seq.num_uncomputed_tokens > 1, bool(chunk.draft)))
        if step.chunks:
            self.counters.num_steps += 1
        return self._writer.write(step)

    def snapshot(self) -> Snapshot:
        """For whoever has missed a plan: all that those until now have said and that still matters."""
        return self._writer.snapshot(self._sequences)

    def _plan_chunks(self, step: PlannedStep) -> None:
        """Take blocks for the chunks of one plan, best rank first, preempting from the other end."""
        plan = self._plan()
        pending = [seq for seq in self._running if seq in plan]
        idle = [seq for seq in self._running if seq not in plan]
        now = self._clock()
        while pending:
            seq = pending.pop(0)
            if step.rerotations and seq.due_rerotation() is not None:
                continue  # re-rotating keys takes time, and a step should not: one sequence a step
            num_tokens = self._stages.capacity(seq, plan[seq])
            while num_tokens == 0:
                # Both lists are sorted by rank, so the worst of each is its last.
                worst = max([seq, *pending[-1:], *idle[-1:]], key=rank_of)
                self._preempt(worst)
                if worst is seq:
                    break
                (pending if pending and pending[-1] is worst else idle).pop()
                num_tokens = self._stages.capacity(seq, plan[seq])
            if num_tokens > 0:
                self._stages.rerotate_if_due(seq, step)
                step.copies += self.blocks.allocate(seq.cache, num_tokens)
                step.chunks.append(self._plan_chunk(seq, num_tokens, now))

    def _plan(self) -> dict[Sequence, int]:
        """Tokens to try for each sequence this step, in no particular order; admits what can be admitted."""
        budget = self.config.max_num_batched_tokens
        if len(self._running) >= budget:
            chosen = sorted(self._running, key=lambda seq: (seq.last_step, seq.rank))[:budget]
            return dict.fromkeys(chosen, 1)
        plan = {seq: 1 for seq in self._running if seq.num_due_tokens == 1}
        budget = min(budget - len(plan), self.timer.limit(len(plan)))
        self._admit()
        prefills = [seq for seq in self._running if seq not in plan]
        grants = deal_prefill_tokens([seq.num_due_tokens for seq in prefills], budget)
        plan.update((seq, granted) for seq, granted in zip(prefills, grants, strict=True) if granted)
        return plan

    def _plan_chunk(self, seq: Sequence, num_tokens: int, now: float) -> PlannedChunk:
        end = seq.cache.num_computed_tokens + num_tokens
        seq.last_step = self.counters.num_steps
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = now
            self.counters.queue_seconds.append(now - seq.arrival_time)
        self.counters.count_chunk(seq, num_tokens)
        wants_logprobs = seq.wants_prompt_logprobs and end >= len(seq.prompt_logprobs or ())
        return PlannedChunk(
            seq,
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
            seq.children = [
                self._new_child(seq, index) for index in range(1, sampling.n) if index not in seq.ended_samples
            ]
        return (seq, *(seq.children or ()))

    def _new_child(self, parent: Sequence, index: int) -> Sequence:
        child = Sequence(
            seq_id=self._new_seq_id(),
            request=parent.request,
            index=index,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            rotation=parent.rotation,
            stage=parent.stage,
            seed=parent.seed,
            cache=self._stages.new_handle(parent.request, parent.stage),
            stop_ids=parent.stop_ids,
            arrival_number=parent.arrival_number,
            arrival_time=parent.arrival_time,
            status=SequenceStatus.FORKING,
            cached_tokens=parent.cached_tokens,
            first_scheduled_time=parent.first_scheduled_time,
        )
        self._requests[parent.request.request_id].append(child)
        self._sequences[child.seq_id] = child
        return child

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    # -- admission and preemption --------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting sequences run, best rank first, until one finds no place or no room."""
        while len(self._running) < self.config.max_num_seqs:
            chosen = self._admission.choose(self._waiting, self._running, self.counters.num_steps)
            if chosen is None:
                return
            seq, full = chosen
            self._waiting.remove(seq)
            self._start(seq)
            looked_up = self.blocks.enable_prefix_caching and seq.prompt_logprobs is None
            self.counters.count_hit(seq, full, looked_up=looked_up)

    def _start(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
        insort(self._running, seq, key=rank_of)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything but its tokens from a sequence; its rank puts it back where it stood in the queue."""
        self._unlink(seq)
        seq.status = SequenceStatus.WAITING
        seq.waits_for = None
        self._stages.rewind(seq)
        insort(self._waiting, seq, key=rank_of)
        self.counters.num_preemptions += 1

    def _unlink(self, seq: Sequence) -> None:
        """Free what `seq` holds and take it off the list it is on."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
            self._rotary.release(seq.rotary_id)
            seq.rotary_id = -1
        elif seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._writer.remove(seq.seq_id)
        self.blocks.free(seq.cache)

    def _end(self, seq: Sequence) -> None:
        """Forget a sample; the last one ends its request."""
        self._unlink(seq)
        seq.status = SequenceStatus.FINISHED
        del self._sequences[seq.seq_id]
        live = self._requests[seq.request.request_id]
        live.remove(seq)
        if not live:
            del self._requests[seq.request.request_id]

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Tell how long a step took, before `update`; the next prefill chunks are sized by it."""
        decodes = sum(1 for item in output.sequences if item.start + 1 == item.num_known_tokens)
        if not output.rerotations:  # re-rotating keys takes time that no token is to blame for
            self.timer.observe(output.num_tokens - output.num_draft_tokens, decodes, seconds)

    # -- results -------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, results: list[StepResult]) -> list[RequestOutput]:
        """Take in what a planned step produced: commit blocks, append tokens, fork, finish.

        Results of sequences that have ended since (an abort, a deadline) are ignored. Raises RuntimeError if a result
        that was asked for is missing.
        """
        now = self._clock()
        by_id = {result.seq_id: result for result in results}
        outputs: list[RequestOutput] = []
        for item in output.sequences:
            seq = self._sequences.get(item.seq_id)
            if seq is None:
                continue
            if item.draft:
                outputs.append(self._take_verified(seq, item, _result(by_id, seq), now))
                continue
            self._settle(seq, item.start + item.num_tokens)
            if item.prompt_logprobs is not None:
                seq.add_prompt_logprobs(item.start, _result(by_id, seq).prompt_logprobs or ())
            if seq.request.sampling.max_tokens == 0 and seq.num_uncomputed_tokens == 0:
                outputs += self._finish_scoring(seq, now)
            elif item.samples:
                outputs += self._take_samples(seq, by_id, now)
        return outputs

    def _settle(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Book that the keys of so many tokens are final."""
        seq.num_seen_tokens = max(seq.num_seen_tokens, num_computed_tokens)
        self.blocks.settle(seq.cache, seq.token_ids, num_computed_tokens)

    def _take_verified(self, seq: Sequence, item: ScheduledSequence, result: StepResult, now: float) -> RequestOutput:
        """Append what a proposal has come to. Keys past the tokens that stand are void: the next step overwrites them."""
        self._speculation.observe(seq, len(item.draft), len(result.token_ids) - 1)
        output = self._append(seq, result, now, start=item.start)
        if output.finish_reason is None:
            self._stages.start_over_if_outgrown(seq)
        return output

    def _take_samples(self, seq: Sequence, results: dict[int, StepResult], now: float) -> list[RequestOutput]:
        """Append the drawn tokens of `seq` and of the samples that fork from it here."""
        children = [child for child in seq.children or () if child.status is SequenceStatus.FORKING]
        if seq.children is not None:
            seq.children = []
        for child in children:  # all of them before `seq` may finish and free its blocks
            self.blocks.fork(seq.cache, child.cache)
            child.num_seen_tokens = seq.num_seen_tokens
        samples = [seq, *children]
        if seq.index in seq.ended_samples:  # it has computed the prompt for the others
            self._note_first_token(seq, now)
            self._end(seq)
            samples = children
        outputs = [self._append(sample, _result(results, sample), now) for sample in samples]
        for child in children:
            if child.status is not SequenceStatus.FORKING:
                continue
            if len(self._running) < self.config.max_num_seqs and self.blocks.capacity(child.cache, 1):
                self._start(child)
            else:
                self._preempt(child)
        for sample in samples:
            if sample.status is not SequenceStatus.FINISHED:
                self._stages.start_over_if_outgrown(sample)
        return outputs

    def _append(self, seq: Sequence, result: StepResult, now: float, start: int | None = None) -> RequestOutput:
        """start: of a chunk with proposed tokens, whose keys become final with the tokens drawn, but for the last one's."""
        if not result.token_ids:
            raise RuntimeError(f"the step drew no token for sequence {seq.seq_id}")
        kept, reason, stop_id = seq.append_tokens(result.token_ids, self.max_model_len)
        if start is not None:
            self._settle(seq, start + kept)
        self.counters.generation_tokens += kept
        self._note_first_token(seq, now)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        if reason is not None:
            self._finish(seq, now)
        return RequestOutput(
            seq.request.request_id,
            index=seq.index,
            token_ids=tuple(result.token_ids[:kept]),
            logprobs=None if result.logprobs is None else result.logprobs[:kept],
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            finish_reason=reason,
            stop_token_id=stop_id,
            cached_tokens=seq.cached_tokens or 0,
            rotary=None if reason is None else seq.rotation.report(seq.stage, seq.cache.num_rerotations),
        )

    def _finish_scoring(self, seq: Sequence, now: float) -> list[RequestOutput]:
        """End a request that asked for no tokens, its prompt being computed; every sample is equally empty."""
        self._note_first_token(seq, now)
        self._finish(seq, now)
        first = RequestOutput(
            seq.request.request_id,
            prompt_logprobs=None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs),
            finish_reason="length",
            cached_tokens=seq.cached_tokens or 0,
            rotary=seq.rotation.report(seq.stage, seq.cache.num_rerotations),
        )
        rest = (replace(first, index=index, prompt_logprobs=None) for index in range(1, seq.request.sampling.n))
        return [output for output in (first, *rest) if output.index not in seq.ended_samples]

    def _note_first_token(self, seq: Sequence, now: float) -> None:
        if seq.first_token_time is None:
            seq.first_token_time = now
            if seq.index == 0 and seq.first_scheduled_time is not None:
                self.counters.prefill_seconds.append(now - seq.first_scheduled_time)

    def _finish(self, seq: Sequence, now: float) -> None:
        self._end(seq)
        if seq.request.request_id not in self._requests and seq.first_token_time is not None:
            self.counters.decode_seconds.append(now - seq.first_token_time)

    # -- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and counters; drains the samples of seconds. `rotary_specs_live` is left to the core."""
        return self.counters.snapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_total=self.blocks.num_blocks,
            kv_blocks_used=self.blocks.num_used_blocks,
            kv_cache_usage=self.blocks.usage,
        )


def _result(results: dict[int, StepResult], seq: Sequence) -> StepResult:
    result = results.get(seq.seq_id)
    if result is None:
        raise RuntimeError(f"the step reported no result for sequence {seq.seq_id}")
    return result
