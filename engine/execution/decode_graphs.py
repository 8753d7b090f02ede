"""Decode steps captured for some numbers of rows, on a device that runs beside its host.

A step of fewer rows than were captured runs with rows that are none: they read no keys and write none. Steps whose rows meet
their keys in ranges, or have adapters, are captured apart, once they come again and again; those with adapters at once where
some are loaded. Ranges may be empty in them, and rows without an adapter. Responsible for what is captured and which steps it can
stand for. A captured step ends with a draw, so that several can follow each other; where rows draw in ways that it does not know,
its logits are taken and the draw is ignored.
"""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.reuse import MAX_RUNS
from windlass.engine.cache.storage import KVCache
from windlass.engine.execution.batch import ForwardBatchBuilder
from windlass.engine.execution.device_ranges import DeviceQueryRanges
from windlass.engine.execution.device_rows import ADAPTER, GREEDY, TOKEN, DeviceBatch, PendingTokens, RowSampling
from windlass.engine.execution.graphs_on_demand import MAX_RANGE_CELLS, GraphKey, LazyGraphs
from windlass.engine.execution.replay import StepOutputs
from windlass.engine.execution.state_rows import StateRowArrays
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.scheduling.plan import ScheduledSequence
from windlass.kernels import Graphs, is_out_of_memory

_EXTRA_TABLE_COLUMNS = 2 * MAX_RUNS  # around passages blocks stay half empty

_logger = logging.getLogger("windlass.engine")


class _Captured(NamedTuple):
    replay: abc.Callable[[], None]
    outputs: StepOutputs


class _GraphInputs(NamedTuple):
    """What a captured step is told of a step's rows, see `DeviceBatch.fill`."""

    metadata: NDArray[np.int64]
    tables: NDArray[np.int32]
    ranges: NDArray[np.int64] | None
    states: StateRowArrays | None


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
