"""Steps of running streams that a device computes by itself, pass after pass, and the next ones that follow them at once.

Responsible for which steps those are, for how their rows draw, and for reading what was drawn. Knows no scheduler: whether a
step may follow before another one's results are known is its plan's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.device_rows import Fetched, RowDrawing
from windlass.engine.execution.sequences import LiveSequences
from windlass.engine.sampling.prepared_draws import filters_of
from windlass.engine.sampling.sampler import draws_alone, result_of
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.uniform import uniform
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, StepResult
from windlass.kernels import filter_numbers


class StartedStep:
    """A step that was begun. under_way: whether the device may still be at it."""

    under_way = False

    def __init__(self, results: list[StepResult]) -> None:
        self._results = results

    def results(self) -> list[StepResult]:
        """What it drew, once that is known. Raises what the device met meanwhile."""
        return self._results


class _StepUnderWay(StartedStep):
    under_way = True

    def __init__(self, items: Sequence[ScheduledSequence], fetched: Fetched) -> None:
        super().__init__([])
        self._items, self._fetched = items, fetched

    def results(self) -> list[StepResult]:
        if self.under_way:
            ids, statuses = self._fetched.wait()
            self.under_way = False
            drawn = zip(self._items, ids.T.tolist(), statuses.T.tolist(), strict=True)
            self._results = [result_of(item.seq_id, *found) for item, *found in drawn]
        return self._results


class PassesOnDevice:
    """sequences: kept up to date by their owner."""

    def __init__(self, sequences: LiveSequences, vocab_size: int) -> None:
        self._sequences, self._vocab_size = sequences, vocab_size
        self._places: dict[int, int] = {}  # by sequence, its row on the device in the step that was begun last

    def start(self, plan: SchedulerOutput, graphs: DecodeGraphs) -> StartedStep | None:
        """None where the step has to be computed otherwise. The plan has been followed."""
        items = plan.sequences
        if not plan.ahead and not self._takes(items):
            return None
        slots = [self._sequences.by_id[item.seq_id].slot for item in items]
        drawing = [self._drawing(slot, plan.ahead, plan.passes) for slot in slots]
        if plan.ahead:
            order = [self._places[item.seq_id] for item in items]
            fetched: Fetched | None = graphs.begin_ahead(items, plan.passes, drawing, order)
        else:
            fetched = graphs.begin(items, plan.passes, drawing)
        if fetched is None:
            return None
        self._places = {item.seq_id: row for row, item in enumerate(items)}
        return _StepUnderWay(items, fetched)

    def _takes(self, items: Sequence[ScheduledSequence]) -> bool:
        live = self._sequences.by_id
        return bool(items) and all(
            item.num_tokens == 1
            and item.samples == (item.seq_id,)
            and item.prompt_logprobs is None
            and draws_alone(live[item.seq_id].slot)
            for item in items
        )

    def _drawing(self, slot: SampleSlot, ahead: int, passes: int) -> RowDrawing:
        drawn = len(slot.token_ids) - slot.num_prompt_tokens + ahead
        uniforms: list[float] = []
        if slot.sampling.temperature > 0:
            uniforms = [uniform(slot.seed, slot.index, drawn + i) for i in range(passes)]
        return RowDrawing(filter_numbers(filters_of(slot.sampling, self._vocab_size), self._vocab_size), uniforms)
