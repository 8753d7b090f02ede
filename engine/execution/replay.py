"""Decode steps by repetition: the calls of an earlier step of as many rows, made again on the same memory.

Responsible for the memory those steps share and for when a recording may stand for a step. A step is dozens to hundreds
of kernels; Python around them would cost a tenth of a step even of a quantized 1B model, and more of a smaller one's.
What a step computes does not change: the same functions run with the same operands in the same order. It knows nothing
of requests.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.storage import KVStorage
from windlass.engine.execution.sequences import columns_for
from windlass.engine.model.batch import ForwardBatch, QueryVersions
from windlass.engine.model.decoder import Decoder
from windlass.kernels import Recorder, Recording, RowsAhead

_TENSORS = tuple(
    f.name
    for f in fields(ForwardBatch)
    if f.name not in ("lasting", "versions", "adapters", "token_types", "prompts", "only_ends", "hidden")
)
_VERSIONS = tuple(f.name for f in fields(QueryVersions))

# For what a step has alive at once: one layer's activations and the logits, whatever the number of layers. Pages that no
# step needed are never touched.
_ARENA_BYTES = 64 << 20
_MAX_PLANS = 32  # rows change as streams come and go; under speculation each comes with 1 to 1 + k


class StepTensors(NamedTuple):
    """Of a step: normed hidden states [T, hidden], logits [T, V], and where asked for their `Backend.row_maxima`."""

    hidden: Tensor
    logits: Tensor
    maxima: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class _Plan:
    """What steps of one shape share. confirmed: two steps have been recorded and agree. obstacle: what keeps them from it.

    x: the first layer's input, None where gathering it is among the recorded calls.
    """

    batch: ForwardBatch
    x: Tensor | None
    recording: Recording | None = None
    confirmed: bool = False
    obstacle: str | None = None
    made: StepTensors | None = None


class DecodeReplay:
    """max_rows: steps of more are not repeated. obstacle: what set that bound, None while nothing is known against any."""

    def __init__(self, decoder: Decoder, cache: KVStorage) -> None:
        self._decoder, self._cache = decoder, cache
        # By rows, width of the block tables, whether maxima are wanted, whether any row has an adapter, and the shapes of the
        # queries' versions. So a step without adapters makes no call for them, and any mix of them is one plan.
        self._plans: OrderedDict[tuple[int, ...], _Plan | None] = OrderedDict()
        self.obstacle = decoder.backend.recording_refusal
        # Of all plans: steps come one after the other.
        self._recorder = None if self.obstacle is not None else decoder.backend.recorder(_ARENA_BYTES)
        self.max_rows = sys.maxsize if self.obstacle is None else 0
        spec = decoder.spec
        tables = [decoder.embedding, *(() if decoder.layer_inputs is None else (decoder.layer_inputs.table,))]
        looks_up = decoder.dtype == torch.float32 or all(isinstance(table, Tensor) for table in tables)
        self._embeds_in_kernels = looks_up and not spec.changes_scales and spec.joined is None
        self.num_repeated = 0

    def run(self, batch: ForwardBatch, *, maxima: bool) -> StepTensors | None:
        """What a batch of single tokens makes, overwritten by the next step. maxima: whether the largest logits are wanted.

        None where the caller has to run the step itself: other batches, shapes seen for the first time, and more rows than
        `max_rows`.
        """
        rows, width = batch.input_ids.shape[0], _width_of(batch)
        if self._recorder is None or rows > self.max_rows or rows != batch.seq_lens.shape[0]:
            return None
        key = _key_of(batch, maxima)
        if key not in self._plans:
            self._plans[key] = None
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
            return None
        self._plans.move_to_end(key)
        plan = self._plans[key]
        x = None
        if not self._embeds_in_kernels:
            x, batch = self._decoder.embed(batch)
        if plan is None:
            plan = self._plans[key] = _new_plan(batch, x, width)
        _fill(plan, batch, x)
        if plan.confirmed and plan.recording is not None and plan.made is not None:
            if plan.recording.repeat():
                self.num_repeated += 1
                return plan.made
            if self._decoder.spec.vocabulary is not None:
                raise RuntimeError("a step of several ranks failed: its ranks cannot begin it again, each on its own")
            if self._decoder.spec.state_group is not None:
                raise RuntimeError("a step that changes states failed: it cannot be begun again on what it has changed")
            _fill(plan, batch, x)  # the call that failed raises again below, with a message
        found = self._record(self._recorder, plan, maxima)
        if plan.obstacle is not None:  # fewer rows may still do: they need less memory, and kernels that suit few
            self.max_rows, self.obstacle = rows - 1, plan.obstacle
            del self._plans[key]
        return found

    def draw_passes(
        self, batch: ForwardBatch, ahead: RowsAhead, passes: int, stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """The largest logits' ids of up to `passes` steps in a row, the first of them `batch`: see `Recording.draw_passes`.

        None where the caller has to go step by step: what a step needs besides what `ahead` fills is not in recorded calls.
        """
        plan = self._plans.get(_key_of(batch, True))
        if (
            plan is None
            or not plan.confirmed
            or plan.recording is None
            or plan.made is None
            or plan.made.maxima is None
        ):
            return None
        if plan.x is not None or plan.batch.input_ids is not batch.input_ids:
            return None
        _fill(plan, batch, None)
        drawn = plan.recording.draw_passes(ahead, passes, plan.made.maxima, stop_ids)
        if drawn is not None:
            self.num_repeated += len(drawn)
        return drawn

    def _record(self, recorder: Recorder, plan: _Plan, maxima: bool) -> StepTensors:
        with recorder.record() as recording:
            x, batch = self._decoder.embed(plan.batch) if plan.x is None else (plan.x, plan.batch)
            hidden = self._decoder.run_layers(x, batch, self._cache)
            logits = self._decoder.logits(hidden)
            largest = self._decoder.backend.row_maxima(logits) if maxima else None
        plan.made = StepTensors(hidden, logits, largest)
        earlier, plan.recording = plan.recording, recording
        plan.obstacle = recording.obstacle
        if earlier is not None and plan.obstacle is None:
            plan.confirmed = earlier.same_values(recording)
            if not plan.confirmed:
                plan.obstacle = "the calls of two steps differ in more than what their tensors hold"
        return plan.made


def _new_plan(batch: ForwardBatch, x: Tensor | None, width: int) -> _Plan:
    own_x = None if x is None else torch.empty_like(x)
    if batch.lasting and batch.block_tables.shape[2] == width:
        return _Plan(batch, own_x)
    copies = {name: tensor.clone() for name in _TENSORS if (tensor := getattr(batch, name)) is not None}
    groups, rows, _ = batch.block_tables.shape
    copies["block_tables"] = torch.full((groups, rows, width), -1, dtype=torch.int32)
    adapters = None if batch.adapters is None else batch.adapters.with_slots(batch.adapters.slots.clone())
    return _Plan(ForwardBatch(**copies, versions=_copied(batch.versions), adapters=adapters), own_x)


def _width_of(batch: ForwardBatch) -> int:
    """Columns of the block tables in the memory that such a step is repeated on."""
    return columns_for(batch.block_tables.shape[2])


def _key_of(batch: ForwardBatch, maxima: bool) -> tuple[int, ...]:
    """What steps have in common that are one plan."""
    adapters = batch.adapters is not None
    return batch.input_ids.shape[0], _width_of(batch), maxima, adapters, *_shape_of(batch.versions)


def _shape_of(versions: QueryVersions | None) -> tuple[int, ...]:
    """What two batches' versions agree in where their steps are of one shape."""
    if versions is None:
        return ()
    parts = versions.anchor_cos is not None, versions.far_slots is not None
    return versions.ends.shape[1], versions.sources.shape[0], *parts


def _copied(versions: QueryVersions | None) -> QueryVersions | None:
    if versions is None:
        return None
    found: dict[str, Any] = {name: getattr(versions, name) for name in _VERSIONS}
    copies: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in found.items()}
    return QueryVersions(**copies)


def _fill(plan: _Plan, batch: ForwardBatch, x: Tensor | None) -> None:
    """Put this step's operands where the recorded calls look for them; a lasting batch stands there already."""
    if plan.x is not None and x is not None:
        plan.x.copy_(x)
    if batch is plan.batch:
        return
    for name in _TENSORS:
        source, target = getattr(batch, name), getattr(plan.batch, name)
        if source is not None and source is not target:
            (target[:, :, : source.shape[2]] if name == "block_tables" else target).copy_(source)
    adapters, own = batch.adapters, plan.batch.adapters
    if adapters is not None and own is not None and adapters.slots is not own.slots:
        own.slots.copy_(adapters.slots)
    if batch.versions is not None and plan.batch.versions is not None:
        for name in _VERSIONS:
            source, target = getattr(batch.versions, name), getattr(plan.batch.versions, name)
            if source is not None:
                target.copy_(source)
