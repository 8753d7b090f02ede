"""Looks at the small tensors of a quantized checkpoint: scales, zero points, orders of columns.

Responsible for finding tensors in their files and for telling what decides the form of a weight. It knows no method and needs
nothing but the standard library: bytes are compared and sorted out by functions of `bytes`, which are as fast as copying.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.checkpoint import checkpoint_files
from windlass.engine.model.loading.safetensors_header import TensorHeader, read_header


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor and the file it lies in."""

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
                while len(data) < size:  # a single call gives 2 GiB at most
                    more = os.pread(file.fileno(), size - len(data), self.header.begin + len(data))
                    if not more:
                        raise OSError(f"it ends inside tensor {self.name!r}")
                    data += more
                return data
        except OSError as error:
            raise LoadError(f"cannot read {self.file}: {error}: download or copy the file again") from None

    def one(self, index: int) -> LocatedTensor:
        """One of the tensors that it holds along its first dimension, by the name "name[index]"."""
        size = (self.header.end - self.header.begin) // self.shape[0]
        begin = self.header.begin + index * size
        header = TensorHeader(self.dtype, self.shape[1:], begin, begin + size)
        return LocatedTensor(f"{self.name}[{index}]", self.file, header)


Located: TypeAlias = Mapping[str, LocatedTensor]


def locate(directory: Path) -> dict[str, LocatedTensor]:
    """Every tensor of a checkpoint by name. Raises LoadError."""
    return {
        name: LocatedTensor(name, file, header)
        for file in checkpoint_files(directory)
        for name, header in read_header(file).tensors.items()
    }


# Upper bytes, without the sign, of bfloat16 numbers from 2^-17 on and below 2^15: float16 has their 8 digits there.
_SURE = bytes(byte | sign for byte in range(55, 71) for sign in (0, 0x80))


def fits_float16(tensor: LocatedTensor) -> bool:
    """Whether all numbers are float16 numbers."""
    if tensor.dtype == "F16":
        return True
    if tensor.dtype not in ("BF16", "F32"):
        return False
    data = tensor.read()
    if tensor.dtype == "BF16":
        if not data[1::2].translate(None, _SURE):
            return True
        words = array(
            "I", (word << 16 for word in set(_numbers("H", data)))
        )  # a bfloat16 is the upper half of a float32
        return all(map(_is_half, _numbers("f", words.tobytes())))
    if any(data[0::4]):  # more digits than a float16 has: the common case, told without looking at single numbers
        return False
    return all(map(_is_half, set(_numbers("f", data))))


def _is_half(value: float) -> bool:
    try:
        return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
    except OverflowError:
        return False


def is_repeated(tensor: LocatedTensor, pattern: bytes) -> bool:
    """Whether its data is `pattern` over and over."""
    data = tensor.read()
    return len(data) % len(pattern) == 0 and data == pattern * (len(data) // len(pattern))


def has_consecutive_groups(tensor: LocatedTensor, group_size: int) -> bool:
    """Whether int32 numbers, one a column, say that groups are consecutive columns."""
    numbers = _numbers("i", tensor.read())
    return numbers == array("i", (column // group_size for column in range(len(numbers))))


def read_integers(tensor: LocatedTensor) -> tuple[int, ...]:
    """The numbers of a small tensor of integers; none for other types."""
    code = {"I64": "q", "I32": "i"}.get(tensor.dtype)
    return tuple(_numbers(code, tensor.read())) if code is not None else ()


def _numbers(code: str, data: bytes) -> array[Any]:
    """Little-endian numbers, as all machines here have them."""
    numbers = array(code)
    numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
    return numbers
