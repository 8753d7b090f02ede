"""Plans a step behind one that is still being computed, so that a device which runs beside its host never waits for the host.

Only running streams can be planned so: where each of them will stand then, and which blocks that takes, follows from how many
passes are under way, and the tokens never come to the host in between; so does which blocks a context gives up before. A stream
that is sure to end with them is left out. One that ends otherwise, by a token or because somebody leaves, is computed in vain
once: what that gives is surplus, and nobody's.

Responsible for which steps can be planned so, and for telling what is surplus. Everything else is planned once all is known.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.bursts import MultiStepDecoding
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.places import SchedulerQueues
from windlass.engine.scheduling.plan import SchedulerOutput, StepResult
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep, SchedulerOutputBuilder
from windlass.engine.scheduling.requests import LiveRequests

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
