"""CUDA graphs of decode steps: which are captured, which one runs a step, and the submission of steps that sample on the device.

A step with fewer rows than a captured one is padded with empty rows, which read and write no keys. Steps with slot ranges or
adapters are captured separately, with rows and ranges rounded up to powers of two, once they recur (`LazyGraphs`); those with
adapters at once where adapters are loaded. A captured step ends with sampling; for rows whose sampling is not supported there,
the logits are used and the sampled token is ignored.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, abc
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.batch_builder import DecodeRows, ForwardBatchBuilder
from windlass.engine.execution.device_batch import (
    ADAPTER,
    GREEDY,
    TOKEN,
    DeviceBatch,
    PendingTokens,
    RowSampling,
)
from windlass.engine.execution.query_ranges import pad_range_tables
from windlass.engine.execution.recorded_steps import StepOutputs
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.model.decoder import Decoder
from windlass.engine.sampling.sampler import multi_step_result
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, StepResult
from windlass.kernels import Graphs, is_out_of_memory

_logger = logging.getLogger("windlass.engine")

T = TypeVar("T")

MAX_RANGED_GRAPHS = 16  # captured steps with ranges, each of which takes some megabytes

MAX_RANGE_CELLS = 1024  # rows times ranges of a captured step; each cell may be a query copy in every layer

_CAPTURE_AFTER_MISSES = 2  # lookups that find nothing, before a step is captured; a step may look up twice

_MAX_PADDING_FACTOR = 4  # by which a step's rows or ranges may be padded to use a captured step

# -- steps that are captured when they recur -------------------------------------------------------------------------


class GraphKey(NamedTuple):
    """The size of a captured step. ranges: maximum per row, 0 if there are none. adapted: whether rows may have adapters."""

    rows: int
    ranges: int = 0
    adapted: bool = False

    def covers(self, other: GraphKey) -> bool:
        """Whether a captured step of this size can run steps of the other. Either all rows have ranges or none."""
        alike = (self.ranges > 0) == (other.ranges > 0)
        return alike and self.rows >= other.rows and self.ranges >= other.ranges and self.adapted >= other.adapted

    def __str__(self) -> str:
        ranges = f" in {self.ranges} ranges" if self.ranges else ""
        return f"a decode step of {self.rows} rows{ranges}{' with adapters' if self.adapted else ''}"


class LazyGraphs(Generic[T]):
    """Captured steps with ranges or adapters.

    capture: captures a step of this size; raises RuntimeError if it cannot. obstacle: the reason why no more are captured.
    """

    def __init__(self, capture: abc.Callable[[GraphKey], T]) -> None:
        self._capture = capture
        self._captured: dict[GraphKey, T] = {}
        self._misses: Counter[GraphKey] = Counter()
        self.obstacle: str | None = None

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._captured)

    def find(self, key: GraphKey, *, ahead: bool) -> tuple[GraphKey, T] | None:
        """The smallest captured step that can run a step, or None. key: rows as captured without ranges, any number of ranges.

        ahead: the step before this one has been submitted. Nothing is captured then, and the graph of that step is large enough
        for this one, whatever the padding.
        """
        wanted = key._replace(ranges=max(2, 1 << (key.ranges - 1).bit_length()) if key.ranges else 0)
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

    @torch.inference_mode()
    def capture(self, key: GraphKey) -> None:
        """Capture a step, for a number of rows that is captured without ranges and adapters, or set `obstacle` if that fails."""
        if key.adapted and key.ranges:
            # A step planned ahead may have no ranges any more, and needs a graph too.
            self.capture(key._replace(ranges=0))
        if key in self._captured or self.obstacle is not None:
            return
        try:
            self._captured[key] = self._capture(key)
        except RuntimeError as error:
            self.obstacle = _capture_failure(key, error)
            _logger.warning("%s; further steps with ranges or adapters run without CUDA graphs", self.obstacle)

    def _is_due(self, wanted: GraphKey) -> bool:
        if self.obstacle is not None or wanted.rows * wanted.ranges > MAX_RANGE_CELLS:
            return False
        if wanted.ranges and sum(key.ranges > 0 for key in self._captured) >= MAX_RANGED_GRAPHS:
            return False
        self._misses[wanted] += 1
        return self._misses[wanted] > _CAPTURE_AFTER_MISSES


def _capture_failure(key: GraphKey, error: RuntimeError) -> str:
    what = "no memory is left for it" if is_out_of_memory(error) else str(error).splitlines()[0]
    return f"{key} was not captured: {what}"


# -- decode steps ----------------------------------------------------------------------------------------------------


class _Captured(NamedTuple):
    replay: abc.Callable[[], None]
    outputs: StepOutputs


class DecodeGraphs:
    """The captured decode steps of a model.

    max_rows: maximum rows of a step. max_blocks: maximum blocks of a sequence. num_ids: only the first `num_ids` token ids are
    sampled from. obstacle: the reason why not all steps were captured. lazy_graphs: the steps
    with ranges or adapters.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        batches: ForwardBatchBuilder,
        graphs: Graphs,
        max_rows: int,
        max_blocks: int,
        num_ids: int,
    ) -> None:
        self._num_ids = num_ids
        self._decoder, self._cache, self._batches, self._graphs = decoder, cache, batches, graphs
        self._adapters = batches.adapters
        self.rows = DeviceBatch(
            graphs, decoder.spec, batches.rotary, batches.block_size, max_rows, max_blocks, MAX_RANGE_CELLS
        )
        self._row_of: dict[int, int] = {}  # by sequence, its row in the passes submitted last
        self.lazy_graphs = LazyGraphs(self._capture)
        self._captured: dict[int, _Captured] = {}  # by rows, ascending
        self.obstacle: str | None = None
        self.num_replayed = 0

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows to capture steps for, the largest first."""
        sizes = [1 << k for k in range((self.rows.max_rows - 1).bit_length())]
        return [self.rows.max_rows, *reversed(sizes)]

    @property
    def captured(self) -> list[int]:
        """The captured numbers of rows, ascending."""
        return list(self._captured)

    @torch.inference_mode()
    def capture(self, sizes: abc.Sequence[int], max_seconds: float = math.inf) -> None:
        """Capture steps of these numbers of rows, in order, until the time is up, memory is short, or a capture fails.

        If adapters are loaded, the same steps are then captured with adapters, while time remains. The largest number should be
        first: its graph can run all other steps, and these reuse the memory that it has released to the common pool.
        """
        started = time.monotonic()
        for size in sizes:
            if time.monotonic() - started > max_seconds:
                self.obstacle = f"no more decode steps were captured after {max_seconds:g} seconds"
                break
            try:
                self._captured[size] = self._capture(GraphKey(size))
            except RuntimeError as error:
                self.obstacle = _capture_failure(GraphKey(size), error)
                break
        self._captured = dict(sorted(self._captured.items()))
        if self.obstacle is not None:
            sizes_captured = ", ".join(map(str, self._captured)) or "no"
            _logger.warning("%s; only steps of %s rows use CUDA graphs", self.obstacle, sizes_captured)
        for size in sizes if self._adapters and self.obstacle is None else ():
            if time.monotonic() - started <= max_seconds:
                self.lazy_graphs.capture(GraphKey(size, adapted=True))

    @property
    def largest_ranged(self) -> GraphKey | None:
        """The step with ranges that needs the most memory; None if the model has no such steps."""
        if self._decoder.spec.has_chunked_attention:
            return None
        rows = max(size for size in self.sizes if 2 * size <= MAX_RANGE_CELLS)
        return GraphKey(rows, 1 << (MAX_RANGE_CELLS // rows).bit_length() - 1)

    def _capture(self, key: GraphKey) -> _Captured:
        # Steps with ranges or adapters write the outputs of the step without, so that their graphs hold no memory for outputs.
        shared = self._captured[key.rows].outputs if key.ranges or key.adapted else None
        found: list[StepOutputs] = []

        def step() -> None:
            outputs = self._compute(key)
            if shared is not None:
                for target, source in zip(_tensors(shared), _tensors(outputs), strict=True):
                    target.copy_(source)
                outputs = shared
            found[:] = [outputs]
            assert outputs.maxima is not None
            tensors = self.rows.sampling_tensors(key.rows)
            self.rows.advance(key.rows, *self._graphs.sample_rows(outputs.logits, outputs.maxima, tensors))

        self.rows.reset()
        return _Captured(self._graphs.capture(step), found[0])

    def _compute(self, key: GraphKey) -> StepOutputs:
        decoder, batch = self._decoder, self.rows.batch(key.rows, key.ranges)
        if key.adapted and self._adapters is not None:
            batch = replace(batch, adapters=self._adapters.with_slots(self.rows.adapter_slots(key.rows)))
        x, batch = decoder.embed(batch)
        hidden = decoder.run_layers(x, batch, self._cache)
        logits = decoder.logits(hidden)[:, : self._num_ids]
        return StepOutputs(hidden, logits, decoder.backend.row_maxima(logits))

    def join(self) -> None:
        """Order torch work submitted from now on after all passes submitted so far."""
        self._graphs.join()

    def enqueue(self, work: abc.Callable[[], None]) -> None:
        """Submit work between the passes submitted so far and later ones, without waiting."""
        self._graphs.submit(work)

    def run(self, items: abc.Sequence[ScheduledSequence]) -> StepOutputs | None:
        """The outputs of a step, which the next step overwrites; None if no captured step can run it."""
        found = self._find_graph(items)
        if found is None:
            return None
        captured, rows, ranges = found
        count = rows.metadata.shape[1]
        self.rows.fill(rows, [GREEDY] * count, ranges)
        self._graphs.submit(captured.replay)
        self.rows.record_end()
        self._graphs.join()
        self.num_replayed += 1
        hidden, logits, ids, highest = (tensor[:count] for tensor in _tensors(captured.outputs))
        return StepOutputs(hidden, logits, (ids, highest))

    def submit(
        self,
        items: abc.Sequence[ScheduledSequence],
        num_passes: int,
        sampling_rows: abc.Sequence[RowSampling],
        *,
        ahead: bool = False,
    ) -> PendingTokens | None:
        """Submit passes of rows that are sampled on the device; None if no captured step can run them.

        ahead: the rows continue from the passes submitted last, and there must be such a captured step.
        """
        found = self._find_graph(items, num_passes, ahead=ahead)
        if found is None and ahead:
            raise RuntimeError("a step was planned ahead that cannot follow the one before it on the device")
        if found is None:
            return None
        captured, rows, ranges = found
        self.rows.fill(rows, sampling_rows, ranges, [self._row_of[item.seq_id] for item in items] if ahead else None)
        for _ in range(num_passes):
            self._graphs.submit(captured.replay)
        self.num_replayed += num_passes
        pending = self.rows.fetch(num_passes, len(items))
        self._row_of = {item.seq_id: row for row, item in enumerate(items)}
        return pending

    def _find_graph(
        self, items: abc.Sequence[ScheduledSequence], num_passes: int = 1, *, ahead: bool = False
    ) -> tuple[_Captured, DecodeRows, NDArray[np.int64] | None] | None:
        """The captured step for these items, their rows, and their range tables in its shape; None if there is no such step."""
        size = next((size for size in self._captured if size >= sum(item.num_tokens for item in items)), None)
        if size is None:
            return None
        rows = self._batches.decode_rows(items, num_passes)
        if rows is None:
            return None
        num_ranges = max((table.shape[1] for table in rows.range_tables or ()), default=0)
        if rows.tables.shape[2] > self.rows.width(num_ranges):
            return None
        captured, ranges, adapted = self._captured[size], None, bool((rows.metadata[ADAPTER] >= 0).any())
        if num_ranges or adapted:
            found = self.lazy_graphs.find(GraphKey(size, num_ranges, adapted), ahead=ahead)
            if found is None:
                return None
            key, captured = found
            if rows.range_tables is not None:
                ranges = pad_range_tables(rows.range_tables, key.rows, key.ranges)
        rows.metadata[TOKEN] = rows.metadata[TOKEN].clip(max=self._decoder.spec.vocab_size - 1)
        return captured, rows, ranges


def _tensors(outputs: StepOutputs) -> tuple[Tensor, ...]:
    assert outputs.maxima is not None
    return outputs.hidden, outputs.logits, *outputs.maxima


# -- started steps ---------------------------------------------------------------------------------------------------


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
