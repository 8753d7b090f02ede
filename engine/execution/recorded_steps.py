"""Recorded steps: decode steps replayed as the recorded kernel calls of an earlier step with the same shape (CPU).

A step is dozens to hundreds of kernels; the Python code around them takes a tenth of the time of a step of a quantized 1B model.
The same functions run with the same operands in the same order, so results are bit-identical.
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
from windlass.kernels import MultiStepInputs, Recorder, Recording, StateRows

_QUERY_COPY_FIELDS = tuple(f.name for f in fields(RotatedQueryCopies))

# The block tables are copied separately, since their widths may differ.
_OTHER_FIELDS = ("block_tables", "query_copies", "persistent", "adapters", "token_types", "prompts", "only_last_tokens")
_TENSOR_FIELDS = tuple(f.name for f in fields(ForwardBatch) if f.name not in (*_OTHER_FIELDS, "state_rows", "hidden"))

# Bytes for the tensors that a step has at the same time: one layer's activations and the logits. Unused pages are never touched.
_ARENA_BYTES = 64 << 20

_MAX_RECORDINGS = 32  # shapes: the number of streams varies, and under speculation each has 1 to 1 + k rows


class StepOutputs(NamedTuple):
    """A step's normed hidden states [T, hidden], logits [T, V] and, if requested, `Backend.row_maxima` of the logits."""

    hidden: Tensor
    logits: Tensor
    maxima: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class _StepRecording:
    """The memory and recorded calls of the steps of one shape.

    x: the first layer's input; None if the recorded calls look it up. confirmed: the calls of two recorded steps are equal.
    obstacle: the reason why they cannot be replayed.
    """

    batch: ForwardBatch
    x: Tensor | None
    recording: Recording | None = None
    confirmed: bool = False
    obstacle: str | None = None
    outputs: StepOutputs | None = None


class DecodeReplay:
    """Replays decode steps of up to `max_rows` rows. obstacle: the reason for that limit, None if there is none."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        # By rows, width of the block tables, whether maxima are needed, whether any row has an adapter, and the shapes of the
        # query copies. So a step without adapters makes no calls for them, and all mixes of adapters share a recording.
        self._recordings: OrderedDict[tuple[int, ...], _StepRecording | None] = OrderedDict()
        self.obstacle = decoder.backend.recording_refusal
        # One for all recordings, as steps do not overlap.
        self._recorder = None if self.obstacle is not None else decoder.backend.recorder(_ARENA_BYTES)
        self.max_rows = sys.maxsize if self.obstacle is None else 0
        spec, per_layer = decoder.spec, decoder.per_layer_embeddings
        tables = [decoder.embedding, *(() if per_layer is None else (per_layer.table,))]
        embeds_by_lookup = decoder.dtype == torch.float32 or all(isinstance(table, Tensor) for table in tables)
        self._embeds_in_kernels = embeds_by_lookup and not spec.scales_queries and spec.mtp_input is None
        self.num_replayed = 0

    def run(self, batch: ForwardBatch, *, maxima: bool) -> StepOutputs | None:
        """The outputs of a batch of single tokens, which the next step overwrites. maxima: whether `row_maxima` are needed.

        Returns None if the caller must run the step: for other batches, shapes seen for the first time, and more rows than
        `max_rows`. Raises RuntimeError if a replay fails that cannot be repeated.
        """
        rows = batch.input_ids.shape[0]
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
            entry = self._recordings[key] = _new_recording(batch, x)
        _fill(entry, batch, x)
        if entry.confirmed and entry.recording is not None and entry.outputs is not None:
            if entry.recording.repeat():
                self.num_replayed += 1
                return entry.outputs
            if self._decoder.spec.vocabulary is not None:
                raise RuntimeError("a step of several ranks failed: a rank cannot repeat it on its own")
            if self._decoder.spec.state_group is not None:
                raise RuntimeError(
                    "a step that changes recurrent states failed: it cannot be repeated on changed states"
                )
            _fill(entry, batch, x)  # the failed call raises again below, with a message
        found = self._record(self._recorder, entry, maxima)
        if entry.obstacle is not None:  # fewer rows need less memory and may use other kernels
            self.max_rows, self.obstacle = rows - 1, entry.obstacle
            del self._recordings[key]
        return found

    def run_decode_steps(
        self, batch: ForwardBatch, inputs: MultiStepInputs, num_passes: int, stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """Sample greedily for up to `num_passes` steps, of which `batch` is the first: see `Recording.run_decode_steps`.

        Returns the ids [passes, B], or None if the caller must run single steps: the recorded calls are then not confirmed, or
        need other inputs as well.
        """
        entry = self._recordings.get(_key_of(batch, True))
        if entry is None or not entry.confirmed or entry.recording is None or entry.x is not None:
            return None
        if entry.outputs is None or entry.outputs.maxima is None or entry.batch.input_ids is not batch.input_ids:
            return None
        _fill(entry, batch, None)
        sampled = entry.recording.run_decode_steps(inputs, num_passes, entry.outputs.maxima, stop_ids)
        if sampled is not None:
            self.num_replayed += len(sampled)
        return sampled

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
                entry.obstacle = "the calls of two steps differ in more than the contents of their tensors"
        return entry.outputs


def _new_recording(batch: ForwardBatch, x: Tensor | None) -> _StepRecording:
    groups, rows, columns = batch.block_tables.shape
    width = table_width(columns)
    own_x = None if x is None else torch.empty_like(x)
    if batch.persistent and columns == width:
        return _StepRecording(batch, own_x)
    adapters, copies, states = batch.adapters, batch.query_copies, batch.state_rows
    own = ForwardBatch(
        **{name: _clone(getattr(batch, name)) for name in _TENSOR_FIELDS},
        block_tables=torch.full((groups, rows, width), -1, dtype=torch.int32),
        query_copies=None
        if copies is None
        else RotatedQueryCopies(**{name: _clone(getattr(copies, name)) for name in _QUERY_COPY_FIELDS}),
        adapters=None if adapters is None else adapters.with_slots(adapters.slots.clone()),
        state_rows=None if states is None else StateRows._make(map(_clone, states)),
    )
    return _StepRecording(own, own_x)


def _clone(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.clone()


def _key_of(batch: ForwardBatch, maxima: bool) -> tuple[int, ...]:
    """The shape of a step; steps with equal keys share a recording. Second: the columns of its block tables there."""
    rows, width, copies = batch.input_ids.shape[0], table_width(batch.block_tables.shape[2]), batch.query_copies
    key = rows, width, maxima, batch.adapters is not None
    if copies is None:
        return key
    shape = copies.ends.shape[1], copies.sources.shape[0]
    return *key, *shape, copies.anchor_cos is not None, copies.second_key_slots is not None


def _tensors_of(batch: ForwardBatch) -> list[Tensor | None]:
    """The tensors of a batch except its block tables, in the same order for all batches of one shape."""
    tensors = [getattr(batch, name) for name in _TENSOR_FIELDS]
    if batch.query_copies is not None:
        tensors += [getattr(batch.query_copies, name) for name in _QUERY_COPY_FIELDS]
    if batch.adapters is not None:
        tensors.append(batch.adapters.slots)
    return [*tensors, *(batch.state_rows or ())]


def _fill(entry: _StepRecording, batch: ForwardBatch, x: Tensor | None) -> None:
    """Copy this step's operands to the addresses of the recorded calls; a persistent batch is already there."""
    if entry.x is not None and x is not None:
        entry.x.copy_(x)
    if batch is entry.batch:
        return
    for source, target in zip(_tensors_of(batch), _tensors_of(entry.batch), strict=True):
        if source is not None and target is not None and source is not target:
            target.copy_(source)
    tables = batch.block_tables
    if tables is not entry.batch.block_tables:
        entry.batch.block_tables[:, :, : tables.shape[2]].copy_(tables)
