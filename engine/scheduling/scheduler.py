"""Scheduler: one token budget over all sequences, without separate prefill and decode phases.

Contains admission control, the planning of a step, and the processing of its results. It works on plain data, without tensors,
kernels or text.

Every sequence has a rank (priority, start tag of fair queueing, arrival, sample index); lower is better. Planning of a step:

1. Sequences that need one token (running streams) get one each. The rest of the budget, bounded by the step limiter, goes to
   prefills. If the budget is smaller than the running set, the sequences scheduled least recently go first.
2. Waiting sequences are admitted in order of rank while fewer than `max_num_seqs` run and all of their known tokens fit in
   addition to those of the running sequences.
3. Prefill tokens are divided: half to the best-ranked prefill, so that it always advances, the rest to the shortest, so that a
   new arrival does not wait behind a long prompt. Chunk boundaries (`chunked_prefill`) may leave a few tokens unused.
4. Blocks are allocated in order of rank. A sequence that finds none preempts the worst-ranked sequence not yet planned, or
   itself. Therefore neither a planned sequence nor the best-ranked one is ever preempted. The latter always finishes, since
   `add` rejects requests that do not fit alone.
5. With speculative decoding, running streams add proposed tokens from the remaining budget and blocks.
6. Where only running streams are scheduled and steps are short, a step has several forward passes (multi-step decoding).

Where frequencies depend on the length, a sequence that outgrows its stage is recomputed in place (`recompute`), or its cached
keys are re-rotated before the next chunk (`rotate`), over several steps if needed. Both depend on the sequence's own tokens only,
so a preempted sequence recomputes the same keys. When a sequence drops tokens is a rule of its request (`context_shift`).
"""

from __future__ import annotations

import random
import time
from collections import abc
from dataclasses import replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_store import BlockStore
from windlass.engine.errors import DeadlineError, QueueFullError, RequestError
from windlass.engine.interface.config import SchedulerConfig
from windlass.engine.interface.context import ContextSizes
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryRows
from windlass.engine.scheduling.async_scheduling import AsyncScheduling, MultiStepDecoding
from windlass.engine.scheduling.chunked_prefill import (
    NO_BOUNDARIES,
    ChunkBoundaries,
    StepLimiter,
    split_prefill_budget,
    split_whole_prompt_budget,
)
from windlass.engine.scheduling.context_shift import context_report, drop_blocks
from windlass.engine.scheduling.fairness import FairQueue
from windlass.engine.scheduling.frequency_changes import FrequencyChanges
from windlass.engine.scheduling.kv_restore import KVRestorer, NonPrefixReuse
from windlass.engine.scheduling.request_queue import LiveRequests, SchedulerQueues
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import (
    PlannedChunk,
    SchedulerOutput,
    SchedulerOutputBuilder,
    Snapshot,
    StepResult,
)
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_key
from windlass.engine.scheduling.speculation import Speculation

_RETRY_STEPS = 8  # steps after which a sequence that did not fit is matched against the prefix cache again


class Scheduler:
    """Plans steps for requests. `schedule` and `update` alternate, except for async steps (see `AsyncScheduling`).

    limits: what a sequence may hold, prompt and output together. namespace: digest of all that keys depend on apart from the
    request (weights, dtypes, layout version). eos_token_ids: tokens that end an output unless a request ignores them.
    clock: seconds, monotonic. fresh_seed: returns a seed for requests without one. whole_prompts: a prompt is computed in one
    step, because its tokens also attend to later ones. chunk_boundaries: where prefill chunks may end.
    adapter_key: digest of an adapter, by its id. store: the disk and host tiers, to which `blocks` offers full blocks.
    draft_tracks_all_tokens: see `Speculation`.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        limits: ContextSizes,
        blocks: BlockManager,
        rotary: RotaryRows,
        namespace: bytes,
        eos_token_ids: tuple[int, ...],
        clock: abc.Callable[[], float] = time.monotonic,
        fresh_seed: abc.Callable[[], int] | None = None,
        whole_prompts: bool = False,
        chunk_boundaries: ChunkBoundaries = NO_BOUNDARIES,
        adapter_key: abc.Callable[[int], bytes] = lambda adapter_id: adapter_id.to_bytes(8, "little", signed=True),
        store: BlockStore | None = None,
        draft_tracks_all_tokens: bool = False,
    ) -> None:
        self.config = config
        self._whole_prompts, self._chunk_boundaries = whole_prompts, chunk_boundaries
        self.limits = limits
        self.blocks = blocks
        self.step_limiter = StepLimiter(config.target_step_seconds, config.max_num_batched_tokens)
        self._clock = clock
        self.counters = counters = SchedulerCounters()
        self._reuse = NonPrefixReuse(blocks, counters)
        self._kv_restorer = None if store is None else KVRestorer(blocks, store, self._reuse, clock)
        self._frequency_changes = FrequencyChanges(blocks, rotary, counters, namespace, limits, adapter_key)
        self._output_builder = SchedulerOutputBuilder() if store is None else SchedulerOutputBuilder(store.take_saved)
        seeds = fresh_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._fair_queue = FairQueue()
        self._requests = LiveRequests(
            frozenset(eos_token_ids), seeds, self._frequency_changes.new_cache, limits.size, self._fair_queue
        )
        self._queues = SchedulerQueues(
            config.max_num_seqs, blocks, rotary, self._frequency_changes, self._output_builder, counters
        )
        self._speculation = Speculation(
            config.speculation, blocks, counters, config.max_num_batched_tokens, draft_tracks_all_tokens
        )
        # Proposals are the other way to compute several tokens per step, and need the result of each step.
        speculates = config.speculation.max_proposed_tokens > 0
        self._multi_step = MultiStepDecoding(0.0 if speculates else config.burst_seconds, blocks)
        self.async_scheduling = AsyncScheduling(
            self._requests, self._queues, blocks, self._multi_step, self._output_builder, counters, speculates
        )
        # The waiting sequence that did not fit last, the step, and the blocks that were available.
        self._blocked: tuple[int, int, list[int]] | None = None

    # -- requests --

    def add(
        self, request: EngineRequest, rotation: RotaryPlan, retained: object = None, other_waiting_tokens: int = 0
    ) -> None:
        """Queue a request under its rotary plan.

        retained: an object that is not released before the request ends. other_waiting_tokens: tokens of requests that
        wait outside the scheduler.
        Raises QueueFullError if too many requests wait, RequestError if the request could never run.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        self._validate(request, rotation)
        if self.num_waiting >= self.config.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests are already waiting: try again later")
        self.check_waiting_tokens(request, other_waiting_tokens)
        self._queues.queue(self._requests.add(request, rotation, self._clock(), retained))

    def check_waiting_tokens(self, request: EngineRequest, other_waiting_tokens: int) -> None:
        """Raise QueueFullError if waiting requests, here and elsewhere, have too many tokens to add this one."""
        tokens = other_waiting_tokens + sum(seq.num_tokens for seq in self._queues.waiting)
        if tokens and tokens + len(request.prompt_token_ids) > self.config.max_waiting_tokens:
            raise QueueFullError(f"requests with {tokens:,} prompt tokens are already waiting: try again later")

    def _validate(self, request: EngineRequest, rotation: RotaryPlan) -> None:
        """Raise RequestError unless the request, alone in the engine, can run to its end."""
        prompt, sampling, limits = len(request.prompt_token_ids), request.sampling, self.limits.size(request.context)
        if prompt == 0:
            raise RequestError("the prompt is empty: send at least one token", "prompt", "empty_prompt")
        if prompt + min(sampling.max_tokens, 1) > limits.longest_prompt:
            raise RequestError(
                f"the prompt has {prompt} tokens and the context holds {limits.longest_prompt}, "
                "at least one of them for the output: shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )
        if request.reuse is not None and request.reuse.is_enabled and self.limits.reuse_refusal is not None:
            raise RequestError(f"cache_reuse: {self.limits.reuse_refusal}", "cache_reuse", "unsupported_value")
        # The last output token is never computed, so it needs no slot.
        longest = min(max(prompt, min(prompt + sampling.max_tokens, limits.longest) - 1), limits.max_slots(1))
        stage = rotation.stage(prompt)
        last, final = stage.last_length, rotation.stage(longest)
        # Re-rotated keys are cached twice, as computed and as re-rotated, and so are keys with a second copy.
        has_second_keys = any(spec.distances.has_second_keys for spec in (*stage.specs, *final.specs))
        rerotates = rotation.policy == "rotate" and last is not None and longest > last
        why = remedy = ""
        if has_second_keys:
            why, remedy = " (keys under this rope_scaling are cached twice)", "choose another rope_scaling, "
        elif rerotates:
            why, remedy = " (re-rotated keys are cached twice)", "set rope_update to frozen or recompute, "
        needs = self.blocks.min_blocks(longest, shifts=limits.window is not None, sinks_window=limits.sinks_window)
        for need, pool in zip(needs, self.blocks.pools, strict=True):
            if why and not pool.holds_states:
                need *= 2
            if need > pool.num_blocks:
                raise RequestError(
                    f"{longest} tokens of prompt and output need {need} KV blocks{why} and the cache has {pool.num_blocks}: "
                    f"lower max_tokens, shorten the prompt, {remedy}or give the server a larger KV cache",
                    "max_tokens",
                    "kv_cache_exceeded",
                )

    def abort(self, request_id: str) -> None:
        """End a request without an output and free its blocks at once. Unknown ids are ignored."""
        for seq in self._requests.samples(request_id):
            self._end(seq)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request without an output and free its blocks at once. The last one ends the request.

        While the prompt is computed for all samples, sample 0 computes it even if it was ended, and a sample that was ended
        never forks. Unknown ids and samples that have ended are ignored.
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
                self._end(seq)

    def fail(self, request_id: str, error: Exception) -> list[RequestOutput]:
        """End a request with an error. Returns its last output, nothing for an unknown id."""
        if request_id not in self._requests:
            return []
        self.abort(request_id)
        return [RequestOutput(request_id, error=error)]

    def fail_sequence(self, seq_id: int, error: Exception) -> list[RequestOutput]:
        """End the request of a sequence with an error. Returns its last output, nothing if the sequence has ended."""
        seq = self._requests.by_id.get(seq_id)
        return [] if seq is None else self.fail(seq.request.request_id, error)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose deadline is before `now` (seconds, the scheduler's clock). Returns their last outputs."""
        outputs = []
        for first in self._requests.overdue(now):
            request_id, cached = first.request.request_id, first.cached_tokens or 0
            self.abort(request_id)
            error = DeadlineError("the deadline passed before the request finished: allow it more time")
            outputs.append(RequestOutput(request_id, finish_reason="timeout", cached_tokens=cached, error=error))
        return outputs

    def restart_sequences(self, seq_ids: abc.Iterable[int]) -> None:
        """Preempt sequences of a step that failed after it had changed their recurrent states. Their blocks are not reused."""
        for seq in map(self._requests.by_id.__getitem__, seq_ids):
            seq.num_inflight_tokens = 0
            self._queues.preempt(seq, may_swap=False)

    def has_work(self) -> bool:
        """Whether any request is waiting, running or between `schedule` and `update`."""
        return len(self._requests) > 0

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Running sequences, the best rank first."""
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

    # -- planning --

    def schedule(self) -> SchedulerOutput:
        """Plan one step. It is empty only if no request is live, or if all wait for blocks to be read."""
        step = self._output_builder
        if self._kv_restorer is not None:
            step.loaded = self._kv_restorer.take_loaded_blocks(streams=self.num_running > 0)
        for _ in range(self.config.max_num_seqs + 1):
            self._plan_chunks(step)
            if step.chunks or step.rerotations or not self.has_work() or self._is_waiting_for_restore:
                break
            # All chosen sequences were preempted for better-ranked ones that were not chosen: choose among the rest.
        self._speculation.extend(step)
        if not self._queues.waiting:
            self._multi_step.extend(step)
        # Rows of one token are adjacent, as attention kernels prefer; otherwise by rank.
        step.chunks.sort(
            key=lambda chunk: (len(chunk.seq.token_ids) - chunk.start > 1, bool(chunk.num_drafted or chunk.draft))
        )
        if step.chunks or step.rerotations:
            self.counters.count_step(step.num_passes * sum(chunk.num_tokens for chunk in step.chunks))
        return step.build()

    def snapshot(self) -> Snapshot:
        """State of the workers after all steps so far, for one that missed a step."""
        return self._output_builder.snapshot(self._requests.by_id)

    def wait_for_restore(self, seconds: float) -> None:
        """If all work waits for blocks to be read, wait until some have been, at most `seconds`."""
        if self._kv_restorer is not None and self._is_waiting_for_restore:
            self._kv_restorer.wait(seconds)

    @property
    def _is_waiting_for_restore(self) -> bool:
        """Whether nothing runs and a sequence waits for blocks to be read."""
        return self._kv_restorer is not None and bool(self._kv_restorer.fetches) and not self._queues.running

    def _plan_chunks(self, step: SchedulerOutputBuilder) -> None:
        """Allocate blocks for the chunks of one step, best rank first, and preempt from the other end."""
        plan = self._plan()
        pending = [seq for seq in self._queues.running if seq in plan]
        idle = [seq for seq in self._queues.running if seq not in plan]
        now = self._clock()
        while pending:
            seq = pending.pop(0)
            if step.rerotations and (seq.rerotations or seq.stage_to_rerotate() is not None):
                continue  # re-rotation takes time, so a step re-rotates one sequence only
            if not self._can_compute(seq, step):
                continue
            dropped = drop_blocks(seq.context_limits, self.blocks, seq.cache)
            if dropped:
                self.counters.count_shift(dropped)
            min_tokens = plan[seq] if self._whole_prompts else 1
            num_tokens = self._frequency_changes.capacity(seq, plan[seq])
            while num_tokens < min_tokens:
                # Both lists are sorted by rank, so the worst of each is its last.
                worst = max([seq, *pending[-1:], *idle[-1:]], key=rank_key)
                self._queues.preempt(worst)
                if worst is seq:
                    break
                (pending if pending and pending[-1] is worst else idle).pop()
                num_tokens = self._frequency_changes.capacity(seq, plan[seq])
            if num_tokens >= min_tokens:
                self._frequency_changes.rerotate_if_due(seq, step)
                if not self._can_compute(seq, step):
                    continue
                step.copies += self.blocks.allocate(seq.cache, num_tokens)
                step.chunks.append(self._plan_chunk(seq, num_tokens, now))

    def _can_compute(self, seq: Sequence, step: SchedulerOutputBuilder) -> bool:
        """Whether `seq` may compute tokens in this step, after planning as many of its re-rotations as a step allows."""
        if seq.rerotations:
            self._frequency_changes.continue_rerotation(seq, step, self.step_limiter.rerotation_limit)
        return not seq.rerotations

    def _plan(self) -> dict[Sequence, int]:
        """Admit waiting sequences. Returns the tokens to try for each running sequence in this step, in no particular order."""
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
            grants = split_prefill_budget(needs, budget, starts, self._chunk_boundaries)
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
        """The sequences for which a token is sampled from the last row: `seq`, and at the end of a prompt the other samples."""
        sampling = seq.request.sampling
        if sampling.max_tokens == 0:
            return ()
        if sampling.n > 1 and seq.index == 0 and seq.children is None:
            seq.children = self._requests.add_children(seq)
        return (seq, *(child for child in seq.children or () if child.status is SequenceStatus.FORKING))

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Report how long a step took, before `update`. Prefill chunks and multi-step decoding adapt to it."""
        self._multi_step.observe(output, seconds)
        if output.num_passes > 1 or output.num_inflight_passes:
            return
        decodes = sum(1 for item in output.sequences if item.start + 1 == item.num_known_tokens)
        if output.rerotations:  # their time must not count for the tokens
            self.step_limiter.observe_rerotations(sum(piece.end - piece.start for piece in output.rerotations), seconds)
        else:
            self.step_limiter.observe(output.num_tokens - output.num_draft_tokens, decodes, seconds)
        self._speculation.observe_step(output, seconds)

    # -- admission --

    def _admit(self) -> None:
        """Move waiting sequences to the running queue, best rank first, until one does not fit."""
        if self._fair_queue.order_changed():
            self._queues.waiting.sort(key=rank_key)
        while self._queues.has_capacity and (chosen := self._choose_waiting()):
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

    def _choose_waiting(self) -> tuple[Sequence, bool] | None:
        """The sequence to admit now, with its cached prefix attached, and whether the cache held all of its tokens.

        No sequence is admitted before one that does not fit, so that small requests do not starve a large one. Only a
        sequence that waits for a prefix which another one computes, or for blocks to be read, is passed over. If nothing
        runs, the first sequence is admitted even if it does not fit next to a reserve, so a lone request always runs.
        """
        running = self._queues.running
        for seq in self._queues.waiting:
            if self._is_prefix_coming(seq):
                continue
            if running and self._was_just_blocked(seq):
                return None
            if seq.cache.is_swapped_out:
                if not running or self._has_free_blocks(seq):
                    return seq, False
                self._blocked = (seq.seq_id, self.counters.num_steps, self.blocks.available())
                return None
            if self._kv_restorer is not None and self._kv_restorer.should_wait(seq):
                continue
            hit, full = 0, False
            if not seq.needs_full_prefill:
                hit, full = self.blocks.match(seq.cache, seq.token_ids, seq.num_shareable_tokens)
            if self._find_prefix_source(seq, hit):
                continue
            available = self.blocks.available()
            self.blocks.attach(seq.cache, hit)
            if not full:
                self._reuse.find_passages(seq)
            if running and not self._has_free_blocks(seq):
                self.blocks.free(seq.cache)
                self._blocked = (seq.seq_id, self.counters.num_steps, available)
                return None
            if self._kv_restorer is not None and self._kv_restorer.should_wait_again(seq, hit + full):
                self.blocks.free(seq.cache)
                continue
            return seq, full
        return None

    def _was_just_blocked(self, seq: Sequence) -> bool:
        """Whether `seq` did not fit a few steps ago and no more blocks are free now. Saves a search of the prefix cache."""
        if self._blocked is None or self._blocked[0] != seq.seq_id:
            return False
        _, blocked_at, before = self._blocked
        grown = any(now > then for now, then in zip(self.blocks.available(), before, strict=True))
        return not grown and self.counters.num_steps - blocked_at < _RETRY_STEPS

    def _has_free_blocks(self, seq: Sequence) -> bool:
        """Whether all known tokens of `seq` and of the running sequences fit, with 1 % of the blocks to spare."""
        chunk = self.config.max_num_batched_tokens
        # One state is reserved for the copy that a sequence makes at the end of a block.
        spare = [p.num_available - (int(p.holds_states) or p.num_blocks // 100) for p in self.blocks.pools]
        for other in (seq, *self._queues.running):
            slots = min(other.num_tokens + other.cache.final_slot_offset, other.context_limits.max_slots(chunk))
            need = self.blocks.blocks_still_needed(other.cache, slots, chunk, rerotates=other.will_rerotate)
            spare = [s - n for s, n in zip(spare, need, strict=True)]
        return min(spare) >= 0

    def _is_prefix_coming(self, seq: Sequence) -> bool:
        """Whether the sequence that `seq` waits for still runs and has not computed the shared prefix yet."""
        if seq.awaited_prefix is None:
            return False
        other, num_tokens = seq.awaited_prefix
        if other.status is SequenceStatus.RUNNING and other.cache.num_computed_tokens < num_tokens:
            return True
        seq.awaited_prefix = None
        return False

    def _find_prefix_source(self, seq: Sequence, hit: int) -> bool:
        """Let `seq` wait if a better-ranked prefill is about to compute blocks that it could share.

        Waiting costs nothing, as the other one is served first anyway, and requests that arrive together with the same
        long prompt compute it once.
        """
        if not self.blocks.enable_prefix_caching or not seq.can_share_prefix:
            return False
        size = self.blocks.block_size
        usable = min(seq.num_tokens - 1, seq.num_shareable_tokens) // size
        for other in self._queues.running:
            if other.rank > seq.rank:
                return False
            if other.num_uncomputed_tokens > 1 and not other.cache.private:
                common = min(usable, seq.cache.chain.common_blocks(other.cache.chain))
                if common > hit and other.cache.num_computed_tokens < common * size:
                    seq.awaited_prefix = (other, common * size)
                    return True
        return False

    # -- results --

    def update(self, output: SchedulerOutput, results: list[StepResult]) -> list[RequestOutput]:
        """Process the results of a step and return the outputs of its requests.

        Results of sequences that have ended in the meantime (an abort, a deadline) are ignored. Raises RuntimeError if a
        requested result is missing.
        """
        if self._kv_restorer is not None:
            self._kv_restorer.note_applied()
        now = self._clock()
        by_id, live = {result.seq_id: result for result in results}, self._requests.by_id
        outputs: list[RequestOutput] = []
        for item in output.sequences:
            seq = live.get(item.seq_id)
            if seq is None:
                continue
            if item.num_proposed or output.num_passes > 1 or output.num_inflight_passes:
                result = _result(by_id, seq)
                if item.num_proposed:
                    self._speculation.observe(seq, item, len(result.token_ids) - 1)
                outputs.append(self._take_tokens(seq, result, now, start=item.start))
                continue
            self._mark_computed(seq, item.start + item.num_tokens)
            if item.prompt_logprobs is not None:
                seq.add_prompt_logprobs(item.start, _result(by_id, seq).prompt_logprobs or ())
            if seq.request.sampling.max_tokens == 0 and seq.num_uncomputed_tokens == 0:
                outputs += self._finish_scoring(seq, by_id, now)
            elif seq.children and item.samples:  # a restarted prompt has children before its end
                outputs += self._fork(seq, seq.children, by_id, now)
            elif item.samples:
                outputs.append(self._take_tokens(seq, _result(by_id, seq), now))
            elif seq.request.reports_progress and seq.first_token_time is None:
                computed = min(seq.cache.num_computed_tokens, len(seq.request.prompt_token_ids))
                cached = seq.cached_tokens or 0
                outputs.append(RequestOutput(seq.request.request_id, cached_tokens=cached, prompt_computed=computed))
        self._fair_queue.advance(self.counters.prompt_tokens + self.counters.generation_tokens)
        return outputs

    def _mark_computed(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Record that the keys of the first `num_computed_tokens` tokens are final."""
        seq.max_computed_tokens = max(seq.max_computed_tokens, num_computed_tokens)
        self.blocks.mark_computed(seq.cache, seq.token_ids, num_computed_tokens, seq.num_inflight_tokens)
        self._reuse.attach_passage(seq)

    def _take_tokens(self, seq: Sequence, result: StepResult, now: float, start: int | None = None) -> RequestOutput:
        """Append the tokens of a result, and recompute a continuing sequence whose stage has changed."""
        output = self._append(seq, result, now, start)
        if output.finish_reason is None:
            self._frequency_changes.recompute_if_stage_changed(seq)
        return output

    def _fork(
        self, seq: Sequence, planned: list[Sequence], results: dict[int, StepResult], now: float
    ) -> list[RequestOutput]:
        """Append the first tokens of `seq` and of the other samples, which fork from it."""
        seq.children = []
        children = [child for child in planned if child.status is SequenceStatus.FORKING]
        for child in children:  # before `seq` may finish and free its blocks
            self.blocks.fork(seq.cache, child.cache)
            child.max_computed_tokens = seq.max_computed_tokens
        samples = [seq, *children]
        if seq.index in seq.ended_samples:  # it has computed the prompt for the others
            self._note_first_token(seq, now)
            self._end(seq)
            samples = children
        outputs = [self._append(sample, _result(results, sample), now) for sample in samples]
        for child in children:
            if child.status is not SequenceStatus.FORKING:
                continue
            if self._queues.has_capacity and self.blocks.capacity(child.cache, 1):
                self._queues.start(child)
            else:
                self._queues.preempt(child)
        for sample in samples:
            if sample.status is not SequenceStatus.FINISHED:
                self._frequency_changes.recompute_if_stage_changed(sample)
        return outputs

    def _append(self, seq: Sequence, result: StepResult, now: float, start: int | None = None) -> RequestOutput:
        """Append sampled tokens and finish the sequence if one of them ends it.

        start: of a chunk that holds proposed tokens or several passes. Its keys become final here, except for the last
        token's; keys after the accepted tokens are invalid, and the next step overwrites them.
        """
        if not result.token_ids:
            raise RuntimeError(f"the step drew no token for sequence {seq.seq_id}")
        num_accepted, reason, stop_id = seq.append_tokens(result.token_ids)
        if start is not None:
            self._mark_computed(seq, start + num_accepted)
        self.counters.generation_tokens += num_accepted
        scheduled_at = seq.first_scheduled_time if seq.first_token_time is None else None
        self._note_first_token(seq, now)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        dropped, seq.num_dropped_early = seq.num_dropped_early, 0
        report = None if reason is None else context_report(seq.context_limits, seq.cache, dropped)
        if reason is not None:
            self._finish(seq, now)
        elif dropped:
            self.counters.count_shift(dropped)
        return RequestOutput(
            seq.request.request_id,
            index=seq.index,
            token_ids=tuple(result.token_ids[:num_accepted]),
            logprobs=None if result.logprobs is None else result.logprobs[:num_accepted],
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            finish_reason=reason,
            stop_token_id=stop_id,
            cached_tokens=seq.cached_tokens or 0,
            rotary=None if reason is None else seq.rotation.report(seq.stage, seq.cache.num_rerotations),
            context=report,
            scheduled_at=scheduled_at,
        )

    def _finish_scoring(self, seq: Sequence, results: dict[int, StepResult], now: float) -> list[RequestOutput]:
        """End a request for 0 tokens whose prompt is computed. Its samples are equal, except for prompt log-probabilities."""
        pooled = None if seq.request.pooling is None else _result(results, seq).pooled
        self._note_first_token(seq, now)
        report = context_report(seq.context_limits, seq.cache)
        self._finish(seq, now)
        first = RequestOutput(
            seq.request.request_id,
            prompt_logprobs=None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs),
            finish_reason="length",
            cached_tokens=seq.cached_tokens or 0,
            rotary=seq.rotation.report(seq.stage, seq.cache.num_rerotations),
            context=report,
            pooled=pooled,
        )
        rest = (replace(first, index=index, prompt_logprobs=None) for index in range(1, seq.request.sampling.n))
        return [output for output in (first, *rest) if output.index not in seq.ended_samples]

    def _note_first_token(self, seq: Sequence, now: float) -> None:
        if seq.first_token_time is None:
            seq.first_token_time = now
            if seq.index == 0 and seq.first_scheduled_time is not None:
                self.counters.prefill_seconds.append(now - seq.first_scheduled_time)

    def _finish(self, seq: Sequence, now: float) -> None:
        """End a sample, and record the durations of its request with the last one."""
        self._end(seq)
        if seq.request.request_id not in self._requests and seq.first_token_time is not None:
            self.counters.decode_seconds.append(now - seq.first_token_time)
            if seq.first_scheduled_time is not None:
                self.counters.inference_seconds.append(now - seq.first_scheduled_time)

    def _end(self, seq: Sequence) -> None:
        """Remove a sample and free its blocks; the last one ends its request."""
        if seq.fetch is not None:
            seq.fetch.remove_waiter()
        self._queues.finish(seq)
        self._requests.forget(seq)
        self._speculation.forget(seq.seq_id)

    # -- statistics --

    def stats(self) -> EngineStats:
        """Gauges and counters. Removes the durations that it returns. The core sets `rotary_specs_live`."""
        return self.counters.snapshot(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_blocks_total=self.blocks.num_blocks,
            kv_blocks_used=self.blocks.num_used_blocks,
            kv_cache_usage=self.blocks.usage,
        )


def _result(results: dict[int, StepResult], seq: Sequence) -> StepResult:
    result = results.get(seq.seq_id)
    if result is None:
        raise RuntimeError(f"the step reported no result for sequence {seq.seq_id}")
    return result
