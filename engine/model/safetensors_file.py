"""Reads tensors of a safetensors file one by one, where they belong if that can be, some ahead of whoever takes them; and
writes such a file.

Responsible for the file format (an 8-byte length, a JSON header, then the data) and for keeping the peak of memory low:
a mapped file would count against the process page by page, until the weights were there twice, and the library's own
writer copies every tensor before it writes the first. It knows no names.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_READERS = 2  # what a page cache hands out, one core cannot copy as fast as memory takes it

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE = 64 << 20  # bytes written at a time


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int  # bytes from the start of the file


# Where a tensor (name, dtype, shape) is wanted: a contiguous CPU tensor just like it, or None.
Place = Callable[[str, torch.dtype, list[int]], Tensor | None]


def read_tensors(path: Path, place: Place) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, in the order of its data: what `place` returned for it, filled, or memory of its own.

    Beyond what `place` gave, at most three tensors are in memory that the caller has not let go of. Raises
    SafetensorError or OSError, which name no path.
    """
    entries = _entries(path)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:

        def start(entry: _Entry) -> Future[Tensor]:
            return pool.submit(_read, file.fileno(), entry, place(entry.name, entry.dtype, entry.shape))

        pending = deque(start(entry) for entry in entries[:_READERS])
        for i, entry in enumerate(entries):
            tensor = pending.popleft().result()
            if i + _READERS < len(entries):
                pending.append(start(entries[i + _READERS]))
            yield entry.name, tensor


def read_layout(path: Path) -> tuple[dict[str, tuple[torch.dtype, list[int]]], dict[str, str]]:
    """Types and shapes of the file's tensors by name, and its metadata. Raises SafetensorError or OSError."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return {entry.name: (entry.dtype, entry.shape) for entry in _entries(path)}, metadata


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
        with _bytes_of(tensor) as view:
            for begin in range(0, len(view), _PIECE):
                file.write(view[begin : begin + _PIECE])
                yield done + min(begin + _PIECE, len(view))
        done += tensor.nbytes


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _entries(path: Path) -> list[_Entry]:
    with safe_open(path, framework="pt"):
        pass  # it checks the header: lengths, offsets that overlap or leave holes, shapes that do not fit their bytes
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name, item in header.items():
        dtype = _DTYPES.get(item["dtype"])
        if dtype is None:
            raise SafetensorError(f"tensor {name!r} has the type {item['dtype']}, which is not supported")
        entries.append(_Entry(name, dtype, item["shape"], 8 + length + item["data_offsets"][0]))
    return sorted(entries, key=lambda entry: entry.offset)


def _read(descriptor: int, entry: _Entry, place: Tensor | None) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.dtype) if place is None else place
    size = prod(entry.shape) * entry.dtype.itemsize
    if size:
        with _bytes_of(tensor) as view:
            done = 0
            while done < size:
                count = os.preadv(descriptor, [view[done:]], entry.offset + done)
                if count <= 0:
                    raise OSError(f"the file ends inside tensor {entry.name!r}")
                done += count
    return tensor
