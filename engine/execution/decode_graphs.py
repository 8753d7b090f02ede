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
from windlass.engine.cache.storage import KVStorage
from windlass.engine.execution.batch import BatchBuilder
from windlass.engine.execution.device_ranges import DeviceRanges
from windlass.engine.execution.device_rows import ADAPTER, LARGEST, TOKEN, DeviceRows, Fetched, RowDrawing
from windlass.engine.execution.graphs_on_demand import MOST_CELLS, GraphsOnDemand, StepKind
from windlass.engine.execution.replay import StepTensors
from windlass.engine.execution.state_rows import StateNumbers
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.scheduling.plan import ScheduledSequence
from windlass.kernels import Graphs, is_out_of_memory

_SPARE_BLOCKS = 2 * MAX_RUNS  # around passages blocks stay half empty

_logger = logging.getLogger("windlass.engine")


class _Captured(NamedTuple):
    again: abc.Callable[[], None]
    made: StepTensors


class _Rows(NamedTuple):
    """What a captured step is told of a step's rows, see `DeviceRows.fill`."""

    said: NDArray[np.int64]
    tables: NDArray[np.int32]
    ranges: NDArray[np.int64] | None
    states: StateNumbers | None


class DecodeGraphs:
    """most_rows: of a step. most_blocks: of a sequence. num_ids: that are drawn from, the first ones; None for all that the
    model has. adapters: those that rows may have; None: none has any. obstacle: what ended capturing before everything was
    captured. on_demand: what is captured of steps with ranges or adapters."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVStorage,
        rotary: RotaryTables,
        batches: BatchBuilder,
        graphs: Graphs,
        *,
        most_rows: int,
        most_blocks: int,
        block_size: int,
        num_ids: int | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._num_ids = num_ids or decoder.spec.vocab_size
        self._decoder, self._cache, self._batches, self._graphs = decoder, cache, batches, graphs
        self._adapters = adapters
        self._ranges = DeviceRanges(
            rotary,
            cells=MOST_CELLS,
            windows=len(decoder.spec.attention_windows),
            anchored=decoder.spec.scores_by_absolute_position,
        )
        self.rows = DeviceRows(
            graphs,
            rotary,
            self._ranges,
            most=most_rows,
            groups=len(decoder.spec.kv_groups),
            width=most_blocks,
            ranged_width=most_blocks + _SPARE_BLOCKS,
            block_size=block_size,
            has_states=decoder.spec.state_group is not None,
        )
        self.on_demand = GraphsOnDemand(self._capture_on_demand)
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
    def capture(self, sizes: abc.Sequence[int], most_seconds: float = math.inf) -> None:
        """Capture steps of so many rows, in this order, until the time is over, memory is short, or one cannot be captured. Where
        adapters are loaded, then the same with adapters, as far as there is time.

        The largest comes first: it can stand for all others, which take what it has let go of the common memory.
        """
        started = time.monotonic()
        for size in sizes:
            if time.monotonic() - started > most_seconds:
                self.obstacle = f"no more decode steps were captured after {most_seconds:g} seconds"
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
            if time.monotonic() - started <= most_seconds:
                self.on_demand.capture(StepKind(size, adapted=True))

    @property
    def largest_ranged(self) -> StepKind | None:
        """The step with ranges that takes most memory, None where the model has none."""
        if self._decoder.spec.has_chunks:
            return None
        rows = max(size for size in self.sizes if 2 * size <= MOST_CELLS)
        return StepKind(rows, 1 << (MOST_CELLS // rows).bit_length() - 1)

    @torch.inference_mode()
    def capture_further(self, kind: StepKind) -> None:
        """Capture one with ranges or adapters, of as many rows as one without was captured for: see `GraphsOnDemand.capture`."""
        self.on_demand.capture(kind)

    def _capture(self, size: int) -> _Captured:
        made: list[StepTensors] = []

        def step() -> None:
            made[:] = [self._compute(StepKind(size))]
            self._draw(size, made[0])

        self.rows.reset()
        again = self._graphs.capture(step)
        return _Captured(again, made[0])

    def _capture_on_demand(self, kind: StepKind) -> _Captured:
        kept = self._captured[kind.rows].made  # what it makes is put there, so that it keeps no memory of its own

        def step() -> None:
            made = self._compute(kind)
            for target, source in zip(_tensors(kept), _tensors(made), strict=True):
                target.copy_(source)
            self._draw(kind.rows, kept)

        self.rows.reset()
        return _Captured(self._graphs.capture(step), kept)

    def _compute(self, kind: StepKind) -> StepTensors:
        decoder, batch = self._decoder, self.rows.batch(kind.rows, kind.ranges)
        if kind.adapted and self._adapters is not None:
            batch = replace(batch, adapters=self._adapters.with_slots(self.rows.adapter_slots(kind.rows)))
        x, batch = decoder.embed(batch)
        hidden = decoder.run_layers(x, batch, self._cache)
        logits = decoder.logits(hidden)[:, : self._num_ids]
        return StepTensors(hidden, logits, decoder.backend.row_maxima(logits))

    def _draw(self, size: int, made: StepTensors) -> None:
        assert made.maxima is not None
        self.rows.go_on(size, *self._graphs.draw_rows(made.logits, made.maxima, self.rows.draws(size)))

    def join(self) -> None:
        """What torch is asked for from now on comes after the passes that were asked for."""
        self._graphs.join()

    def follow(self, work: abc.Callable[[], None]) -> None:
        """Have this done behind the passes that were asked for, and in front of those to come, without waiting for any."""
        self._graphs.ask(work)

    def run(self, items: abc.Sequence[ScheduledSequence]) -> StepTensors | None:
        """What a step's rows make, overwritten by the next step; None where no captured one can stand for it."""
        found = self._rows_of(items)
        if found is None:
            return None
        captured, rows = found
        count = rows.said.shape[1]
        self.rows.fill(rows.said, rows.tables, [LARGEST] * count, rows.ranges, rows.states)
        self._graphs.ask(captured.again)
        self.rows.end()
        self._graphs.join()
        self.num_replayed += 1
        hidden, logits, maxima = captured.made
        assert maxima is not None
        return StepTensors(hidden[:count], logits[:count], (maxima[0][:count], maxima[1][:count]))

    def begin(
        self, items: abc.Sequence[ScheduledSequence], passes: int, drawing: abc.Sequence[RowDrawing]
    ) -> Fetched | None:
        """Ask for passes of rows that draw for themselves; None where no captured step can stand for one of them."""
        found = self._rows_of(items, passes)
        if found is None:
            return None
        captured, rows = found
        self.rows.fill(rows.said, rows.tables, drawing, rows.ranges, rows.states)
        return self._passes(captured, passes, len(items))

    def begin_ahead(
        self,
        items: abc.Sequence[ScheduledSequence],
        passes: int,
        drawing: abc.Sequence[RowDrawing],
        order: abc.Sequence[int],
    ) -> Fetched:
        """The same for rows that go on from what the passes asked for last will draw. order: their places among those rows."""
        found = self._rows_of(items, passes, ahead=True)
        if found is None:
            raise RuntimeError("a step was planned ahead that cannot follow the one before it on the device")
        captured, rows = found
        self.rows.continue_from(order, rows.said, rows.tables, drawing, rows.ranges, rows.states)
        return self._passes(captured, passes, len(items))

    def _passes(self, captured: _Captured, passes: int, rows: int) -> Fetched:
        for _ in range(passes):
            self._graphs.ask(captured.again)
        self.num_replayed += passes
        return self.rows.fetch(passes, rows)

    def _rows_of(
        self, items: abc.Sequence[ScheduledSequence], passes: int = 1, *, ahead: bool = False
    ) -> tuple[_Captured, _Rows] | None:
        size = next((size for size in self._captured if size >= sum(item.num_tokens for item in items)), None)
        if size is None:
            return None
        rows = self._batches.plain_rows(items, passes)
        most = 0 if rows is None or rows.ranges is None else rows.ranges.most
        if rows is None or rows.tables.shape[2] > self.rows.width(most):
            return None
        captured, ranges, adapted = self._captured[size], None, bool((rows.said[ADAPTER] >= 0).any())
        if most or adapted:
            found = self.on_demand.find(StepKind(size, most, adapted), ahead=ahead)
            if found is None:
                return None
            kind, captured = found
            ranges = None if rows.ranges is None else rows.ranges.padded(kind.rows, kind.ranges)
        rows.said[TOKEN] = rows.said[TOKEN].clip(max=self._decoder.spec.vocab_size - 1)
        return captured, _Rows(rows.said, rows.tables, ranges, rows.states)


def _tensors(made: StepTensors) -> tuple[Tensor, ...]:
    assert made.maxima is not None
    return made.hidden, made.logits, *made.maxima
