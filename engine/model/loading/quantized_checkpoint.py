"""Quantized checkpoints: the tensors that make up each weight, and the block format that stores it exactly.

A quantized row has groups of columns, each with a scale and a zero point: value = scale * (code - zero). A block format has a
float16 scale for 32 elements (16 in q6_k), so a group must consist of whole blocks and its scale must be a float16 number. Then

- without zero points, up to 4 bits are q4_0, 5 bits q5_0, 6 bits q6_k, more q8_0;
- with zero points, up to 4 bits are q4_k and 5 bits q5_k: the common scale and the common minimum are both the float16 scale,
  the scale byte is 1 and the minimum byte is the zero point; of 6 or 7 bits, code - zero is a signed byte, which is q8_0.

Ternary weights are q4_0, MXFP4 is q5_0. Products and differences of such short numbers are exact in float32, so nothing is
rounded. Other weights are dequantized. Imports no torch: the API process checks a checkpoint before an engine starts.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.checkpoint import checkpoint_files
from windlass.engine.model.loading.safetensors_header import TensorHeader, read_header


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor and its file."""

    name: str
    file: Path
    header: TensorHeader

    @property
    def dtype(self) -> str:
        return self.header.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.header.shape

    def read(self) -> bytes:
        """Its data. Raises LoadError."""
        size = self.header.end - self.header.begin
        try:
            with self.file.open("rb") as file:
                data = os.pread(file.fileno(), size, self.header.begin)
                while len(data) < size:  # a single call returns 2 GiB at most
                    more = os.pread(file.fileno(), size - len(data), self.header.begin + len(data))
                    if not more:
                        raise OSError(f"it ends inside tensor {self.name!r}")
                    data += more
                return data
        except OSError as error:
            raise LoadError(f"cannot read {self.file}: {error}: download or copy the file again") from None

    def part(self, index: int) -> LocatedTensor:
        """The part "name[index]" along the first dimension."""
        header = replace(self.header.narrow(index, 1), shape=self.shape[1:])
        return LocatedTensor(f"{self.name}[{index}]", self.file, header)


Located: TypeAlias = Mapping[str, LocatedTensor]


def locate(directory: Path) -> dict[str, LocatedTensor]:
    """Every tensor of a checkpoint by name. Raises LoadError."""
    return {
        name: LocatedTensor(name, file, header)
        for file in checkpoint_files(directory)
        for name, header in read_header(file).tensors.items()
    }


# Upper bytes, with either sign, of bfloat16 numbers from 2^-17 to 2^15: float16 holds them exactly.
_EXACT = bytes(byte | sign for byte in range(55, 71) for sign in (0, 0x80))


def fits_float16(tensor: LocatedTensor) -> bool:
    """Whether float16 holds all numbers exactly."""
    if tensor.dtype == "F16":
        return True
    if tensor.dtype not in ("BF16", "F32"):
        return False
    data = tensor.read()
    if tensor.dtype == "BF16":
        if not data[1::2].translate(None, _EXACT):
            return True
        words = array(
            "I", (word << 16 for word in set(_numbers("H", data)))
        )  # a bfloat16 is the upper half of a float32
        return all(map(_is_half, _numbers("f", words.tobytes())))
    if any(data[0::4]):  # more digits than a float16 has: the common case, found without a loop over numbers
        return False
    return all(map(_is_half, set(_numbers("f", data))))


def _is_half(value: float) -> bool:
    try:
        return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
    except OverflowError:
        return False


def is_repeated(tensor: LocatedTensor, pattern: bytes) -> bool:
    """Whether the data is a repetition of `pattern`."""
    data = tensor.read()
    return len(data) % len(pattern) == 0 and data == pattern * (len(data) // len(pattern))


def has_consecutive_groups(tensor: LocatedTensor, group_size: int) -> bool:
    """Whether the groups of an int32 tensor, one number per column, are consecutive columns."""
    numbers = _numbers("i", tensor.read())
    return numbers == array("i", (column // group_size for column in range(len(numbers))))


def read_integers(tensor: LocatedTensor) -> tuple[int, ...]:
    """The numbers of a small tensor of integers; empty for other types."""
    code = {"I64": "q", "I32": "i"}.get(tensor.dtype)
    return tuple(_numbers(code, tensor.read())) if code is not None else ()


def _numbers(code: str, data: bytes) -> array[Any]:
    """Little-endian numbers; all supported machines are little-endian."""
    numbers = array(code)
    numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
    return numbers


SCALE_TYPES = ("F16", "BF16", "F32", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the unquantized model. module: its name without ".weight". stacked: number of parts of the tensor "name", if
    the module is "name[3]"."""

    module: str
    rows: int
    columns: int
    stacked: int = 1

    @property
    def name(self) -> str:
        return f"{self.module}.weight"


def find_tensor(located: Located, wanted: ExpectedTensor, end: str, dtypes: Collection[str]) -> LocatedTensor:
    """The tensor `module.end`. Raises LoadError if it is missing or of another type."""
    found = located.get(f"{wanted.module}.{end}")
    if found is None:
        raise LoadError(
            f"{wanted.module!r} is quantized, but its tensor {wanted.module + '.' + end!r} is missing: the checkpoint is "
            "incomplete: download it again"
        )
    if found.dtype not in dtypes:
        raise LoadError(
            f"tensor {found.name!r} is {found.dtype} where {' or '.join(dtypes)} is expected: download it again"
        )
    return found


def check_shape(tensor: LocatedTensor, *shapes: tuple[int, ...]) -> None:
    """Raise LoadError for a tensor that has none of these shapes."""
    if tensor.shape not in shapes:
        raise LoadError(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)} where config.json asks for {list(shapes[0])}: take the "
            "config.json that belongs to the checkpoint"
        )


def num_words(count: int, bits: int, *, padded: bool = False) -> int:
    """Number of 32-bit words for `count` codes. padded: each word holds only whole codes."""
    return -(-count // (32 // bits)) if padded else -(-count * bits // 32)


def code_bits(
    tensor: LocatedTensor, words: int, count: int, choices: Sequence[int], *, padded: bool = False
) -> tuple[int, bool]:
    """Bits of a code if `count` codes fill `words` words of 32 bits, and whether words are padded. padded: they may be.

    Raises LoadError if no width fits.
    """
    for layout in (False, True) if padded else (False,):
        for bits in choices:
            if num_words(count, bits, padded=layout) == words:
                return bits, layout
    widths = f"{choices[0]} to {choices[-1]}" if len(choices) > 1 else choices[0]
    raise LoadError(
        f"tensor {tensor.name!r} has shape {list(tensor.shape)}, into which {count} numbers of {widths} bits do not fit: take "
        "the config.json that belongs to the checkpoint"
    )


def size_of_groups(tensor: LocatedTensor, groups: int, columns: int, expected_size: int | None) -> int:
    """Columns of a group in a row of `groups` groups. expected_size: from config.json. Raises LoadError."""
    if expected_size is not None and groups == -(-columns // expected_size):
        return min(expected_size, columns)
    if groups < 1 or columns % groups:
        raise LoadError(
            f"tensor {tensor.name!r} has {groups} groups for {columns} columns: take the config.json that belongs to the "
            "checkpoint"
        )
    return columns // groups


Packing = Literal["gptq", "awq", "packed", "padded", "bytes", "floats", "mxfp4", "ternary", "divided ternary"]
BLOCK = 32  # elements that share a scale in block formats, except q6_k
_HALF_BLOCK = 16

# Reasons to dequantize a weight.
ACT_ORDER = "columns are grouped in the order of activations (desc_act)"
ODD_GROUPS = "groups are not a multiple of 32 columns"
WIDE_SCALES = "scales are not float16 numbers"
WIDE_ZEROS = "no block format holds 8 bits with zero points"
FLOATS = "no block format holds 8-bit floating point"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized tensor that is [rows, columns] in the unquantized model.

    sources: names in the checkpoint by role ("codes", "scales", "zeros", "order"). bits: of a code. group_size: columns that
    share a scale. block: rows and columns that share one, if not group_size columns of one row. zeros_less_one: zero points are
    stored minus one. storage: the block format that holds it exactly, as in a storage plan; None for the given `reason`.
    """

    name: str
    rows: int
    columns: int
    packing: Packing
    sources: Mapping[str, str]
    bits: int
    group_size: int
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False
    symmetric: bool = True
    storage: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The quantized tensors of a checkpoint by their names in the unquantized model.

    title: of the method. sources: all tensors that they consist of, and unused scales of activations. zero_biases: biases that
    the model does not have and some writers add; they must be zero.
    """

    title: str
    tensors: Mapping[str, QuantizedTensor]
    sources: Located
    zero_biases: frozenset[str]

    @property
    def is_integers(self) -> bool:
        """Whether any weight consists of integers, which cannot be quantized again."""
        return any(tensor.packing != "floats" for tensor in self.tensors.values())

    def storages(self) -> dict[str, str]:
        """The storages of the tensors that are not dequantized, by name."""
        return {name: tensor.storage for name, tensor in self.tensors.items() if tensor.storage is not None}

    def notices(self, dtype: str) -> tuple[str, ...]:
        """One line on dequantized tensors, none if there are none. dtype: the resulting type."""
        reasons: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.storage is None:
                reasons[tensor.reason] += 1
        if not reasons:
            return ()
        why = ", ".join(
            f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.most_common()
        )
        return (
            f"{reasons.total()} of {len(self.tensors)} quantized weights ({self.title}) become {dtype}, the type of those that "
            f"are not quantized: {why}",
        )


def choose_storage(
    bits: int, group_size: int, columns: int, *, symmetric: bool, scales_fit: bool, ordered: bool
) -> tuple[str | None, str]:
    """The block format that holds integers exactly, with its number of groups per common scale; or None and the reason.

    scales_fit: every scale is a float16 number. ordered: groups are consecutive columns.
    """
    whole = group_size >= columns  # one group per row
    if not ordered:
        return None, ACT_ORDER
    if not whole and group_size % BLOCK:
        return None, ODD_GROUPS
    if not scales_fit:
        return None, WIDE_SCALES
    span = min(group_size, columns)
    if symmetric:
        if bits <= 4:
            return "q4_0", ""
        if bits == 5:
            return "q5_0", ""
        return (f"q6_k:{-(-span // _HALF_BLOCK)}" if bits == 6 else "q8_0"), ""
    if bits <= 5:
        return f"{'q4_k' if bits <= 4 else 'q5_k'}:{-(-span // BLOCK)}", ""
    return ("q8_0", "") if bits < 8 else (None, WIDE_ZEROS)
