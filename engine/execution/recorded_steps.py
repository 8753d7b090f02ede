"""Recorded steps: decode steps replayed as the recorded kernel calls of an earlier step with the same shape (CPU).

Holds the memory that such steps share and decides when a recording is valid for a step. A step is dozens to hundreds of kernels; Python around them costs a tenth of a step of a quantized 1B model. The same functions run with the same operands in the same order, so results are bit-identical.
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

from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.input_batch import table_width
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.forward_batch import ForwardBatch, RotatedQueryCopies
from windlass.kernels import MultiStepInputs, Recorder, Recording

_ROTATED_QUERY_FIELDS = tuple(f.name for f in fields(RotatedQueryCopies))

_BATCH_TENSORS = tuple(
    f.name
    for f in fields(ForwardBatch)
    if f.name not in ("lasting", "versions", "adapters", "token_types", "prompts", "only_last_tokens", "hidden")
)

# For what a step has alive at once: one layer's activations and the logits, whatever the number of layers. Pages that no
# step needed are never touched.
_ARENA_BYTES = 64 << 20

_MAX_RECORDINGS = 32  # rows change as streams come and go; under speculation each comes with 1 to 1 + k


class StepOutputs(NamedTuple):
    """Of a step: normed hidden states [T, hidden], logits [T, V], and where asked for their `Backend.row_maxima`."""

    hidden: Tensor
    logits: Tensor
    maxima: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class _StepRecording:
    """What steps of one shape share. confirmed: two steps have been recorded and agree. obstacle: what keeps them from it.

    x: the first layer's input, None where gathering it is among the recorded calls.
    """

    batch: ForwardBatch
    x: Tensor | None
    recording: Recording | None = None
    confirmed: bool = False
    obstacle: str | None = None
    outputs: StepOutputs | None = None


class DecodeReplay:
    """max_rows: steps of more are not repeated. obstacle: what set that bound, None while nothing is known against any."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        # By rows, width of the block tables, whether maxima are wanted, whether any row has an adapter, and the shapes of the
        # queries' versions. So a step without adapters makes no call for them, and any mix of them is one plan.
        self._recordings: OrderedDict[tuple[int, ...], _StepRecording | None] = OrderedDict()
        self.obstacle = decoder.backend.recording_refusal
        # Of all plans: steps come one after the other.
        self._recorder = None if self.obstacle is not None else decoder.backend.recorder(_ARENA_BYTES)
        self.max_rows = sys.maxsize if self.obstacle is None else 0
        spec = decoder.spec
        tables = [
            decoder.embedding,
            *(() if decoder.per_layer_embeddings is None else (decoder.per_layer_embeddings.table,)),
        ]
        embeds_by_lookup = decoder.dtype == torch.float32 or all(isinstance(table, Tensor) for table in tables)
        self._embeds_in_kernels = embeds_by_lookup and not spec.scales_queries and spec.mtp_input is None
        self.num_replayed = 0

    def run(self, batch: ForwardBatch, *, maxima: bool) -> StepOutputs | None:
        """What a batch of single tokens makes, overwritten by the next step. maxima: whether the largest logits are wanted.

        None where the caller has to run the step itself: other batches, shapes seen for the first time, and more rows than
        `max_rows`.
        """
        rows, width = batch.input_ids.shape[0], _width_of(batch)
        if self._recorder is None or rows > self.max_rows or rows != batch.seq_lens.shape[0]:
            return None
        key = _key_of(batch, maxima)
        if key not in self._recordings:
            self._recordings[key] = None
            while len(self._recordings) > _MAX_RECORDINGS:
                self._recordings.popitem(last=False)
            return None
        self._recordings.move_to_end(key)
        entry = self._recordings[key]
        x = None
        if not self._embeds_in_kernels:
            x, batch = self._decoder.embed(batch)
        if entry is None:
            entry = self._recordings[key] = _new_recording(batch, x, width)
        _fill(entry, batch, x)
        if entry.confirmed and entry.recording is not None and entry.outputs is not None:
            if entry.recording.repeat():
                self.num_replayed += 1
                return entry.outputs
            if self._decoder.spec.vocabulary is not None:
                raise RuntimeError("a step of several ranks failed: its ranks cannot begin it again, each on its own")
            if self._decoder.spec.state_group is not None:
                raise RuntimeError("a step that changes states failed: it cannot be begun again on what it has changed")
            _fill(entry, batch, x)  # the call that failed raises again below, with a message
        found = self._record(self._recorder, entry, maxima)
        if entry.obstacle is not None:  # fewer rows may still do: they need less memory, and kernels that suit few
            self.max_rows, self.obstacle = rows - 1, entry.obstacle
            del self._recordings[key]
        return found

    def run_decode_steps(
        self, batch: ForwardBatch, ahead: MultiStepInputs, num_passes: int, stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """The largest logits' ids of up to `num_passes` steps in a row, the first of them `batch`: see `Recording.run_decode_steps`.

        None where the caller has to go step by step: what a step needs besides what `ahead` fills is not in recorded calls.
        """
        entry = self._recordings.get(_key_of(batch, True))
        if (
            entry is None
            or not entry.confirmed
            or entry.recording is None
            or entry.outputs is None
            or entry.outputs.maxima is None
        ):
            return None
        if entry.x is not None or entry.batch.input_ids is not batch.input_ids:
            return None
        _fill(entry, batch, None)
        drawn = entry.recording.run_decode_steps(ahead, num_passes, entry.outputs.maxima, stop_ids)
        if drawn is not None:
            self.num_replayed += len(drawn)
        return drawn

    def _record(self, recorder: Recorder, entry: _StepRecording, maxima: bool) -> StepOutputs:
        with recorder() as recording:
            x, batch = self._decoder.embed(entry.batch) if entry.x is None else (entry.x, entry.batch)
            hidden = self._decoder.run_layers(x, batch, self._cache)
            logits = self._decoder.logits(hidden)
            largest = self._decoder.backend.row_maxima(logits) if maxima else None
        entry.outputs = StepOutputs(hidden, logits, largest)
        earlier, entry.recording = entry.recording, recording
        entry.obstacle = recording.obstacle
        if earlier is not None and entry.obstacle is None:
            entry.confirmed = earlier.same_calls(recording)
            if not entry.confirmed:
                entry.obstacle = "the calls of two steps differ in more than what their tensors hold"
        return entry.outputs


def _new_recording(batch: ForwardBatch, x: Tensor | None, width: int) -> _StepRecording:
    own_x = None if x is None else torch.empty_like(x)
    if batch.persistent and batch.block_tables.shape[2] == width:
        return _StepRecording(batch, own_x)
    copies = {name: tensor.clone() for name in _BATCH_TENSORS if (tensor := getattr(batch, name)) is not None}
    groups, rows, _ = batch.block_tables.shape
    copies["block_tables"] = torch.full((groups, rows, width), -1, dtype=torch.int32)
    adapters = None if batch.adapters is None else batch.adapters.with_slots(batch.adapters.slots.clone())
    return _StepRecording(ForwardBatch(**copies, query_copies=_copied(batch.query_copies), adapters=adapters), own_x)


def _width_of(batch: ForwardBatch) -> int:
    """Columns of the block tables in the memory that such a step is repeated on."""
    return table_width(batch.block_tables.shape[2])


def _key_of(batch: ForwardBatch, maxima: bool) -> tuple[int, ...]:
    """What steps have in common that are one plan."""
    adapters = batch.adapters is not None
    return batch.input_ids.shape[0], _width_of(batch), maxima, adapters, *_shape_of(batch.query_copies)


def _shape_of(query_copies: RotatedQueryCopies | None) -> tuple[int, ...]:
    """What two batches' versions agree in where their steps are of one shape."""
    if query_copies is None:
        return ()
    parts = query_copies.anchor_cos is not None, query_copies.second_key_slots is not None
    return query_copies.ends.shape[1], query_copies.sources.shape[0], *parts


def _copied(query_copies: RotatedQueryCopies | None) -> RotatedQueryCopies | None:
    if query_copies is None:
        return None
    found: dict[str, Any] = {name: getattr(query_copies, name) for name in _ROTATED_QUERY_FIELDS}
    copies: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in found.items()}
    return RotatedQueryCopies(**copies)


def _fill(entry: _StepRecording, batch: ForwardBatch, x: Tensor | None) -> None:
    """Put this step's operands where the recorded calls look for them; a lasting batch stands there already."""
    if entry.x is not None and x is not None:
        entry.x.copy_(x)
    if batch is entry.batch:
        return
    for name in _BATCH_TENSORS:
        source, target = getattr(batch, name), getattr(entry.batch, name)
        if source is not None and source is not target:
            (target[:, :, : source.shape[2]] if name == "block_tables" else target).copy_(source)
    adapters, own = batch.adapters, entry.batch.adapters
    if adapters is not None and own is not None and adapters.slots is not own.slots:
        own.slots.copy_(adapters.slots)
    if batch.query_copies is not None and entry.batch.query_copies is not None:
        for name in _ROTATED_QUERY_FIELDS:
            source, target = getattr(batch.query_copies, name), getattr(entry.batch.query_copies, name)
            if source is not None:
                target.copy_(source)
