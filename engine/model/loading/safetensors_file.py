"""Reads the tensors of a safetensors file, and writes such a file.

Responsible for the format, and for keeping the peak of memory low: the library's own writer copies every tensor before it
writes the first. It knows no names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.engine.model.loading.safetensors_header import SafetensorsHeader, read_header
from windlass.engine.model.loading.tensor_stream import (
    Destination,
    TensorChunk,
    TensorEntry,
    TensorSlice,
    apply_slices,
    bytes_of,
    read_entries,
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE = 64 << 20  # bytes written at a time


def read_tensors(
    path: Path,
    place: Destination,
    leave: Callable[[str], bool] = lambda name: False,
    stacks: Container[str] = (),
    cuts: Mapping[str, TensorSlice] | None = None,
) -> Iterator[TensorChunk]:
    """Every tensor of the file, in the order of its data, as `read_entries` gives them.

    leave: whether one is left out, by its name. stacks: names of tensors that come as one for each number of their first
    dimension, "name[0]" and so on. cuts: of the tensors that not all is wanted of.

    Raises SafetensorError or OSError, which name no path, or LoadError.
    """
    entries = (entry for entry in _entries(_checked_header(path)) if not leave(entry.name))
    parts = (part for entry in entries for part in (_each(entry) if entry.name in stacks else [entry]))
    yield from read_entries(path, apply_slices(parts, cuts or {}), place)


def read_layout(path: Path) -> tuple[dict[str, tuple[torch.dtype, list[int]]], Mapping[str, str]]:
    """Types and shapes of the file's tensors by name, and its metadata. Raises SafetensorError, OSError or LoadError."""
    header = _checked_header(path)
    return {entry.name: (entry.dtype, entry.shape) for entry in _entries(header)}, header.metadata


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[int]:
    """Write contiguous CPU tensors as a safetensors file, piece by piece; yields the bytes written so far. Raises OSError."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for tensor in tensors.values():
        with bytes_of(tensor) as view:
            for begin in range(0, len(view), _PIECE):
                file.write(view[begin : begin + _PIECE])
                yield done + min(begin + _PIECE, len(view))
        done += tensor.nbytes


def _checked_header(path: Path) -> SafetensorsHeader:
    with safe_open(path, framework="pt"):
        pass  # it checks the header: lengths, offsets that overlap or leave holes, shapes that do not fit their bytes
    return read_header(path)


def _each(stack: TensorEntry) -> list[TensorEntry]:
    """The tensors that one holds along its first dimension."""
    if not stack.shape:
        return [stack]
    count, *shape = stack.shape
    size = prod(shape) * stack.dtype.itemsize
    return [TensorEntry(f"{stack.name}[{i}]", stack.dtype, shape, stack.offset + i * size) for i in range(count)]


def _entries(header: SafetensorsHeader) -> list[TensorEntry]:
    """In the order of their data."""
    entries = []
    for name, tensor in header.tensors.items():
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise SafetensorError(f"tensor {name!r} has the type {tensor.dtype}, which is not supported")
        entries.append(TensorEntry(name, dtype, list(tensor.shape), tensor.begin))
    return sorted(entries, key=lambda entry: entry.offset)
