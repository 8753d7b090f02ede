"""Async scheduling and multi-step decoding.

Async scheduling plans a step while the previous one is computed, so that the device never waits for the host. Only running
streams qualify: the position and the blocks of each follow from the number of forward passes in flight. A stream that is sure to
end with those is left out. One that ends otherwise, by a token or an abort, is computed once in vain; that result is surplus.

Multi-step decoding lets running streams alone in a step run several forward passes within a time limit, because planning a step
costs the same for one pass as for several. No token changes: each pass computes what the previous one sampled. Times are seconds,
passed in; there is no clock here.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Sequence as Seq
from dataclasses import replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.scheduling.request_queue import LiveRequests, SchedulerQueues
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import (
    PlannedChunk,
    PlannedStep,
    SchedulerOutput,
    SchedulerOutputBuilder,
    StepResult,
)

FIRST_PAUSE, LONGEST_PAUSE = 32, 4096  # steps


class AsyncScheduling:
    """blocks: of the sequences. proposes: whether streams propose tokens, which have to be known for that."""

    def __init__(
        self,
        requests: LiveRequests,
        queues: SchedulerQueues,
        blocks: BlockManager,
        multi_step: MultiStepDecoding,
        output_builder: SchedulerOutputBuilder,
        counters: SchedulerCounters,
        *,
        proposes: bool,
    ) -> None:
        self._requests, self._queues, self._blocks, self._multi_step = requests, queues, blocks, multi_step
        self._output_builder, self._counters, self._proposes = output_builder, counters, proposes
        self._pause, self._not_before = FIRST_PAUSE, 0

    def plan(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """The step behind `output`, whose results are not known yet; None where it has to wait for them."""
        if self._proposes or self._queues.waiting or self._counters.num_steps < self._not_before:
            return None
        live, ahead = self._requests.by_id, output.num_passes
        step = PlannedStep(ahead=ahead)
        planned = 0
        for item in output.sequences:
            seq = live.get(item.seq_id)
            if seq is None:
                continue
            if item.start != seq.num_tokens - 1 or item.num_tokens > 1 or item.samples != (item.seq_id,):
                return None
            planned += 1
            if seq.num_remaining_tokens > ahead:
                start = seq.num_tokens - 1 + ahead
                step.chunks.append(PlannedChunk(seq, start, 1, samples=(seq,)))
        if not step.chunks or planned < len(self._queues.running):
            return None
        for chunk in step.chunks:
            seq = chunk.seq
            dropped = seq.context_limits.drop_blocks_early(self._blocks, seq.cache, ahead)
            if dropped is None:
                return None
            seq.num_dropped_early += dropped
        step.num_passes = self._multi_step.extend_async(step.chunks, ahead)
        if step.num_passes < 1:
            return None
        for chunk in step.chunks:
            step.copies += self._blocks.checkpoint_states(chunk.seq.cache, ahead)
            chunk.seq.last_scheduled_step = self._counters.num_steps
            chunk.seq.num_inflight_tokens += step.num_passes
        self._counters.count_step(step.num_passes * len(step.chunks))
        return self._output_builder.build(step)

    def cancel_step(self, output: SchedulerOutput, *, has_changed_states: bool) -> int:
        """A step that was planned so will not be computed. What it took goes back once the step before it is taken in.

        For some steps none is planned so, each time for twice as many. Returns how many. has_changed_states: its sequences begin
        again then, and count as under way until they do, as the states that they hold are not those between the two steps.
        """
        self._counters.count_step(output.num_tokens, -1)
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._not_before = self._counters.num_steps + pause
        for item in () if has_changed_states else output.sequences:
            seq = self._requests.by_id.get(item.seq_id)
            if seq is not None:
                seq.num_inflight_tokens -= output.num_passes
        return pause

    def is_surplus(self, output: SchedulerOutput) -> bool:
        """Whether all of a step that was planned so is surplus, all steps before it being taken in."""
        return not any(item.seq_id in self._requests.by_id for item in output.sequences)

    def drop_surplus(
        self, output: SchedulerOutput, results: Seq[StepResult]
    ) -> tuple[SchedulerOutput, list[StepResult]]:
        """A plan and its results, which are to be taken in next, without what belongs to nobody: of streams that have ended, or
        do not stand where it took them to be."""
        if not output.ahead:
            return output, list(results)
        kept = {}
        for item in output.sequences:
            seq = self._requests.by_id.get(item.seq_id)
            if seq is not None:
                seq.num_inflight_tokens -= output.num_passes
                if seq.num_tokens == item.start + 1:
                    kept[item.seq_id] = item
        return replace(output, sequences=tuple(kept.values())), [one for one in results if one.seq_id in kept]


MAX_PASSES = 8  # what arrives meanwhile waits for the end

_SHARE = 0.25  # of the last step in what is known of a pass


class MultiStepDecoding:
    """seconds: how long a step of several passes may last; 0: there are none."""

    def __init__(self, seconds: float, blocks: BlockManager) -> None:
        self._seconds, self._blocks = seconds, blocks
        self._pass_seconds: dict[int, float] = {}  # by the rows of a pass, where 2^k to 2^(k+1) - 1 are one size

    def extend(self, step: PlannedStep) -> None:
        """Let a planned step go on for more passes, where it holds running streams and nothing else, from free blocks."""
        if self._seconds <= 0 or not step.chunks or step.has_page_operations:
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

    def extend_async(self, chunks: Sequence[PlannedChunk], ahead: int) -> int:
        """How many passes streams may have behind `ahead` others that are not over: their blocks are taken then. 0: none.

        What arrives waits for both, so each has half the time.
        """
        num_passes = max(1, self._max_passes(len(chunks), self._seconds / 2))
        for chunk in chunks:
            num_passes = min(num_passes, 1 + chunk.seq.num_lookahead_tokens - ahead)
        for chunk in chunks:
            num_passes = min(num_passes, self._blocks.capacity(chunk.seq.cache, ahead + num_passes) - ahead)
            if num_passes < 1:
                return 0
            self._blocks.allocate(chunk.seq.cache, ahead + num_passes)
        return num_passes

    def _max_passes(self, rows: int, seconds: float) -> int:
        known = self._pass_seconds.get(rows.bit_length())
        return 1 if known is None else min(MAX_PASSES, int(seconds / known))

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn from a finished step of running streams alone how long a pass takes."""
        rows = len(output.sequences)
        if self._seconds <= 0 or not rows or output.rerotations:
            return
        if any(item.start + 1 < item.num_known_tokens for item in output.sequences):
            return
        size, one = rows.bit_length(), seconds / output.num_passes
        known = self._pass_seconds.get(size, one)
        self._pass_seconds[size] = known + _SHARE * (one - known)
