"""Fills a Decoder's tensors: from safetensors files, streamed part by part into place, or with random numbers.

Which tensor goes where is said by the specs of the weights. Reads safetensors only, never pickle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.checkpoint import checkpoint_files
from windlass.engine.model.loading.safetensors_file import Part, Place, read_tensors
from windlass.engine.model.spec import HEAD_TENSOR
from windlass.engine.model.weight_spec import StoredTensor
from windlass.kernels import Backend, BlockRows, PackedRows, PackedWeight, PanelRows, PanelWeight, Weight
from windlass.kernels.layouts.packed import PANEL

Progress = Callable[[str, int, int], None]
_Rows = PackedRows | PanelRows | BlockRows

_RANDOM_BYTES = 4 << 20  # drawn at a time for a weight in panels: they are still in a cache when they are packed
# Buffers some exporters save. They follow from the config; learned frequencies are read by `learned_frequencies`.
_DERIVED = re.compile(r"(^|\.)rotary_emb(_local)?\.(\w+_)?inv_freq$|\.attention\.(masked_bias|bias)$")


@dataclass(frozen=True, slots=True)
class _WeightTarget:
    """Where a checkpoint tensor goes: a view of a decoder tensor, or rows of a weight in a layout of its own.

    offset is added once it is there (Gemma's 1 + w); rows take none.

    rows: which row of the checkpoint's tensor becomes each row of the view; None: in order.
    """

    view: Tensor | _Rows
    offset: float = 0.0
    rows: Tensor | None = None

    def fill(self, backend: Backend, tensor: Tensor, first: int = 0) -> None:
        """Take over rows of a checkpoint's tensor, from row `first` of the view on; all of them where `rows` sorts them."""
        ordered = tensor if self.rows is None else tensor[self.rows]
        view = _rows_of(self.view, first, len(tensor))
        if not isinstance(view, Tensor):
            backend.pack(view, ordered if ordered.dtype in _PACKED_FROM else ordered.float())
            return
        if ordered is not self.view:  # else the reader has put it there already
            view.copy_(ordered)
        if self.offset:
            view.add_(self.offset)


def _rows_of(view: Tensor | _Rows, first: int, count: int) -> Tensor | _Rows:
    if not isinstance(view, Tensor):
        return view.weight.narrow(view.first + first, count)
    return view.narrow(0, first, count)


_PACKED_FROM = (torch.float32, torch.bfloat16, torch.float16)


def _whole(weight: Weight) -> Tensor | _Rows:
    return weight if isinstance(weight, Tensor) else weight.narrow(0, weight.shape[0])


def _split(weight: Weight, sizes: Sequence[int]) -> list[Tensor | _Rows]:
    """Views of consecutive rows, of these sizes."""
    if not isinstance(weight, Tensor):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [weight.narrow(start, size) for start, size in zip(starts, sizes, strict=True)]
    return list(torch.split(weight, list(sizes)))


def half_split_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Rows that make interleaved pairs (2j, 2j+1) half-split ones (j, j + d/2), head by head: [num_heads * head_dim].

    With x' = x[order], half-split rotation of x' is interleaved rotation of x in that order, bit for bit. Rows past the
    first rotary_dim of a head stay.
    """
    head = torch.arange(head_dim)
    head[:rotary_dim] = torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))
    return (torch.arange(num_heads)[:, None] * head_dim + head).flatten()


def _targets(decoder: Decoder) -> dict[str, _WeightTarget]:
    """Checkpoint name -> destination, as the specs of the weights say."""
    weights, targets = decoder.weights(), {}
    for spec in decoder.spec.weights():
        offset = decoder.spec.norm_offset if spec.kind == "norm" else 0.0
        views = _split(weights[spec.name], [tensor.rows for tensor in spec.stored])
        for tensor, view in zip(spec.stored, views, strict=True):
            targets[tensor.name] = _WeightTarget(view, offset, _order(tensor))
    return targets


def _order(tensor: StoredTensor) -> Tensor | None:
    """Which row of the checkpoint's tensor becomes each row here; None: in order."""
    heads = tensor.interleaved
    if heads is None:
        return None
    order = half_split_order(heads.heads, heads.head_dim, heads.rotary_dim)
    return torch.cat((order, torch.arange(len(order), tensor.rows)))


def load_weights(decoder: Decoder, directory: Path, progress: Progress | None = None) -> None:
    """Stream every tensor of the checkpoint into the decoder; a missing, surplus or misshapen one is a LoadError."""
    targets = _targets(decoder)
    remaining = set(targets)
    files = checkpoint_files(directory)
    total = sum(file.stat().st_size for file in files)
    done = 0
    tied_copy: Tensor | None = None

    def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        target = targets.get(name)
        if (name == HEAD_TENSOR and target is None) or (target is not None and target.rows is not None):
            return torch.empty(shape, dtype=dtype)  # wanted whole
        if target is None or not isinstance(target.view, Tensor):
            return None
        view = target.view
        fits = view.dtype == dtype and list(view.shape) == shape and view.is_cpu and view.is_contiguous()
        return view if fits else None

    for part in _read(files, place):
        name, tensor = part.name, part.tensor
        done += tensor.nbytes
        target = targets.get(name)
        if not part.finite and (target is not None or not _DERIVED.search(name)):
            raise LoadError(
                f"{directory}: tensor {name!r} holds numbers that are NaN or infinite: the checkpoint is damaged or "
                "its training diverged: download or copy it again, or take another"
            )
        if target is None:
            if name == HEAD_TENSOR and decoder.spec.tied_embeddings:
                tied_copy = tensor
                continue
            if _DERIVED.search(name):
                continue
            raise LoadError(f"{directory}: unexpected tensor {name!r}: this architecture has no place for it")
        if name not in remaining:
            raise LoadError(f"{directory}: tensor {name!r} appears in more than one file")
        if part.shape != list(target.view.shape):
            raise LoadError(
                f"{directory}: tensor {name!r} has shape {part.shape} where config.json asks for "
                f"{list(target.view.shape)}"
            )
        if not tensor.dtype.is_floating_point:
            raise LoadError(f"{directory}: tensor {name!r} is {tensor.dtype}; quantized checkpoints are not supported")
        if (limit := _largest(target.view)) < torch.finfo(tensor.dtype).max and _peak(tensor) > limit:
            raise LoadError(
                f"{directory}: tensor {name!r} holds numbers beyond {limit:.3g}, the largest of {decoder.weight_dtype}: "
                "use `compute.dtype=bfloat16` or float32"
            )
        target.fill(decoder.backend, tensor, part.first)
        if part.last:
            remaining.discard(name)
        if progress:
            progress("loading weights", done, total)
    if remaining:
        first = ", ".join(sorted(remaining)[:3])
        raise LoadError(
            f"{directory}: {len(remaining)} tensors are missing, for example {first}: the checkpoint is incomplete"
        )
    if tied_copy is not None and not _equals(decoder.backend, tied_copy, decoder.embedding):
        raise LoadError(
            f"{directory}: lm_head.weight differs from the embedding although the model ties them: set "
            '"tie_word_embeddings": false in config.json to use it, or remove the tensor'
        )


def _largest(view: Tensor | _Rows) -> float:
    """The largest number that fits there; packed weights are made from float32."""
    if isinstance(view, (PackedRows, BlockRows)):
        return float(torch.finfo(torch.float32).max)
    return float(torch.finfo(view.dtype if isinstance(view, Tensor) else view.weight.dtype).max)


def _peak(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item())


def _equals(backend: Backend, tensor: Tensor, weight: Tensor | PackedWeight) -> bool:
    """Whether filling the weight from this tensor would leave it as it is."""
    if not isinstance(weight, PackedWeight):
        return torch.equal(tensor.to(weight), weight)
    again = PackedWeight.empty(weight.rows, weight.columns, weight.bits)
    _WeightTarget(_whole(again)).fill(backend, tensor)
    return torch.equal(again.data, weight.data) and torch.equal(again.scales, weight.scales)


def _read(files: list[Path], place: Place) -> Iterator[Part]:
    for file in files:
        try:
            yield from read_tensors(file, place)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {file}: {error}: download or copy the file again") from None


def randomize_weights(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Distinct random weights everywhere, scaled so that activations stay of order one (for benchmarks)."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    tensors = decoder.tensors()
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, PackedWeight):
            _randomize_packed(tensor, generator)
        elif isinstance(tensor, PanelWeight):
            _randomize_panels(decoder.backend, tensor, generator)
        elif not isinstance(tensor, Tensor):
            raise TypeError("random weights in blocks are not drawn yet")
        elif tensor.dim() == 1:
            tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator, device=tensor.device))
        else:
            _randomize_rows(tensor, generator)
        if progress:
            progress("making random weights", i + 1, len(tensors))


def _randomize_rows(rows: Tensor, generator: torch.Generator) -> None:
    """Uniform, several times quicker to draw than normal; the variance is that of 1 / fan-in."""
    bound = (3.0 / rows.shape[1]) ** 0.5
    rows.uniform_(-bound, bound, generator=generator)


def _randomize_panels(backend: Backend, weight: PanelWeight, generator: torch.Generator) -> None:
    """The same numbers that the weight would get as rows."""
    step = max(1, _RANDOM_BYTES // (PANEL * max(weight.columns, 1) * weight.dtype.itemsize)) * PANEL
    for first in range(0, weight.rows, step):
        rows = torch.empty((min(step, weight.rows - first), weight.columns), dtype=weight.dtype)
        _randomize_rows(rows, generator)
        backend.pack(weight.narrow(first, len(rows)), rows)


def _randomize_packed(weight: PackedWeight, generator: torch.Generator) -> None:
    """Random integers, all equally likely, under scales that give the variance of 1 / fan-in."""
    # Eight bytes at a draw. -128 becomes a -127, as quantizing never gives it.
    weight.data.view(-1).view(torch.int64).random_(generator=generator)
    if weight.bits == 8:
        signed = weight.data.view(torch.int8)
        torch.maximum(signed, torch.tensor(-127, dtype=torch.int8), out=signed)
    steps = 255.0 if weight.bits == 8 else 16.0
    scale = (12.0 / weight.columns) ** 0.5 / steps
    spread = torch.rand(weight.scales.shape, generator=generator).add_(0.5)
    weight.scales.copy_(spread.mul_(scale))
