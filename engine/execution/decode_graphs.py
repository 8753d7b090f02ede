"""Decode steps captured for some numbers of rows, on a device that runs beside its host.

A step of fewer rows than were captured runs with rows that are none: they read no keys and write none. Responsible for what is
captured and which steps it can stand for. A captured step ends with a draw, so that several can follow each other; where rows
draw in ways that it does not know, its logits are taken and the draw is ignored.
"""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from typing import NamedTuple

import torch

from windlass.engine.cache.storage import KVStorage
from windlass.engine.execution.batch import BatchBuilder, PlainRows
from windlass.engine.execution.device_rows import LARGEST, TOKEN, DeviceRows, Fetched, RowDrawing
from windlass.engine.execution.replay import StepTensors
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.scheduling.plan import ScheduledSequence
from windlass.kernels import Graphs, is_out_of_memory

_logger = logging.getLogger("windlass.engine")


class _Captured(NamedTuple):
    again: abc.Callable[[], None]
    made: StepTensors


class DecodeGraphs:
    """most_rows: of a step. most_blocks: of a sequence. num_ids: that are drawn from, the first ones; None for all that the
    model has. obstacle: what ended capturing before everything was captured."""

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
    ) -> None:
        self._num_ids = num_ids or decoder.spec.vocab_size
        self._decoder, self._cache, self._batches, self._graphs = decoder, cache, batches, graphs
        self.rows = DeviceRows(
            graphs,
            rotary,
            most=most_rows,
            groups=len(decoder.spec.kv_groups),
            width=most_blocks,
            block_size=block_size,
        )
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
        """Capture steps of so many rows, in this order, until the time is over, memory is short, or one cannot be captured.

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

    def _capture(self, size: int) -> _Captured:
        made: list[StepTensors] = []

        def step() -> None:
            decoder = self._decoder
            x, batch = decoder.embed(self.rows.batch(size))
            hidden = decoder.run_layers(x, batch, self._cache)
            logits = decoder.logits(hidden)[:, : self._num_ids]
            maxima = decoder.backend.row_maxima(logits)
            self.rows.go_on(size, *self._graphs.draw_rows(logits, maxima, self.rows.draws(size)))
            made[:] = [StepTensors(hidden, logits, maxima)]

        self.rows.reset()
        again = self._graphs.capture(step)
        return _Captured(again, made[0])

    def join(self) -> None:
        """What torch is asked for from now on comes after the passes that were asked for."""
        self._graphs.join()

    def run(self, items: abc.Sequence[ScheduledSequence]) -> StepTensors | None:
        """What a step's rows make, overwritten by the next step; None where no captured one can stand for it."""
        found = self._rows_of(items)
        if found is None:
            return None
        captured, rows = found
        count = rows.said.shape[1]
        self.rows.fill(rows.said, rows.tables, [LARGEST] * count)
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
        self.rows.fill(rows.said, rows.tables, drawing)
        return self._passes(captured, passes, len(items))

    def begin_ahead(
        self,
        items: abc.Sequence[ScheduledSequence],
        passes: int,
        drawing: abc.Sequence[RowDrawing],
        order: abc.Sequence[int],
    ) -> Fetched:
        """The same for rows that go on from what the passes asked for last will draw. order: their places among those rows."""
        found = self._rows_of(items, passes)
        if found is None:
            raise RuntimeError("a step was planned ahead that cannot follow the one before it on the device")
        captured, rows = found
        self.rows.continue_from(order, rows.tables, drawing)
        return self._passes(captured, passes, len(items))

    def _passes(self, captured: _Captured, passes: int, rows: int) -> Fetched:
        for _ in range(passes):
            self._graphs.ask(captured.again)
        self.num_replayed += passes
        return self.rows.fetch(passes, rows)

    def _rows_of(self, items: abc.Sequence[ScheduledSequence], passes: int = 1) -> tuple[_Captured, PlainRows] | None:
        size = next((size for size in self._captured if size >= sum(item.num_tokens for item in items)), None)
        if size is None:
            return None
        rows = self._batches.plain_rows(items, passes)
        if rows is None or rows.tables.shape[2] > self.rows.width:
            return None
        rows.said[TOKEN] = rows.said[TOKEN].clip(max=self._decoder.spec.vocab_size - 1)
        return self._captured[size], rows
