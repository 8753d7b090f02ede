"""Header of a safetensors file: names, types, shapes and offsets of its tensors.

The format is 8 bytes of length, a JSON object, then the data. Uses the standard library only, so that the API process can read
it; checks what its callers rely on. `tensor_reader` lets the `safetensors` library check the rest before data are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Self

from windlass.engine.errors import LoadError

_MAX_HEADER = 100_000_000  # bytes, the format's own limit

NUMBER_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}  # bytes of a number


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file. dtype: the format's name, such as "BF16". begin, end: bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def narrow(self, first: int, count: int) -> Self:
        """Header of `count` consecutive rows."""
        size = (self.end - self.begin) // self.shape[0]
        begin = self.begin + first * size
        return replace(self, shape=(count, *self.shape[1:]), begin=begin, end=begin + count * size)

    def unstack(self) -> list[Self]:
        """Headers of the tensors along the first dimension."""
        rows = (self.narrow(index, 1) for index in range(self.shape[0]))
        return [replace(row, shape=self.shape[1:]) for row in rows]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Tensors of a file by name, and the metadata of its writer."""

    tensors: Mapping[str, TensorHeader]
    metadata: Mapping[str, str]


def unstack_headers(headers: Mapping[str, TensorHeader], stacks: Container[str]) -> dict[str, TensorHeader]:
    """Headers in which each tensor of `stacks` is replaced by its parts, named "name[0]", "name[1]" and so on."""
    found: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        if name in stacks and header.shape:
            found |= {f"{name}[{index}]": one for index, one in enumerate(header.unstack())}
        else:
            found[name] = header
    return found


def read_header(file: Path) -> SafetensorsHeader:
    """Read the header of a file. Raises LoadError if it is damaged or cut off, without reading its data."""
    try:
        return _header(file)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = f"{error}" if type(error) is ValueError else "its header is damaged"
    raise LoadError(f"cannot read {file}: {reason}: download or copy the file again") from None


def _header(file: Path) -> SafetensorsHeader:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start.startswith(b"version "):
            raise ValueError("it is a pointer of Git LFS, not the file itself (run git lfs pull)")
        if len(start) < 8:
            raise ValueError("it is empty or cut off")
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER:
            raise ValueError("its header is too large for a safetensors file")
        content = json.loads(opened.read(length))
    metadata = content.pop("__metadata__", None) or {}
    data = 8 + length
    found = {
        name: TensorHeader(item["dtype"], tuple(item["shape"]), *(data + int(end) for end in item["data_offsets"]))
        for name, item in content.items()
    }
    _check_places(found, data)
    wanted = max((tensor.end for tensor in found.values()), default=data)
    if wanted != size:
        raise ValueError(f"it has {size} bytes where its header tells of {wanted}")
    return SafetensorsHeader(found, metadata)


def _check_places(tensors: Mapping[str, TensorHeader], data: int) -> None:
    """ValueError where tensors overlap, leave holes, or have another size than their shape says. data: where the first begins."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        size = NUMBER_BYTES.get(tensor.dtype)  # the size of an unknown type is not checked
        fits = size is None or tensor.end - tensor.begin == size * prod(tensor.shape)
        if tensor.begin != end or not fits or any(side < 0 for side in tensor.shape):
            raise ValueError(f"its header is damaged at tensor {name[:200]!r}")
        end = tensor.end
