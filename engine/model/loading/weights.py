"""Loading of checkpoint weights into a decoder, streamed chunk by chunk.

The weight specs determine the destination of each tensor. Reads safetensors and GGUF files only, never pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import normalize

from windlass.engine.errors import LoadError, reason_of
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.checkpoint import checkpoint_files, read_headers
from windlass.engine.model.loading.dequantize import (
    decode_blocks,
    decode_numbers,
    dequantize_gguf,
    read_quantized,
    to_block_format,
)
from windlass.engine.model.loading.gguf_index import GGUF_TYPES, read_index
from windlass.engine.model.loading.model_description import is_derived
from windlass.engine.model.loading.quantized_checkpoint import QuantizedCheckpoint
from windlass.engine.model.loading.safetensors_header import TensorLocation, unstack_tensors
from windlass.engine.model.loading.tensor_reader import (
    TensorSlice,
    read_checked_header,
    read_located,
)
from windlass.engine.model.tensor_parallel import ModelShard, RowRange, WeightSlice
from windlass.engine.model.weight_spec import RotaryRows, StoredTensor
from windlass.engine.model.weight_storage import kernel_storage
from windlass.kernels import FORMS, Backend, BlockRows, BlockWeight, PanelRows, Weight
from windlass.kernels.layouts.weight_layouts import store_block_rows

Progress = Callable[[str, int, int], None]
_Rows = BlockRows | PanelRows
_COMPARED = 1 << 22  # numbers compared at once
_PACKED_FROM = (torch.float32, torch.bfloat16, torch.float16)


# -- Row orders between checkpoint tensors and weights: interleaved RoPE pairs, fused QKV, rank slices ------------------


def head_order(heads: RotaryRows) -> Tensor:
    """The row of the checkpoint tensor for each row of these heads: [heads * head_dim].

    With x' = x[order], half-split rotation of x' is, bit for bit, interleaved rotation of x, or rotation by minus the angle
    ("swapped"), in that order.
    """
    pairs, plain = torch.arange(heads.rotary_dim), torch.arange(heads.head_dim - heads.rotary_dim)
    if heads.pairs == "interleaved":
        pairs = torch.cat((pairs[::2], pairs[1::2]))
    elif heads.pairs == "swapped":
        pairs = pairs.roll(heads.rotary_dim // 2)
    head = torch.cat((len(plain) + pairs, plain) if heads.last else (pairs, heads.rotary_dim + plain))
    return (torch.arange(heads.heads)[:, None] * heads.head_dim + head).flatten()


def row_order(tensor: StoredTensor) -> Tensor | None:
    """The row of the checkpoint tensor for each row of the weight; None: in order."""
    by_part = None
    if (turns := tensor.interleaved_parts) is not None:
        parts = torch.arange(tensor.rows).view(turns.repeats, -1).split_with_sizes(turns.sizes, 1)
        by_part = torch.cat([parts[index].flatten() for index in turns.order or range(len(parts))])
    if tensor.rotary is None:
        return by_part
    order = head_order(tensor.rotary)
    order = torch.cat((order, torch.arange(len(order), tensor.rows)))
    return order if by_part is None else by_part[order]


@dataclass(frozen=True, slots=True)
class RowSelection:
    """What a decoder holds of a checkpoint tensor. runs: ranges of rows that are read; None: all.

    rows: the row read for each row of the weight; None: in order. columns: first and count of those used; None: all.
    """

    runs: tuple[tuple[int, int], ...] | None = None
    rows: Tensor | None = None
    columns: RowRange | None = None


def select_rows(tensor: StoredTensor, part: WeightSlice, first: int) -> RowSelection:
    """What is read of this tensor, which has the weight's rows from `first` on, if only `part` of the weight is needed."""
    order = row_order(tensor)
    if part.rows is None and part.columns is None:
        return RowSelection(rows=order)
    runs = tuple(part.within(first, tensor.rows))
    if tensor.transposed or tensor.reshape_rows is not None:  # its rows are not those of the weight: it is read whole
        rows = order
        if part.rows is not None:
            wanted = torch.cat([torch.arange(*run) for run in runs])
            rows = wanted if order is None else order[wanted]
        return RowSelection(rows=rows, columns=part.columns)
    if order is None:
        return RowSelection(runs)
    wanted = order[torch.cat([torch.arange(*run) for run in runs])]
    ascending = wanted.sort().values
    breaks = torch.nonzero(ascending.diff() != 1)[:, 0] + 1
    edges = [0, *breaks.tolist(), len(ascending)]
    runs = tuple((int(ascending[begin]), int(ascending[end - 1]) + 1) for begin, end in pairwise(edges))
    return RowSelection(runs, torch.searchsorted(ascending, wanted))


# -- Loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WeightTarget:
    """Destination of a checkpoint tensor: a view of a decoder tensor, or rows of a weight in panels or blocks.

    selection: the rows and columns of the tensor that the view holds. offset: added after copying (Gemma's 1 + w), not to
    rows. zeros: the view is filled with zeros instead.
    """

    view: Tensor | _Rows
    stored: StoredTensor
    selection: RowSelection = field(default_factory=RowSelection)
    offset: float = 0.0
    zeros: bool = False

    @property
    def needs_whole(self) -> bool:
        """Whether the tensor must be read as a whole before it is copied."""
        return self.selection.rows is not None or self.stored.transposed or self.stored.reshape_rows is not None

    def holds(self, kind: str | None) -> bool:
        """Whether the view stores blocks of this GGUF type; None: of a type that is not in blocks."""
        if kind is None or not isinstance(self.view, BlockRows) or self.stored.unit_rows:
            return False
        return GGUF_TYPES[kind].scales is not None and self.view.weight.form == FORMS[GGUF_TYPES[kind].storage]

    def weight_rows(self, tensor: Tensor) -> Tensor:
        """Rows and columns of the weight from rows of the tensor, all of them if `needs_whole`; see `StoredTensor.shape`."""
        if self.stored.transposed:
            tensor = tensor.t()
        if self.stored.reshape_rows is not None:
            tensor = tensor.reshape(-1)
        elif self.stored.depthwise and tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        if self.selection.columns is not None:
            tensor = tensor.narrow(1, *self.selection.columns)
        return tensor if self.selection.rows is None else tensor[self.selection.rows]

    def fill(self, backend: Backend, tensor: Tensor, first: int = 0, *, blocks: bool = False) -> None:
        """Copy rows of a checkpoint tensor to the view, from row `first` on. blocks: the rows are the bytes of blocks."""
        rows = self.weight_rows(tensor)
        view = _narrow_view(self.view, first, len(rows))
        if self.zeros:
            assert isinstance(view, Tensor)
            view.zero_()
            return
        if blocks:
            assert isinstance(view, BlockRows)
            backend.repack(view, rows)
            return
        if self.stored.unit_rows:
            rows = normalize(rows.float())
        if not isinstance(view, Tensor):
            backend.pack(view, rows if rows.dtype in _PACKED_FROM else rows.float())
            return
        if rows is not self.view:  # else the tensor was read into the view
            view.copy_(rows)
        if self.offset:
            view.add_(self.offset)
        if self.stored.transform == "exp":
            view.exp_()
        elif self.stored.transform == "negative":
            view.neg_()


def _narrow_view(view: Tensor | _Rows, first: int, count: int) -> Tensor | _Rows:
    if not isinstance(view, Tensor):
        return view.weight.narrow(view.first + first, count)
    return view.narrow(0, first, count)


def _split(weight: Weight, sizes: Sequence[int]) -> Iterator[Tensor | _Rows]:
    """Views of consecutive rows, of these sizes."""
    first = 0
    for size in sizes:
        yield weight.narrow(0, first, size) if isinstance(weight, Tensor) else weight.narrow(first, size)
        first += size


def _targets(decoder: Decoder, shard: ModelShard | None) -> tuple[dict[str, _WeightTarget], dict[str, TensorSlice]]:
    """The destination of each checkpoint tensor by name, and the slices of those of which only a part is read.

    shard: the rank shard that the decoder holds; None: the whole model.
    """
    weights, targets, slices = decoder.weights(), dict[str, _WeightTarget](), dict[str, TensorSlice]()
    full_spec = decoder.spec if shard is None else shard.full_spec
    for spec in full_spec.weights():
        offset = full_spec.norm_offset if spec.kind == "norm" else 0.0
        own = WeightSlice() if shard is None else shard.slices.get(spec.name, WeightSlice())
        zeros = own.first_only and shard is not None and shard.rank > 0
        ends = [sum(tensor.rows for tensor in spec.stored[:i]) for i in range(len(spec.stored))]
        counts = [own.count(first, tensor.rows) for first, tensor in zip(ends, spec.stored, strict=True)]
        views = _split(weights[spec.name], counts)
        for tensor, view, first in zip(spec.stored, views, ends, strict=True):
            selection = select_rows(tensor, own, first)
            targets[tensor.name] = _WeightTarget(view, tensor, selection, offset, zeros)
            if selection.runs is not None:
                columns = None if own.columns is None else (spec.shape[1], *own.columns)
                slices[tensor.name] = TensorSlice(selection.runs, columns)
    return targets, slices


def _checked_tensors(directory: Path) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint by name, after the `safetensors` library has checked its headers. Raises LoadError."""
    for file in checkpoint_files(directory) if read_index(directory) is None else ():
        try:
            read_checked_header(file)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {file}: {reason_of(error)}: download or copy the file again") from None
    return read_headers(directory)


def _block_type(tensor: TensorLocation) -> str | None:
    """The GGUF type of a tensor that is read as rows of bytes; None for tensors of numbers."""
    kind = GGUF_TYPES.get(tensor.dtype)
    return None if kind is None or kind.is_plain else tensor.dtype


def load_weights(
    decoder: Decoder,
    directory: Path,
    progress: Progress | None = None,
    quantized: QuantizedCheckpoint | None = None,
    shard: ModelShard | None = None,
) -> None:
    """Stream every tensor of the checkpoint into the decoder.

    `check_tensors` has found in the headers that each tensor is there once with its shape. Raises LoadError for faults that
    only the numbers show. quantized: the quantized weights of the checkpoint. shard: the rank shard that the decoder holds.
    """
    targets, slices = _targets(decoder, shard)
    sources = quantized.sources if quantized is not None else frozenset()
    found = _checked_tensors(directory).items()
    tensors = {name: one for name, one in found if name not in sources and not decoder.spec.ignores(name)}
    tensors = unstack_tensors(tensors, targets)
    done, total = 0, sum(file.stat().st_size for file in checkpoint_files(directory))
    if quantized is not None:
        for size in _fill_quantized(decoder, directory, targets, quantized):
            done += size
            if progress:
                progress("loading weights", done, total)
    tied_copy: tuple[str, Tensor, str | None] | None = None
    heads = decoder.spec.head_tensors

    def destination(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        target = targets.get(name)
        if (name in heads and target is None) or (target is not None and target.needs_whole):
            return torch.empty(shape, dtype=dtype)
        if target is None or not isinstance(target.view, Tensor):
            return None
        view = target.view
        fits = view.dtype == dtype and list(view.shape) == shape and view.is_cpu and view.is_contiguous()
        return view if fits else None

    for chunk in read_located(tensors.values(), destination, slices):
        name, tensor = chunk.name, chunk.tensor if chunk.tensor.dim() else chunk.tensor.reshape(1)
        done += tensor.nbytes
        target, kind = targets.get(name), _block_type(tensors[name])
        if not chunk.finite and (target is not None or not is_derived(name)):
            raise _not_finite(directory, name)
        if target is None:
            if name in heads and decoder.spec.tied_embeddings:
                tied_copy = name, tensor, kind
                continue
            if quantized is not None and name in quantized.zero_biases and bool(tensor.any()):
                raise LoadError(
                    f"{directory}: unexpected tensor {name!r}: this architecture has no place for it: take the "
                    "config.json that belongs to the checkpoint"
                )
            continue
        in_blocks = target.holds(kind)
        if kind is not None and in_blocks:
            tensor = to_block_format(tensor, kind, name)
        else:
            if kind is not None:
                tensor = dequantize_gguf(tensor, kind)
                if not bool(tensor.isfinite().all()):
                    raise _not_finite(directory, name)
            _check_range(tensor, decoder, directory, target, name)
        target.fill(decoder.backend, tensor, chunk.first, blocks=in_blocks)
        if progress:
            progress("loading weights", done, total)
    if tied_copy is not None and not _equals(decoder.backend, *tied_copy, decoder.embedding):
        raise LoadError(
            f"{directory}: {tied_copy[0]} differs from the embedding although the model ties them: set "
            '"tie_word_embeddings": false in config.json to use it, or remove the tensor'
        )


def _fill_quantized(
    decoder: Decoder, directory: Path, targets: dict[str, _WeightTarget], quantized: QuantizedCheckpoint
) -> Iterator[int]:
    """Fill the weights that the checkpoint holds quantized. Yields the bytes read for each tensor."""
    for tensor, sources in read_quantized(quantized):
        target = targets[tensor.name]
        view, order = target.view, target.selection.rows
        if (
            isinstance(view, BlockRows)
            and not target.stored.unit_rows
            and tensor.storage is not None
            and view.weight.form == kernel_storage(tensor.storage)
        ):
            for first, blocks in decode_blocks(tensor, sources, whole=order is not None):
                rows = blocks if order is None else blocks[order]
                narrowed = view.weight.narrow(view.first + first, len(rows.codes))
                store_block_rows(narrowed, rows.codes, rows.scales, rows.supers)
        else:
            if target.stored.transposed:  # quantized tensors have the weight's own rows
                target = replace(target, stored=replace(target.stored, transposed=False))
            for first, numbers in decode_numbers(tensor, sources, whole=order is not None):
                if not bool(numbers.isfinite().all()):  # scales that are too large for their codes
                    raise _not_finite(directory, tensor.name)
                _check_range(numbers, decoder, directory, target, tensor.name)
                target.fill(decoder.backend, numbers, first)
        yield sum(source.nbytes for source in sources.values())


def _check_range(tensor: Tensor, decoder: Decoder, directory: Path, target: _WeightTarget, name: str) -> None:
    """Raise LoadError for numbers beyond the largest of the weight's type; weights in blocks are made from float32."""
    view = target.view
    dtype = (
        torch.float32 if isinstance(view, BlockRows) else view.dtype if isinstance(view, Tensor) else view.weight.dtype
    )
    limit = float(torch.finfo(dtype).max)
    if not tensor.numel() or limit >= torch.finfo(tensor.dtype).max:
        return
    low, high = torch.aminmax(tensor)
    if max(-low.item(), high.item()) > limit:
        raise LoadError(
            f"{directory}: tensor {name!r} holds numbers beyond {limit:.3g}, the largest of {decoder.weight_dtype}: "
            "use `compute.dtype=bfloat16` or float32"
        )


def _not_finite(directory: Path, name: str) -> LoadError:
    return LoadError(
        f"{directory}: tensor {name!r} contains numbers that are NaN or infinite: the checkpoint is damaged or "
        "its training diverged: download or copy it again, or take another"
    )


def _equals(backend: Backend, name: str, tensor: Tensor, kind: str | None, weight: Tensor | BlockWeight) -> bool:
    """Whether filling the weight from this tensor would leave it unchanged."""
    if not isinstance(weight, BlockWeight):
        numbers = tensor if kind is None else dequantize_gguf(tensor, kind)
        return numbers.shape == weight.shape and torch.equal(numbers.to(weight), weight)
    if len(tensor) != weight.rows:
        return False
    filled = BlockWeight.empty(weight.rows, weight.columns, weight.form)
    target = _WeightTarget(filled.narrow(0, filled.rows), StoredTensor(name, weight.rows))
    in_blocks = target.holds(kind)
    if kind is not None:
        tensor = to_block_format(tensor, kind, name) if in_blocks else dequantize_gguf(tensor, kind)
    target.fill(backend, tensor, blocks=in_blocks)
    step = max(1, _COMPARED // weight.columns)
    parts = (torch.arange(first, min(first + step, weight.rows)) for first in range(0, weight.rows, step))
    return all(torch.equal(filled.dequantize(p), weight.dequantize(p.to(weight.device)).cpu()) for p in parts)
