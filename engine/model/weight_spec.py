"""Specification of one weight: its purpose, its shape, and the checkpoint tensors that it consists of.

Every kind of layer lists its weights in this form. Allocation, loading, caching, quantization and size estimates work from these
lists and know no layer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

# "table": rows are gathered from it; "wide table": of one that takes more memory than all else. "head": it is multiplied by and
# kept at 8 bits where matrices are narrower.
# "heads": a small matrix for each head, below one another, of a plain type: no quantization changes them.
# "expert": a matrix that only some tokens meet. "score": a head of few classes, a router or a convolution of channels, in float32
# as norms are; "shift": what a norm or a router adds, and other vectors that norms' offset is not for; "number": one number of an
# activation.
WeightKind = Literal[
    "table",
    "wide table",
    "head",
    "table and head",
    "matrix",
    "expert",
    "heads",
    "bias",
    "norm",
    "shift",
    "number",
    "score",
]

# What a tensor of a layer's matrix does there. Some lose more than others when they are rounded.
TensorRole = Literal["q", "k", "v", "q k v", "out", "gate", "up", "gate up", "down"]


@dataclass(frozen=True, slots=True)
class InterleavedHeads:
    """Rows that a checkpoint holds with rotated pairs as (2j, 2j + 1), where the decoder has (j, j + rotary_dim / 2).

    They are the first rotary_dim rows, out of head_dim, of each of the first `heads` heads of a tensor. swapped: its pairs are
    (j + rotary_dim / 2, j) instead, which is a rotation the other way round (NanoChat).
    """

    heads: int
    head_dim: int
    rotary_dim: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class RotaryLast:
    """Rows of heads whose rotated dims come last in a checkpoint, where the decoder has them first.

    They are the last rotary_dim rows, out of head_dim, of each of the tensor's heads. interleaved: in the checkpoint they are
    pairs (2j, 2j + 1), where the decoder has (j, j + rotary_dim / 2).
    """

    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """Heads of a tensor that holds queries, keys and values in blocks, where the decoder has all queries, all keys, all values.

    A block has `queries` heads of queries, then `keys` of keys and as many of values; values_first: of values and of keys.
    """

    blocks: int
    queries: int
    keys: int
    head_dim: int
    values_first: bool = False


@dataclass(frozen=True, slots=True)
class InterleavedParts:
    """Parts that a tensor holds by turns, where the decoder has each of them as one, in their order.

    They are in `repeats` turns, each of sizes[i] rows of part i.
    """

    repeats: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint. rows: of the weight that it becomes a part of. role: of those in a layer's matrices.

    unit_rows: each row is divided by its length when it is loaded (Baichuan 2). A name that ends in "[3]" is the fourth of the
    tensors that the one before the bracket holds along its first dimension. transposed: it has columns where the weight has
    rows. alternating: its rows are those of two parts by turns. by_head: into how many rows the tensor of a vector is folded.
    channels: it is [rows, 1, columns], as a convolution of each channel is. made: what becomes of its numbers, float32.
    """

    name: str
    rows: int
    interleaved: InterleavedHeads | None = None
    fused: FusedHeads | None = None
    role: TensorRole | None = None
    unit_rows: bool = False
    transposed: bool = False
    alternating: bool = False
    by_head: int | None = None
    rotary_last: RotaryLast | None = None
    interleaved_parts: InterleavedParts | None = None
    channels: bool = False
    made: Literal["exp", "negative"] | None = None

    def shape(self, weight: WeightSpec) -> tuple[int, ...]:
        """Shape of the tensor in its file. weight: the weight that it is a part of."""
        if self.by_head is not None:
            return self.by_head, self.rows // self.by_head
        shape = (self.rows, *((1,) if self.channels else ()), *weight.shape[1:])
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight. shape: [rows, columns], or [size] of a bias or a norm. stored: what makes it up, from its first row on."""

    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    stored: tuple[StoredTensor, ...]

    def with_prefix(self, name: str, stored: str) -> WeightSpec:
        """The same with its own name and those of its tensors put behind these prefixes."""
        tensors = tuple(replace(tensor, name=stored + tensor.name) for tensor in self.stored)
        return replace(self, name=name + self.name, stored=tensors)


def projection(name: str, stored: Sequence[StoredTensor], columns: int, *, bias: bool) -> tuple[WeightSpec, ...]:
    """A matrix [rows, columns] made up of `stored`, named there without their ".weight"; with its bias, if there is one."""

    def part(suffix: str) -> tuple[StoredTensor, ...]:
        return tuple(replace(tensor, name=f"{tensor.name}.{suffix}") for tensor in stored)

    rows = sum(tensor.rows for tensor in stored)
    matrix = WeightSpec(name, "matrix", (rows, columns), part("weight"))
    return (matrix, WeightSpec(f"{name}_bias", "bias", (rows,), part("bias"))) if bias else (matrix,)


def norm(name: str, stored: str, size: int, interleaved: InterleavedHeads | None = None) -> WeightSpec:
    """The weight of an RMS norm over `size` elements. stored: the tensor's name without its ".weight"."""
    return WeightSpec(name, "norm", (size,), (StoredTensor(f"{stored}.weight", size, interleaved),))
