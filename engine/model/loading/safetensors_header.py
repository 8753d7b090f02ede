"""Locations of tensors in files, and the header of a safetensors file.

A safetensors file is 8 bytes of length, a JSON object, then the data. Uses the standard library only, so that the API process
can read it; checks what its callers rely on. `tensor_reader` lets the `safetensors` library check the rest before data are read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Self

from windlass.engine.bounded_files import MAX_JSON_BYTES, has_too_many_entries
from windlass.engine.errors import LoadError, reason_of

NUMBER_BYTES = {  # bytes of a number
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}

_FLOATS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H"}  # codes of `struct`
_MOST_FLOATS = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor in a file. dtype: the format's name, such as "BF16". begin, end: bytes from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def narrow(self, first: int, count: int) -> Self:
        """The location of `count` consecutive rows."""
        size = (self.end - self.begin) // self.shape[0]
        begin = self.begin + first * size
        return replace(self, shape=(count, *self.shape[1:]), begin=begin, end=begin + count * size)

    def part(self, index: int) -> Self:
        """The part "name[index]" along the first dimension."""
        return replace(self.narrow(index, 1), name=f"{self.name}[{index}]", shape=self.shape[1:])

    def unstack(self) -> list[Self]:
        return [self.part(index) for index in range(self.shape[0])]

    def read(self) -> bytes:
        """The data. Raises LoadError."""
        size = self.end - self.begin
        try:
            with self.file.open("rb") as file:
                data = os.pread(file.fileno(), size, self.begin)
                while len(data) < size:  # a single call returns 2 GiB at most
                    more = os.pread(file.fileno(), size - len(data), self.begin + len(data))
                    if not more:
                        raise OSError(f"it ends inside tensor {self.name!r}")
                    data += more
                return data
        except OSError as error:
            raise LoadError(f"cannot read {self.file}: {reason_of(error)}: download or copy the file again") from None

    def read_floats(self) -> tuple[float, ...]:
        """The numbers of a small tensor of floats, such as the factors of a rotation. Raises LoadError."""
        code, count = _FLOATS.get(self.dtype), prod(self.shape)
        if code is None or not 0 < count <= _MOST_FLOATS:
            raise LoadError(
                f"{self.file}: tensor {self.name} is {self.dtype} with {count} numbers: 1 to {_MOST_FLOATS} of one of "
                f"{', '.join(_FLOATS)} are expected there"
            )
        values = struct.unpack(f"<{count}{code}", self.read())
        if self.dtype != "BF16":
            return values
        # bfloat16 is the upper half of a float32.
        return struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(bits << 16 for bits in values)))


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a safetensors or GGUF file: tensors by name, and the metadata of its writer."""

    path: Path
    tensors: Mapping[str, TensorLocation] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


def unstack_tensors(tensors: Mapping[str, TensorLocation], wanted: Collection[str]) -> dict[str, TensorLocation]:
    """The tensors, with all parts in place of one whose parts "name[0]", "name[1]" and so on are wanted."""
    stacks = {name.rpartition("[")[0] for name in wanted if name.endswith("]")}
    found: dict[str, TensorLocation] = {}
    for name, tensor in tensors.items():
        parts = tensor.unstack() if name in stacks and tensor.shape else [tensor]
        found |= {part.name: part for part in parts}
    return found


def read_header(file: Path) -> FileHeader:
    """Read the header of a file. Raises LoadError if it is damaged or cut off, without reading its data."""
    try:
        return _header(file)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = f"{error}" if type(error) is ValueError else "its header is damaged"
    raise LoadError(f"cannot read {file}: {reason}: download or copy the file again") from None


def _header(file: Path) -> FileHeader:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start.startswith(b"version "):
            raise ValueError("it is a pointer of Git LFS, not the file itself (run git lfs pull)")
        if len(start) < 8:
            raise ValueError("it is empty or cut off")
        (length,) = struct.unpack("<Q", start)
        text = opened.read(length) if length <= MAX_JSON_BYTES else b""
    if length > MAX_JSON_BYTES or has_too_many_entries(text):
        raise ValueError("its header is too large for the tensors of a model")
    content = json.loads(text)
    metadata = content.pop("__metadata__", None) or {}
    data = 8 + length
    found = {
        name: TensorLocation(
            name, file, item["dtype"], tuple(item["shape"]), *(data + int(end) for end in item["data_offsets"])
        )
        for name, item in content.items()
    }
    _check_places(found, data)
    wanted = max((tensor.end for tensor in found.values()), default=data)
    if wanted != size:
        raise ValueError(f"it has {size} bytes, but its header describes {wanted}")
    return FileHeader(file, found, metadata)


def _check_places(tensors: Mapping[str, TensorLocation], data: int) -> None:
    """ValueError where tensors overlap, leave holes, or do not have the size of their shape. data: where the first begins."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        size = NUMBER_BYTES.get(tensor.dtype)  # the size of an unknown type is not checked
        fits = size is None or tensor.end - tensor.begin == size * prod(tensor.shape)
        if tensor.begin != end or not fits or any(side < 0 for side in tensor.shape):
            raise ValueError(f"its header is damaged at tensor {name[:200]!r}")
        end = tensor.end
