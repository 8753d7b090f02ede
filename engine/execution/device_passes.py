"""Steps of running streams that a device computes by itself, pass after pass, and the next ones that follow them at once.

Responsible for which steps those are, for how their rows draw, and for reading what was drawn. Knows no scheduler: whether a
step may follow before another one's results are known is its plan's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.device_rows import PendingTokens, RowSampling
from windlass.engine.execution.sequences import InputBatch
from windlass.engine.sampling.prepared_draws import filters_of
from windlass.engine.sampling.sampler import multi_step_result, uses_filters_only
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.uniform import uniform
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, StepResult
from windlass.kernels import encode_filters


class StepFuture:
    """A step that was begun. in_flight: whether the device may still be at it."""

    in_flight = False

    def __init__(self, results: list[StepResult]) -> None:
        self._results = results

    def results(self) -> list[StepResult]:
        """What it drew, once that is known. Raises what the device met meanwhile."""
        return self._results


class _DeviceStepFuture(StepFuture):
    in_flight = True

    def __init__(self, items: Sequence[ScheduledSequence], pending: PendingTokens) -> None:
        super().__init__([])
        self._items, self._pending = items, pending

    def results(self) -> list[StepResult]:
        if self.in_flight:
            ids, statuses = self._pending.wait()
            self.in_flight = False
            drawn = zip(self._items, ids.T.tolist(), statuses.T.tolist(), strict=True)
            self._results = [multi_step_result(item.seq_id, *found) for item, *found in drawn]
        return self._results


class DeviceStepLauncher:
    """sequences: kept up to date by their owner."""

    def __init__(self, sequences: InputBatch, vocab_size: int) -> None:
        self._input_batch, self._vocab_size = sequences, vocab_size
        self._rows: dict[int, int] = {}  # by sequence, its row on the device in the step that was begun last

    def start(self, plan: SchedulerOutput, graphs: DecodeGraphs) -> StepFuture | None:
        """None where the step has to be computed otherwise. The plan has been followed."""
        items = plan.sequences
        if not plan.ahead and not self._runs_on_device(items):
            return None
        slots = [self._input_batch.by_id[item.seq_id].slot for item in items]
        sampling_rows = [self._row_sampling(slot, plan.ahead, plan.num_passes) for slot in slots]
        if plan.ahead:
            order = [self._rows[item.seq_id] for item in items]
            pending: PendingTokens | None = graphs.submit_behind(items, plan.num_passes, sampling_rows, order)
        else:
            pending = graphs.submit(items, plan.num_passes, sampling_rows)
        if pending is None:
            return None
        self._rows = {item.seq_id: row for row, item in enumerate(items)}
        return _DeviceStepFuture(items, pending)

    def _runs_on_device(self, items: Sequence[ScheduledSequence]) -> bool:
        live = self._input_batch.by_id
        return bool(items) and all(
            item.num_tokens == 1
            and item.samples == (item.seq_id,)
            and item.prompt_logprobs is None
            and uses_filters_only(live[item.seq_id].slot)
            for item in items
        )

    def _row_sampling(self, slot: SampleSlot, ahead: int, num_passes: int) -> RowSampling:
        drawn = len(slot.token_ids) - slot.num_prompt_tokens + ahead
        uniforms: list[float] = []
        if slot.sampling.temperature > 0:
            uniforms = [uniform(slot.seed, slot.index, drawn + i) for i in range(num_passes)]
        return RowSampling(encode_filters(filters_of(slot.sampling, self._vocab_size), self._vocab_size), uniforms)
