"""Async scheduling and multi-step decoding.

Async scheduling plans a step while the previous one is computed, so that the device never waits for the host. Only running
streams qualify: the position and the blocks of each follow from the number of forward passes in flight. A stream that is certain
to end with those is left out. One that ends otherwise, by a token or an abort, is computed once in vain; that result is surplus.

Multi-step decoding lets running streams alone in a step run several forward passes within a time limit, because planning a step
costs the same for one pass as for several. No token changes: each pass computes what the previous one sampled. Times are seconds,
passed in by the caller.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.scheduling.context_shift import drop_blocks_early
from windlass.engine.scheduling.request_queue import LiveRequests, SchedulerQueues
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import (
    PlannedChunk,
    SchedulerOutput,
    SchedulerOutputBuilder,
    StepResult,
)

# -- async scheduling --

FIRST_PAUSE, LONGEST_PAUSE = 32, 4096  # steps


@dataclass(slots=True)
class AsyncScheduling:
    """Plans steps from the scheduler's state. proposes: whether streams propose tokens, for which results must be known."""

    _requests: LiveRequests
    _queues: SchedulerQueues
    _blocks: BlockManager
    _multi_step: MultiStepDecoding
    _output_builder: SchedulerOutputBuilder
    _counters: SchedulerCounters
    _proposes: bool
    _num_cancelled: int = 0
    _not_before: int = 0  # the step before which none is planned here

    def plan(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Plan the step after `output`, whose results are not known yet. Returns None if it has to wait for them."""
        if self._proposes or self._queues.waiting or self._counters.num_steps < self._not_before:
            return None
        live, num_inflight = self._requests.by_id, output.num_passes
        builder, chunks, num_streams = self._output_builder, list[PlannedChunk](), 0
        for item in output.sequences:
            seq = live.get(item.seq_id)
            if seq is None:
                continue
            if item.start != seq.num_tokens - 1 or item.num_tokens > 1 or item.samples != (item.seq_id,):
                return None
            num_streams += 1
            if seq.num_remaining_tokens > num_inflight:
                start = seq.num_tokens - 1 + num_inflight
                chunks.append(PlannedChunk(seq, start, 1, samples=(seq,)))
        if not chunks or num_streams < len(self._queues.running):
            return None
        for chunk in chunks:
            seq = chunk.seq
            dropped = drop_blocks_early(seq.context_limits, self._blocks, seq.cache, num_inflight)
            if dropped is None:
                return None
            seq.num_dropped_early += dropped
        num_passes = self._multi_step.allocate_async(chunks, num_inflight)
        if num_passes < 1:
            return None
        for chunk in chunks:
            builder.copies += self._blocks.checkpoint_states(chunk.seq.cache, num_inflight)
            chunk.seq.last_scheduled_step = self._counters.num_steps
            chunk.seq.num_inflight_tokens += num_passes
        self._counters.count_step(num_passes * len(chunks))
        builder.chunks, builder.num_passes, builder.num_inflight_passes = chunks, num_passes, num_inflight
        return builder.build()

    def cancel_step(self, output: SchedulerOutput, *, has_changed_states: bool) -> int:
        """Cancel a step planned here. Its blocks are released once the results of the previous step are processed.

        No step is planned here for a number of steps, which is returned and doubles each time. has_changed_states: the step
        changed recurrent states, so its sequences will be restarted, and their tokens count as in flight until then.
        """
        self._counters.count_step(output.num_tokens, -1)
        pause = min(FIRST_PAUSE << self._num_cancelled, LONGEST_PAUSE)
        self._num_cancelled += 1
        self._not_before = self._counters.num_steps + pause
        for item in () if has_changed_states else output.sequences:
            seq = self._requests.by_id.get(item.seq_id)
            if seq is not None:
                seq.num_inflight_tokens -= output.num_passes
        return pause

    def is_surplus(self, output: SchedulerOutput) -> bool:
        """Whether all sequences of a step have ended. The results of all earlier steps must have been processed."""
        return not any(item.seq_id in self._requests.by_id for item in output.sequences)

    def drop_surplus(
        self, output: SchedulerOutput, results: abc.Sequence[StepResult]
    ) -> tuple[SchedulerOutput, list[StepResult]]:
        """The step whose results are processed next, without streams that have ended or whose tokens it predicted wrongly."""
        if not output.num_inflight_passes:
            return output, list(results)
        valid = {}
        for item in output.sequences:
            seq = self._requests.by_id.get(item.seq_id)
            if seq is not None:
                seq.num_inflight_tokens -= output.num_passes
                if seq.num_tokens == item.start + 1:
                    valid[item.seq_id] = item
        return replace(output, sequences=tuple(valid.values())), [one for one in results if one.seq_id in valid]


# -- multi-step decoding --

MAX_PASSES = 8  # new requests wait for the end of all passes

_LAST_STEP_WEIGHT = 0.25  # in the moving average of the duration of a pass


class MultiStepDecoding:
    """seconds: how long a step of several passes may last; 0 disables multi-step decoding."""

    def __init__(self, seconds: float, blocks: BlockManager) -> None:
        self._seconds, self._blocks = seconds, blocks
        self._pass_seconds: dict[int, float] = {}  # by the rows of a pass, where 2^k to 2^(k+1) - 1 are one size

    def extend(self, step: SchedulerOutputBuilder) -> None:
        """Add passes to a planned step of running streams alone, as far as free blocks and the time limit allow."""
        if self._seconds <= 0 or not step.chunks or step.has_key_operations:
            return
        num_passes = self._max_passes(len(step.chunks), self._seconds)
        for chunk in step.chunks:
            if num_passes < 2:
                return
            num_passes = min(num_passes, 1 + chunk.seq.num_lookahead_tokens) if chunk.is_next_token else 1
        for chunk in step.chunks:
            num_passes = min(num_passes, self._blocks.capacity(chunk.seq.cache, num_passes))
            step.copies += self._blocks.allocate(chunk.seq.cache, num_passes)
        step.num_passes = num_passes

    def allocate_async(self, chunks: abc.Sequence[PlannedChunk], num_inflight_passes: int) -> int:
        """Allocate blocks for streams while passes are in flight. Returns the number of passes, 0 if blocks are missing.

        New requests wait for both steps, so each has half the time.
        """
        num_passes = max(1, self._max_passes(len(chunks), self._seconds / 2))
        for chunk in chunks:
            num_passes = min(num_passes, 1 + chunk.seq.num_lookahead_tokens - num_inflight_passes)
        for chunk in chunks:
            wanted = num_inflight_passes + num_passes
            num_passes = min(num_passes, self._blocks.capacity(chunk.seq.cache, wanted) - num_inflight_passes)
            if num_passes < 1:
                return 0
            self._blocks.allocate(chunk.seq.cache, num_inflight_passes + num_passes)
        return num_passes

    def _max_passes(self, rows: int, seconds: float) -> int:
        known = self._pass_seconds.get(rows.bit_length())
        return 1 if known is None else min(MAX_PASSES, int(seconds / known))

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Update the duration of a pass from a finished step, if it computed running streams alone."""
        rows = len(output.sequences)
        if self._seconds <= 0 or not rows or output.rerotations:
            return
        if any(item.start + 1 < item.num_known_tokens for item in output.sequences):
            return
        size, measured = rows.bit_length(), seconds / output.num_passes
        known = self._pass_seconds.get(size, measured)
        self._pass_seconds[size] = known + _LAST_STEP_WEIGHT * (measured - known)
