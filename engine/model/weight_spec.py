"""Specification of one weight: its purpose, its shape, and the checkpoint tensors that it consists of.

Every kind of layer lists its weights in this form. Allocation, loading, caching, quantization and size estimates use
these lists and no other knowledge of layers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

WeightKind = Literal[
    "table",  # rows are gathered from it
    "wide table",  # a table that needs more memory than all other weights
    "head",  # stays at 8 bits where matrices have fewer
    "table and head",
    "matrix",
    "expert",  # a matrix that only some tokens are multiplied by
    "heads",  # one small matrix per head, stacked; plain dtype, never quantized
    "bias",
    "norm",
    "shift",  # float32 vector to which the norm offset does not apply, such as the bias of a norm or router
    "number",  # one number of an activation
    "score",  # float32: a classification head, a router or a depthwise convolution
]

# Purpose of a tensor within its layer; rounding costs more for some than for others.
TensorRole = Literal["q", "k", "v", "q k v", "out", "gate", "up", "gate up", "down"]


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Row order of rotated dims in each of the first `heads` heads of a tensor, where the decoder has them first, with pairs as
    (j, j + rotary_dim / 2).

    They are rotary_dim of head_dim rows; last: the last ones. pairs: "halves" are stored as in the decoder, "interleaved" as
    (2j, 2j + 1), and "swapped" as (j + rotary_dim / 2, j), which is a rotation in the opposite direction (NanoChat).
    """

    heads: int
    head_dim: int
    rotary_dim: int
    pairs: Literal["halves", "interleaved", "swapped"]
    last: bool = False


@dataclass(frozen=True, slots=True)
class InterleavedParts:
    """Row order of parts that alternate in a tensor, where the decoder has each part as one.

    There are `repeats` turns with sizes[i] rows of part i each. order: the part of a turn for each part of the decoder; None: in
    the same order.
    """

    repeats: int
    sizes: tuple[int, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checkpoint tensor that forms some rows of a weight.

    A name that ends in "[3]" is slice 3 along the first dimension of the tensor named before the bracket.
    """

    name: str
    rows: int
    rotary: RotaryRows | None = None
    interleaved_parts: InterleavedParts | None = None
    role: TensorRole | None = None
    unit_rows: bool = False  # each row is divided by its length (Baichuan 2)
    transposed: bool = False  # stored as [columns, rows]
    reshape_rows: int | None = None  # a vector that is stored with this many rows
    depthwise: bool = False  # stored as [rows, 1, columns], like a depthwise convolution
    transform: Literal["exp", "negative"] | None = None  # applied to its numbers in float32

    def shape(self, weight: WeightSpec) -> tuple[int, ...]:
        """Shape of the tensor in its file. weight: the weight that it is a part of."""
        if self.reshape_rows is not None:
            return self.reshape_rows, self.rows // self.reshape_rows
        shape = (self.rows, *((1,) if self.depthwise else ()), *weight.shape[1:])
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight. shape: [rows, columns], or [size] of a vector. stored: its checkpoint tensors, from the first row on."""

    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    stored: tuple[StoredTensor, ...]

    def with_prefix(self, name: str, stored: str) -> WeightSpec:
        """The same weight with prefixes added to its name and to its tensors' names."""
        tensors = tuple(replace(tensor, name=stored + tensor.name) for tensor in self.stored)
        return replace(self, name=name + self.name, stored=tensors)


def projection(name: str, stored: Sequence[StoredTensor], columns: int, *, bias: bool) -> tuple[WeightSpec, ...]:
    """A matrix [rows, columns] from the tensors `stored`, which are named without ".weight", and its bias if `bias`."""

    def part(suffix: str) -> tuple[StoredTensor, ...]:
        return tuple(replace(tensor, name=f"{tensor.name}.{suffix}") for tensor in stored)

    rows = sum(tensor.rows for tensor in stored)
    matrix = WeightSpec(name, "matrix", (rows, columns), part("weight"))
    return (matrix, WeightSpec(f"{name}_bias", "bias", (rows,), part("bias"))) if bias else (matrix,)


def depthwise_convolution(
    stored: str, channels: int, width: int, *, bias: bool, in_gguf: bool
) -> tuple[WeightSpec, ...]:
    """Weight [channels, width] of a depthwise convolution named `stored`, and its bias if `bias`.

    in_gguf: the tensor is [channels, width], as in GGUF files, not [channels, 1, width].
    """
    weight = StoredTensor(f"{stored}.weight", channels, depthwise=not in_gguf)
    result = (WeightSpec("convolution", "score", (channels, width), (weight,)),)
    if not bias:
        return result
    return *result, WeightSpec("convolution_bias", "shift", (channels,), (StoredTensor(f"{stored}.bias", channels),))


def norm_weight(name: str, stored: str, size: int, rotary: RotaryRows | None = None) -> WeightSpec:
    """The weight of an RMS norm over `size` elements. stored: tensor name without ".weight"."""
    return WeightSpec(name, "norm", (size,), (StoredTensor(f"{stored}.weight", size, rotary),))
