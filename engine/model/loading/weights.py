"""Loading of checkpoint weights into a decoder, streamed chunk by chunk.

The weight specs determine the destination of each tensor. Reads safetensors and GGUF files only, never pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import normalize

from windlass.engine.errors import LoadError
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.checkpoint import checkpoint_files
from windlass.engine.model.loading.dequantize import (
    decode_blocks,
    decode_numbers,
    dequantize_gguf,
    read_quantized,
    scales_are_finite,
    to_block_format,
)
from windlass.engine.model.loading.gguf_index import BLOCKS, PLAIN, GGUFIndex, read_index
from windlass.engine.model.loading.model_description import is_derived
from windlass.engine.model.loading.quantized_checkpoint import QuantizedCheckpoint
from windlass.engine.model.loading.row_order import select_rows
from windlass.engine.model.loading.tensor_reader import (
    Destination,
    TensorChunk,
    TensorSlice,
    read_gguf_tensors,
    read_tensors,
)
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.tensor_parallel import ModelShard, RowRange, WeightSlice
from windlass.engine.model.weight_storage import kernel_storage
from windlass.kernels import FORMS, Backend, BlockRows, BlockWeight, PanelRows, Weight
from windlass.kernels.layouts.weight_layouts import store_block_rows

Progress = Callable[[str, int, int], None]

_Rows = BlockRows | PanelRows

_COMPARED = 1 << 22  # numbers at a time

_PACKED_FROM = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _WeightTarget:
    """Where a checkpoint tensor goes: a view of a decoder tensor, or rows of a weight in a layout of its own.

    offset is added once it is there (Gemma's 1 + w); rows take none.

    rows: which row of the checkpoint's tensor becomes each row of the view; None: in order. unit_rows: divided by their length.
    transposed: once its columns have become rows. by_head: into how many rows the checkpoint's tensor is folded.
    columns: of those that are read whole, the first that the view has, and how many; None: all. zeros: it gets them instead.
    made: what becomes of its numbers once they are there.
    """

    view: Tensor | _Rows
    offset: float = 0.0
    rows: Tensor | None = None
    unit_rows: bool = False
    transposed: bool = False
    by_head: int | None = None
    columns: RowRange | None = None
    zeros: bool = False
    made: Literal["exp", "negative"] | None = None

    @property
    def wants_whole(self) -> bool:
        """Whether the tensor is needed as one, wherever it is read to."""
        return self.rows is not None or self.transposed or self.by_head is not None

    def takes(self, blocks: str) -> bool:
        """Whether the view holds blocks of this type of GGUF just as they are."""
        form = FORMS[BLOCKS[blocks][0]] if blocks in BLOCKS else None
        return isinstance(self.view, BlockRows) and self.view.weight.form == form and not self.unit_rows

    def fill(self, backend: Backend, tensor: Tensor, first: int = 0, *, blocks: bool = False) -> None:
        """Take over rows of a checkpoint's tensor, from row `first` of the view on; all of them where it `wants_whole`.

        blocks: they are the bytes of blocks, which the view takes as they are.
        """
        tensor = tensor.t() if self.transposed else tensor
        tensor = tensor if self.by_head is None else tensor.reshape(-1)
        tensor = tensor if tensor.dim() < 3 else tensor.squeeze(1)
        tensor = tensor if self.columns is None else tensor.narrow(1, *self.columns)
        ordered = tensor if self.rows is None else tensor[self.rows]
        view = _rows_of(self.view, first, len(ordered))
        if self.zeros:
            assert isinstance(view, Tensor)
            view.zero_()
            return
        if blocks:
            assert isinstance(view, BlockRows)
            backend.repack(view, ordered)
            return
        if self.unit_rows:
            ordered = normalize(ordered.float())
        if not isinstance(view, Tensor):
            backend.pack(view, ordered if ordered.dtype in _PACKED_FROM else ordered.float())
            return
        if ordered is not self.view:  # else the reader has put it there already
            view.copy_(ordered)
        if self.offset:
            view.add_(self.offset)
        if self.made == "exp":
            view.exp_()
        elif self.made == "negative":
            view.neg_()


def _rows_of(view: Tensor | _Rows, first: int, count: int) -> Tensor | _Rows:
    if not isinstance(view, Tensor):
        return view.weight.narrow(view.first + first, count)
    return view.narrow(0, first, count)


def _rows(weight: Weight, first: int, count: int) -> Tensor | _Rows:
    return weight.narrow(0, first, count) if isinstance(weight, Tensor) else weight.narrow(first, count)


def _split(weight: Weight, sizes: Sequence[int]) -> list[Tensor | _Rows]:
    """Views of consecutive rows, of these sizes."""
    return [_rows(weight, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _targets(decoder: Decoder, part: ModelShard | None) -> tuple[dict[str, _WeightTarget], dict[str, TensorSlice]]:
    """Checkpoint name -> destination, as the specs of the weights say, and what is read of those that not all is wanted of.

    part: what the decoder has of a model, None: all.
    """
    weights, targets, cuts = decoder.weights(), dict[str, _WeightTarget](), dict[str, TensorSlice]()
    whole = decoder.spec if part is None else part.whole
    for spec in whole.weights():
        offset = whole.norm_offset if spec.kind == "norm" else 0.0
        own, first = WeightSlice() if part is None else part.slices.get(spec.name, WeightSlice()), 0
        counts = []
        for tensor in spec.stored:
            counts.append(own.count(first, tensor.rows))
            first += tensor.rows
        views, first = _split(weights[spec.name], counts), 0
        for tensor, view in zip(spec.stored, views, strict=True):
            picked = select_rows(tensor, own, first)
            first += tensor.rows
            zeros = own.first_only and part is not None and part.rank > 0
            targets[tensor.name] = _WeightTarget(
                view,
                offset,
                picked.rows,
                tensor.unit_rows,
                tensor.transposed,
                tensor.reshape_rows,
                picked.columns,
                zeros,
                tensor.transform,
            )
            if picked.runs is not None:
                columns = None if own.columns is None else (spec.shape[1], *own.columns)
                cuts[tensor.name] = TensorSlice(picked.runs, columns)
    return targets, cuts


class _Checkpoint:
    """The tensors of a model's files, whatever their format. names: those that are wanted."""

    def __init__(
        self,
        directory: Path,
        quantized: QuantizedCheckpoint | None,
        spec: ModelSpec,
        names: Iterable[str],
        cuts: Mapping[str, TensorSlice],
    ) -> None:
        sources = quantized.sources if quantized is not None else {}
        self._leave = lambda name: name in sources or spec.ignores(name)
        self._stacks = {name.rpartition("[")[0] for name in names if name.endswith("]")}
        index = read_index(directory)
        self._gguf: GGUFIndex | None = None if index is None else index.of(spec)
        self._files, self._cuts = checkpoint_files(directory), cuts
        self.num_bytes = sum(file.stat().st_size for file in self._files)

    def parts(self, place: Destination) -> Iterator[TensorChunk]:
        """Raises LoadError for files that cannot be read."""
        if self._gguf is not None:
            return read_gguf_tensors(self._gguf, place, self._cuts)
        return _read(self._files, place, self._leave, self._stacks, self._cuts)

    def blocks(self, name: str) -> str | None:
        """The type of a tensor that comes as rows of bytes; None for one that comes as numbers."""
        header = self._gguf.tensors[name] if self._gguf is not None else None
        return None if header is None or header.dtype in PLAIN else header.dtype


def load_weights(
    decoder: Decoder,
    directory: Path,
    progress: Progress | None = None,
    quantized: QuantizedCheckpoint | None = None,
    part: ModelShard | None = None,
) -> None:
    """Stream every tensor of the checkpoint into the decoder. That there is each of them, once and in its shape, `check_tensors`
    has found in the headers; what only numbers tell is a LoadError here.

    quantized: what weights are made of that the checkpoint holds quantized, in the ways of Hugging Face. part: what the
    decoder has of the model, None: all.
    """
    targets, cuts = _targets(decoder, part)
    checkpoint = _Checkpoint(directory, quantized, decoder.spec, targets, cuts)
    done = 0
    if quantized is not None:
        for size in _fill_quantized(decoder, directory, targets, quantized):
            done += size
            if progress:
                progress("loading weights", done, checkpoint.num_bytes)
    tied_copy: tuple[str, Tensor, str | None] | None = None
    heads = decoder.spec.head_tensors

    def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        target = targets.get(name)
        if (name in heads and target is None) or (target is not None and target.wants_whole):
            return torch.empty(shape, dtype=dtype)  # wanted whole
        if target is None or not isinstance(target.view, Tensor):
            return None
        view = target.view
        fits = view.dtype == dtype and list(view.shape) == shape and view.is_cpu and view.is_contiguous()
        return view if fits else None

    for rows in checkpoint.parts(place):
        name, tensor = rows.name, rows.tensor if rows.tensor.dim() else rows.tensor.reshape(1)
        done += tensor.nbytes
        target, blocks = targets.get(name), checkpoint.blocks(name)
        if not _is_finite(rows, blocks) and (target is not None or not is_derived(name)):
            raise LoadError(_not_finite(directory, name))
        if target is None:
            if name in heads and decoder.spec.tied_embeddings:
                tied_copy = name, tensor, blocks
                continue
            if quantized is not None and name in quantized.zero_biases and bool(tensor.any()):
                raise LoadError(f"{directory}: unexpected tensor {name!r}: this architecture has no place for it")
            continue
        taken = blocks is not None and target.takes(blocks)
        if blocks is not None and taken:
            tensor = to_block_format(tensor, blocks, name)
        else:
            tensor = _numbers(tensor, blocks, decoder, directory, target, name)
        target.fill(decoder.backend, tensor, rows.first, blocks=taken)
        if progress:
            progress("loading weights", done, checkpoint.num_bytes)
    if tied_copy is not None and not _equals(decoder.backend, *tied_copy[1:], decoder.embedding):
        raise LoadError(
            f"{directory}: {tied_copy[0]} differs from the embedding although the model ties them: set "
            '"tie_word_embeddings": false in config.json to use it, or remove the tensor'
        )


def _fill_quantized(
    decoder: Decoder, directory: Path, targets: dict[str, _WeightTarget], quantized: QuantizedCheckpoint
) -> Iterator[int]:
    """Fill what the checkpoint holds quantized: the bytes that each tensor was made from, once it is done."""
    for tensor, sources in read_quantized(quantized):
        target = replace(targets[tensor.name], transposed=False)  # what is quantized has the weight's own rows
        view, sorted_ = target.view, target.rows is not None
        if (
            isinstance(view, BlockRows)
            and not target.unit_rows
            and tensor.storage is not None
            and view.weight.form == kernel_storage(tensor.storage)
        ):
            for first, blocks in decode_blocks(tensor, sources, whole=sorted_):
                ordered = blocks if target.rows is None else blocks[target.rows]
                store_block_rows(view.weight.narrow(view.first + first, len(ordered.codes)), *ordered.tensors())
        else:
            for first, numbers in decode_numbers(tensor, sources, whole=sorted_):
                if not bool(numbers.isfinite().all()):  # scales that are too large for their codes
                    raise LoadError(_not_finite(directory, tensor.name))
                _check_size(numbers, decoder, directory, target, tensor.name)
                target.fill(decoder.backend, numbers, first)
        yield sum(source.nbytes for source in sources.values())


def _numbers(
    tensor: Tensor, blocks: str | None, decoder: Decoder, directory: Path, target: _WeightTarget, name: str
) -> Tensor:
    """Rows of a checkpoint's tensor as numbers. Raises LoadError for those that its place cannot hold."""
    if blocks is not None:
        tensor = dequantize_gguf(tensor, blocks)
        if not bool(tensor.isfinite().all()):
            raise LoadError(_not_finite(directory, name))
    _check_size(tensor, decoder, directory, target, name)
    return tensor


def _check_size(tensor: Tensor, decoder: Decoder, directory: Path, target: _WeightTarget, name: str) -> None:
    """LoadError for numbers that their place cannot hold."""
    if (limit := _largest(target.view)) < torch.finfo(tensor.dtype).max and _peak(tensor) > limit:
        raise LoadError(
            f"{directory}: tensor {name!r} holds numbers beyond {limit:.3g}, the largest of {decoder.weight_dtype}: "
            "use `compute.dtype=bfloat16` or float32"
        )


def _is_finite(part: TensorChunk, blocks: str | None) -> bool:
    """Blocks of the other types are looked at once they are numbers."""
    return part.finite if blocks not in BLOCKS else scales_are_finite(part.tensor, blocks)


def _not_finite(directory: Path, name: str) -> str:
    return (
        f"{directory}: tensor {name!r} holds numbers that are NaN or infinite: the checkpoint is damaged or "
        "its training diverged: download or copy it again, or take another"
    )


def _largest(view: Tensor | _Rows) -> float:
    """The largest number that fits there; weights in blocks are made from float32."""
    if isinstance(view, BlockRows):
        return float(torch.finfo(torch.float32).max)
    return float(torch.finfo(view.dtype if isinstance(view, Tensor) else view.weight.dtype).max)


def _peak(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item())


def _equals(backend: Backend, tensor: Tensor, blocks: str | None, weight: Tensor | BlockWeight) -> bool:
    """Whether filling the weight from this tensor would leave it as it is."""
    if not isinstance(weight, BlockWeight):
        numbers = tensor if blocks is None else dequantize_gguf(tensor, blocks)
        return numbers.shape == weight.shape and torch.equal(numbers.to(weight), weight)
    again = BlockWeight.empty(weight.rows, weight.columns, weight.form)
    target = _WeightTarget(again.narrow(0, again.rows))
    taken = blocks is not None and target.takes(blocks)
    if blocks is not None:
        tensor = to_block_format(tensor, blocks, "head") if taken else dequantize_gguf(tensor, blocks)
    numbers = tensor
    if len(numbers) != weight.rows:
        return False
    target.fill(backend, numbers, blocks=taken)
    step = max(1, _COMPARED // weight.columns)
    parts = (torch.arange(first, min(first + step, weight.rows)) for first in range(0, weight.rows, step))
    return all(torch.equal(again.dequantize(p), weight.dequantize(p.to(weight.device)).cpu()) for p in parts)


def _read(
    files: list[Path],
    place: Destination,
    leave: Callable[[str], bool],
    stacks: Container[str],
    cuts: Mapping[str, TensorSlice],
) -> Iterator[TensorChunk]:
    for file in files:
        try:
            yield from read_tensors(file, place, leave, stacks, cuts)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {file}: {error}: download or copy the file again") from None
