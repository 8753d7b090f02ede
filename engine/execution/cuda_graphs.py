"""CUDA graphs of decode steps: which are captured, which one runs a step, and the submission of steps that sample on the device.

A step with fewer rows than a captured one is padded with empty rows, which read and write no keys. Steps with slot ranges or adapters are captured separately, with rows and ranges rounded up to powers of two, once they recur (`LazyGraphs`); those with adapters at once where adapters are loaded. A captured step ends with sampling; for rows whose sampling is not supported there, the logits are used and the sampled token is ignored.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.block_manager import MAX_RUNS
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.batch_builder import ForwardBatchBuilder
from windlass.engine.execution.device_batch import (
    ADAPTER,
    GREEDY,
    TOKEN,
    DeviceBatch,
    DeviceQueryRanges,
    PendingTokens,
    RowSampling,
)
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.recorded_steps import StepOutputs
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import filters_of, multi_step_result, uniform, uses_filters_only
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, StepResult
from windlass.kernels import Graphs, StateRows, encode_filters, is_out_of_memory

_logger = logging.getLogger("windlass.engine")

T = TypeVar("T")

MAX_RANGED_GRAPHS = 16  # captured with ranges, each some megabytes

MAX_RANGE_CELLS = 1024  # rows times ranges; each may be a version of a query, in every layer

_CAPTURE_AFTER_MISSES = 2  # in vain, before a step is captured: a step may ask twice

_MAX_PADDING_FACTOR = (
    4  # times the rows, or the ranges, that a step may be made to have where it cannot be captured itself
)


class GraphKey(NamedTuple):
    """ranges: of each row at most, 0 where none has any. adapted: whether rows may have adapters."""

    rows: int
    ranges: int = 0
    adapted: bool = False

    def covers(self, other: GraphKey) -> bool:
        """Whether what is captured of this kind stands for steps of the other. Ranges are told of all rows or of none."""
        alike = (self.ranges > 0) == (other.ranges > 0)
        return alike and self.rows >= other.rows and self.ranges >= other.ranges and self.adapted >= other.adapted

    def __str__(self) -> str:
        ranges = f" in {self.ranges} ranges" if self.ranges else ""
        return f"a decode step of {self.rows} rows{ranges}{' with adapters' if self.adapted else ''}"


class LazyGraphs(Generic[T]):
    """capture: a step of this kind; raises RuntimeError where that cannot be done.

    obstacle: why no more of them are captured; None while they are.
    """

    def __init__(self, capture: abc.Callable[[GraphKey], T]) -> None:
        self._capture = capture
        self._captured: dict[GraphKey, T] = {}
        self._misses: Counter[GraphKey] = Counter()
        self.obstacle: str | None = None

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._captured)

    def find(self, kind: GraphKey, *, ahead: bool) -> tuple[GraphKey, T] | None:
        """What stands for such a step, of as many rows as decode steps are captured for, in any number of ranges; None: nothing.

        ahead: the device has been asked for the step before it already. So nothing is captured now, and whatever stood for that
        one does for this, which has no more of anything.
        """
        wanted = kind._replace(ranges=max(2, 1 << (kind.ranges - 1).bit_length()) if kind.ranges else 0)
        if wanted not in self._captured and not ahead and self._is_due(wanted):
            self.capture(wanted)
        candidates = [one for one in self._captured if one.covers(wanted)]
        if not ahead:
            upper_bound = GraphKey(_MAX_PADDING_FACTOR * wanted.rows, _MAX_PADDING_FACTOR * wanted.ranges, adapted=True)
            candidates = [one for one in candidates if upper_bound.covers(one)]
        if not candidates:
            return None
        found = min(candidates)
        return found, self._captured[found]

    def capture(self, kind: GraphKey) -> None:
        """Capture a step, unless something is in its way, which is the `obstacle` then."""
        if kind.adapted and kind.ranges:
            # Ranges may vanish in steps that are planned ahead, where something has to stand for the rest.
            self.capture(kind._replace(ranges=0))
        if kind in self._captured or self.obstacle is not None:
            return
        try:
            self._captured[kind] = self._capture(kind)
        except RuntimeError as error:
            what = "no memory is left for it" if is_out_of_memory(error) else str(error).splitlines()[0]
            self.obstacle = f"{kind} was not captured: {what}"
            _logger.warning("%s; no more with ranges or adapters are", self.obstacle)

    def _is_due(self, wanted: GraphKey) -> bool:
        if self.obstacle is not None or wanted.rows * wanted.ranges > MAX_RANGE_CELLS:
            return False
        if wanted.ranges and sum(kind.ranges > 0 for kind in self._captured) >= MAX_RANGED_GRAPHS:
            return False
        self._misses[wanted] += 1
        return self._misses[wanted] > _CAPTURE_AFTER_MISSES


_EXTRA_TABLE_COLUMNS = 2 * MAX_RUNS  # around passages blocks stay half empty


class _Captured(NamedTuple):
    replay: abc.Callable[[], None]
    outputs: StepOutputs


class _GraphInputs(NamedTuple):
    """What a captured step is told of a step's rows, see `DeviceBatch.fill`."""

    metadata: NDArray[np.int64]
    tables: NDArray[np.int32]
    ranges: NDArray[np.int64] | None
    states: StateRows | None


class DecodeGraphs:
    """max_rows: of a step. max_blocks: of a sequence. num_ids: that are drawn from, the first ones; None for all that the
    model has. adapters: those that rows may have; None: none has any. obstacle: what ended capturing before everything was
    captured. lazy_graphs: what is captured of steps with ranges or adapters."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rotary: RotaryTables,
        batches: ForwardBatchBuilder,
        graphs: Graphs,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        num_ids: int | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._num_ids = num_ids or decoder.spec.vocab_size
        self._decoder, self._cache, self._batches, self._graphs = decoder, cache, batches, graphs
        self._adapters = adapters
        self._ranges = DeviceQueryRanges(
            rotary,
            cells=MAX_RANGE_CELLS,
            windows=len(decoder.spec.attention_windows),
            absolute_scores=decoder.spec.scores_by_absolute_position,
        )
        self.rows = DeviceBatch(
            graphs,
            rotary,
            self._ranges,
            most=max_rows,
            groups=len(decoder.spec.kv_groups),
            width=max_blocks,
            ranged_width=max_blocks + _EXTRA_TABLE_COLUMNS,
            block_size=block_size,
            has_states=decoder.spec.state_group is not None,
        )
        self.lazy_graphs = LazyGraphs(self._capture_lazily)
        self._captured: dict[int, _Captured] = {}  # by rows, rising
        self.obstacle: str | None = None
        self.num_replayed = 0

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that a step is captured for, the largest first."""
        sizes = [1 << k for k in range((self.rows.most - 1).bit_length())]
        return [self.rows.most, *reversed(sizes)]

    @property
    def captured(self) -> list[int]:
        """Those that were captured, rising."""
        return list(self._captured)

    @torch.inference_mode()
    def capture(self, sizes: abc.Sequence[int], max_seconds: float = math.inf) -> None:
        """Capture steps of so many rows, in this order, until the time is over, memory is short, or one cannot be captured. Where
        adapters are loaded, then the same with adapters, as far as there is time.

        The largest comes first: it can stand for all others, which take what it has let go of the common memory.
        """
        started = time.monotonic()
        for size in sizes:
            if time.monotonic() - started > max_seconds:
                self.obstacle = f"no more decode steps were captured after {max_seconds:g} seconds"
                break
            try:
                self._captured[size] = self._capture(size)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                what = "no memory is left for it" if is_out_of_memory(error) else str(error).splitlines()[0]
                self.obstacle = f"a decode step of {size} rows was not captured: {what}"
                break
        self._captured = dict(sorted(self._captured.items()))
        if self.obstacle is not None:
            _logger.warning("%s; those of %s rows were", self.obstacle, ", ".join(map(str, self._captured)) or "no")
        for size in sizes if self._adapters and self.obstacle is None else ():
            if time.monotonic() - started <= max_seconds:
                self.lazy_graphs.capture(GraphKey(size, adapted=True))

    @property
    def largest_ranged(self) -> GraphKey | None:
        """The step with ranges that takes most memory, None where the model has none."""
        if self._decoder.spec.has_chunked_attention:
            return None
        rows = max(size for size in self.sizes if 2 * size <= MAX_RANGE_CELLS)
        return GraphKey(rows, 1 << (MAX_RANGE_CELLS // rows).bit_length() - 1)

    @torch.inference_mode()
    def capture_key(self, kind: GraphKey) -> None:
        """Capture one with ranges or adapters, of as many rows as one without was captured for: see `LazyGraphs.capture`."""
        self.lazy_graphs.capture(kind)

    def _capture(self, size: int) -> _Captured:
        outputs: list[StepOutputs] = []

        def step() -> None:
            outputs[:] = [self._compute(GraphKey(size))]
            self._sample_rows(size, outputs[0])

        self.rows.reset()
        replay = self._graphs.capture(step)
        return _Captured(replay, outputs[0])

    def _capture_lazily(self, kind: GraphKey) -> _Captured:
        outputs_buffer = self._captured[
            kind.rows
        ].outputs  # what it makes is put there, so that it keeps no memory of its own

        def step() -> None:
            outputs = self._compute(kind)
            for target, source in zip(_tensors(outputs_buffer), _tensors(outputs), strict=True):
                target.copy_(source)
            self._sample_rows(kind.rows, outputs_buffer)

        self.rows.reset()
        return _Captured(self._graphs.capture(step), outputs_buffer)

    def _compute(self, kind: GraphKey) -> StepOutputs:
        decoder, batch = self._decoder, self.rows.batch(kind.rows, kind.ranges)
        if kind.adapted and self._adapters is not None:
            batch = replace(batch, adapters=self._adapters.with_slots(self.rows.adapter_slots(kind.rows)))
        x, batch = decoder.embed(batch)
        hidden = decoder.run_layers(x, batch, self._cache)
        logits = decoder.logits(hidden)[:, : self._num_ids]
        return StepOutputs(hidden, logits, decoder.backend.row_maxima(logits))

    def _sample_rows(self, size: int, outputs: StepOutputs) -> None:
        assert outputs.maxima is not None
        self.rows.advance(
            size, *self._graphs.sample_rows(outputs.logits, outputs.maxima, self.rows.sampling_tensors(size))
        )

    def join(self) -> None:
        """What torch is asked for from now on comes after the passes that were asked for."""
        self._graphs.join()

    def apply(self, work: abc.Callable[[], None]) -> None:
        """Have this done behind the passes that were asked for, and in front of those to come, without waiting for any."""
        self._graphs.submit(work)

    def run(self, items: abc.Sequence[ScheduledSequence]) -> StepOutputs | None:
        """What a step's rows make, overwritten by the next step; None where no captured one can stand for it."""
        found = self._find_graph(items)
        if found is None:
            return None
        captured, rows = found
        count = rows.metadata.shape[1]
        self.rows.fill(rows.metadata, rows.tables, [GREEDY] * count, rows.ranges, rows.states)
        self._graphs.submit(captured.replay)
        self.rows.record_end()
        self._graphs.join()
        self.num_replayed += 1
        hidden, logits, maxima = captured.outputs
        assert maxima is not None
        return StepOutputs(hidden[:count], logits[:count], (maxima[0][:count], maxima[1][:count]))

    def submit(
        self, items: abc.Sequence[ScheduledSequence], num_passes: int, sampling_rows: abc.Sequence[RowSampling]
    ) -> PendingTokens | None:
        """Ask for passes of rows that draw for themselves; None where no captured step can stand for one of them."""
        found = self._find_graph(items, num_passes)
        if found is None:
            return None
        captured, rows = found
        self.rows.fill(rows.metadata, rows.tables, sampling_rows, rows.ranges, rows.states)
        return self._submit_passes(captured, num_passes, len(items))

    def submit_behind(
        self,
        items: abc.Sequence[ScheduledSequence],
        num_passes: int,
        sampling_rows: abc.Sequence[RowSampling],
        order: abc.Sequence[int],
    ) -> PendingTokens:
        """The same for rows that go on from what the passes asked for last will draw. order: their places among those rows."""
        found = self._find_graph(items, num_passes, ahead=True)
        if found is None:
            raise RuntimeError("a step was planned ahead that cannot follow the one before it on the device")
        captured, rows = found
        self.rows.continue_from(order, rows.metadata, rows.tables, sampling_rows, rows.ranges, rows.states)
        return self._submit_passes(captured, num_passes, len(items))

    def _submit_passes(self, captured: _Captured, num_passes: int, rows: int) -> PendingTokens:
        for _ in range(num_passes):
            self._graphs.submit(captured.replay)
        self.num_replayed += num_passes
        return self.rows.fetch(num_passes, rows)

    def _find_graph(
        self, items: abc.Sequence[ScheduledSequence], num_passes: int = 1, *, ahead: bool = False
    ) -> tuple[_Captured, _GraphInputs] | None:
        size = next((size for size in self._captured if size >= sum(item.num_tokens for item in items)), None)
        if size is None:
            return None
        rows = self._batches.decode_rows(items, num_passes)
        most = 0 if rows is None or rows.ranges is None else rows.ranges.most
        if rows is None or rows.tables.shape[2] > self.rows.width(most):
            return None
        captured, ranges, adapted = self._captured[size], None, bool((rows.metadata[ADAPTER] >= 0).any())
        if most or adapted:
            found = self.lazy_graphs.find(GraphKey(size, most, adapted), ahead=ahead)
            if found is None:
                return None
            kind, captured = found
            ranges = None if rows.ranges is None else rows.ranges.padded(kind.rows, kind.ranges)
        rows.metadata[TOKEN] = rows.metadata[TOKEN].clip(max=self._decoder.spec.vocab_size - 1)
        return captured, _GraphInputs(rows.metadata, rows.tables, ranges, rows.states)


def _tensors(outputs: StepOutputs) -> tuple[Tensor, ...]:
    assert outputs.maxima is not None
    return outputs.hidden, outputs.logits, *outputs.maxima


class StepFuture:
    """A started step: its results, or tokens that the device is still computing.

    plan: the plan that is computed. failed: the outputs of requests that failed for lack of memory.
    """

    def __init__(self, plan: SchedulerOutput, results: list[StepResult], pending: PendingTokens | None = None) -> None:
        self.plan = plan
        self.failed: list[RequestOutput] = []
        self._results, self._pending = results, pending

    @property
    def in_flight(self) -> bool:
        """Whether the device may still be computing the step."""
        return self._pending is not None

    def results(self) -> list[StepResult]:
        """Wait for the sampled tokens. Raises the errors that the device reports."""
        if self._pending is not None:
            ids, statuses = self._pending.wait()
            self._pending = None
            sampled = zip(self.plan.sequences, ids.T.tolist(), statuses.T.tolist(), strict=True)
            self._results = [multi_step_result(item.seq_id, *found) for item, *found in sampled]
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
        return StepFuture(plan, [], pending)

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
