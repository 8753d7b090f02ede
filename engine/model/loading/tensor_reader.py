"""Streaming reads of tensors from safetensors and GGUF files, and writing of safetensors files.

Keeps peak memory low: a mapped file would count against the process page by page until the weights were in memory twice, and
the library's writer copies all tensors first. Tensors are read in file order, directly into their destination where possible,
else in chunks through a few buffers that fit the cache (new memory costs as much as the read; measured). The reading thread also
checks for NaN and infinity while the bytes are in cache: a number is not finite if all its exponent bits are set, so integer
maxima of the bit patterns suffice.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.engine.errors import LoadError, reason_of
from windlass.engine.model.loading.gguf_index import GGUF_TYPES
from windlass.engine.model.loading.safetensors_header import (
    FileHeader,
    TensorLocation,
    read_header,
)

# The smallest bit pattern of a number that is not finite, as an integer.
_MIN_NOT_FINITE = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e4m3fn: 0x7F,  # it has no infinities
    torch.float8_e5m2: 0x7C,
}


def all_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether no number in these bytes, whole elements of `dtype`, is NaN or infinite. Integers are always finite."""
    if dtype == torch.float8_e8m0fnu:  # powers of two without a sign; the largest pattern is the only NaN
        return not len(data) or bool(np.frombuffer(data, dtype="u1").max() < 0xFF)
    first = _MIN_NOT_FINITE.get(dtype)
    if first is None or not len(data):
        return True
    bits = 8 * dtype.itemsize
    signed = np.frombuffer(data, dtype=f"i{dtype.itemsize}")
    return bool(signed.max() < first and signed.view(f"u{dtype.itemsize}").max() < first + (1 << (bits - 1)))


_NO_EXPONENT = 255  # of MXFP4: NaN


def scales_are_finite(blocks: Tensor, kind: str) -> bool:
    """Whether no scale in these rows of a GGUF type, uint8 [count, bytes of a row], is NaN or infinite.

    Types without such scales are checked once they are dequantized.
    """
    found = GGUF_TYPES[kind]
    if found.scales is None:
        return True
    scales = blocks.numpy().reshape(-1, found.num_bytes)[:, slice(*found.scales)]
    if kind == "MXFP4":
        return not (scales == _NO_EXPONENT).any()
    first = _MIN_NOT_FINITE[torch.float16]
    return bool((scales.view(np.uint16) & first).max(initial=0) < first)


_READERS = 2  # threads: one core cannot copy from the page cache at the speed of memory
_READ_AHEAD = 6  # chunks read or being read while one is in use
_CHUNK_BYTES = 4 << 20
_CHECK_BYTES = 256 << 10  # bytes read before they are checked, while they are in cache
_ROWS = 16  # every chunk but the last has a multiple of that many rows: weights in panels are written in panels


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor. runs: ranges of its rows, each (begin, end), ascending. columns: number of all columns, first one and
    count; None: all."""

    runs: tuple[tuple[int, int], ...]
    columns: tuple[int, int, int] | None = None

    def apply(self, entry: TensorEntry) -> TensorEntry:
        """The entry of this part. Columns of blocks are converted to bytes in proportion."""
        _, *inner = entry.shape
        row_bytes, skipped = prod(inner) * entry.dtype.itemsize, 0
        if self.columns is not None:
            all_columns, first, count = self.columns
            skipped, inner = first * inner[0] // all_columns, [count * inner[0] // all_columns]
        shape = [sum(end - begin for begin, end in self.runs), *inner]
        offset = entry.offset + skipped * entry.dtype.itemsize
        return replace(entry, shape=shape, offset=offset, row_bytes=row_bytes, runs=self.runs)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, or a part of it: runs of rows at a distance of `row_bytes`; None: all rows, contiguous.

    block_type: the GGUF type of blocks, whose bytes are read; None for numbers.
    """

    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int  # bytes from the start of the file
    row_bytes: int = 0
    runs: tuple[tuple[int, int], ...] | None = None
    block_type: str | None = None

    def spans(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Offset and number of the bytes of `count` of its rows, piece by piece."""
        own = prod(self.shape[1:]) * self.dtype.itemsize
        if self.runs is None:
            yield self.offset + first * own, count * own
            return
        passed = 0
        for begin, end in self.runs:
            start, stop = max(begin, begin + first - passed), min(end, begin + first + count - passed)
            passed += end - begin
            if start >= stop:
                continue
            if own == self.row_bytes:
                yield self.offset + start * own, (stop - start) * own
            else:
                yield from ((self.offset + row * self.row_bytes, own) for row in range(start, stop))


# From a tensor's name, dtype and shape: a contiguous CPU tensor of these to fill, or None to get the tensor in chunks.
Destination = Callable[[str, torch.dtype, list[int]], Tensor | None]


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Rows first .. first + len(tensor) of the tensor `name` of this shape. last: it is the tensor's last chunk.

    finite: no number of these rows, or no scale of their blocks, is NaN or infinite.
    """

    name: str
    shape: list[int]
    first: int
    last: bool
    tensor: Tensor
    finite: bool


def read_entries(path: Path, entries: Iterable[TensorEntry], destination: Destination) -> Iterator[TensorChunk]:
    """Read tensors of the file in this order: whole into what `destination` returned, else in chunks.

    A chunk without a destination is overwritten when the next one is requested. Raises OSError, which does not name the path.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:
        buffers: list[Tensor] = []
        pending: deque[tuple[_Request, Future[TensorChunk]]] = deque()
        for request in _requests(entries, destination):
            if request.destination is None:
                request.buffer = _take(buffers, request.size)
            pending.append((request, pool.submit(_read, file.fileno(), request)))
            if len(pending) > _READ_AHEAD:
                yield from _yield_chunk(*pending.popleft(), buffers)
        while pending:
            yield from _yield_chunk(*pending.popleft(), buffers)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


@dataclass(slots=True)
class _Request:
    """Some rows of an entry, to be read into `destination`, else into the beginning of `buffer`."""

    entry: TensorEntry
    first: int
    shape: list[int]  # of these rows
    destination: Tensor | None
    last: bool
    buffer: Tensor | None = None

    @property
    def size(self) -> int:
        return prod(self.shape) * self.entry.dtype.itemsize


def _requests(entries: Iterable[TensorEntry], destination: Destination) -> Iterator[_Request]:
    for entry in entries:
        wanted = destination(entry.name, entry.dtype, entry.shape)
        rows = entry.shape[0] if entry.shape else 1
        if wanted is not None or not prod(entry.shape) or not entry.shape:
            yield _Request(entry, 0, entry.shape, wanted, last=True)
            continue
        row_bytes = prod(entry.shape[1:]) * entry.dtype.itemsize
        step = max(1, _CHUNK_BYTES // row_bytes // _ROWS) * _ROWS
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield _Request(entry, first, [count, *entry.shape[1:]], None, last=first + count == rows)


def _take(buffers: list[Tensor], size: int) -> Tensor:
    """A free buffer of at least `size` bytes, or a new one."""
    if buffers and buffers[-1].numel() >= size:
        return buffers.pop()
    return torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8)


def _yield_chunk(request: _Request, future: Future[TensorChunk], buffers: list[Tensor]) -> Iterator[TensorChunk]:
    yield future.result()
    if request.buffer is not None:
        buffers.append(request.buffer)


def _read(descriptor: int, request: _Request) -> TensorChunk:
    entry, tensor = request.entry, request.destination
    if tensor is None:
        assert request.buffer is not None
        tensor = request.buffer[: request.size].view(entry.dtype).view(request.shape)
    finite, checked, filled = True, 0, 0
    with bytes_of(tensor) as view:
        for start, size in entry.spans(request.first, request.shape[0] if request.shape else 1):
            for begin in range(0, size, _CHECK_BYTES):
                piece = view[filled : filled + min(_CHECK_BYTES, size - begin)]
                done = 0
                while done < len(piece):
                    count = os.preadv(descriptor, [piece[done:]], start + begin + done)
                    if count <= 0:
                        raise OSError(f"the file ends inside tensor {entry.name!r}")
                    done += count
                filled += len(piece)
                if filled - checked >= _CHECK_BYTES:
                    finite, checked = finite and all_finite(view[checked:filled], entry.dtype), filled
        finite = finite and all_finite(view[checked:filled], entry.dtype)
    if entry.block_type is not None:
        finite = scales_are_finite(tensor, entry.block_type)
    return TensorChunk(entry.name, entry.shape, request.first, request.last, tensor, finite)


# Types of numbers in safetensors and GGUF files.
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
_WRITE_BYTES = 64 << 20  # written at once


def read_tensors(path: Path, destination: Destination) -> Iterator[TensorChunk]:
    """Every tensor of a safetensors file, in the order of its data, like `read_entries`.

    Raises SafetensorError or OSError, which do not name the path, or LoadError.
    """
    yield from read_entries(path, _entries(read_checked_header(path).tensors.values()), destination)


def read_located(
    tensors: Iterable[TensorLocation], destination: Destination, slices: Mapping[str, TensorSlice]
) -> Iterator[TensorChunk]:
    """Tensors of several files, file by file in the order of the data, like `read_entries`.

    slices: of the tensors of which only a part is read. Raises LoadError.
    """
    by_file: dict[Path, list[TensorLocation]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for path, here in by_file.items():
        try:
            entries = _entries(here)
            parts = (slices[one.name].apply(one) if one.name in slices else one for one in entries)
            yield from read_entries(path, parts, destination)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {path}: {reason_of(error)}: download or copy the file again") from None


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
            for begin in range(0, len(view), _WRITE_BYTES):
                file.write(view[begin : begin + _WRITE_BYTES])
                yield done + min(begin + _WRITE_BYTES, len(view))
        done += tensor.nbytes


def read_checked_header(path: Path) -> FileHeader:
    """The header of a safetensors file. Raises SafetensorError, OSError or LoadError."""
    with safe_open(path, framework="pt"):
        pass  # checks the header: lengths, offsets that overlap or leave holes, shapes that do not match their bytes
    return read_header(path)


def tensor_entry(tensor: TensorLocation) -> TensorEntry:
    """The entry of a tensor; of one in blocks, uint8 [rows, bytes of a row]. Raises SafetensorError for other types."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is not None:
        return TensorEntry(tensor.name, dtype, list(tensor.shape), tensor.begin)
    if tensor.dtype not in GGUF_TYPES:
        raise SafetensorError(f"tensor {tensor.name!r} has the type {tensor.dtype}, which is not supported")
    rows = tensor.shape[:-1]
    row_bytes = (tensor.end - tensor.begin) // max(1, prod(rows))
    return TensorEntry(tensor.name, torch.uint8, [*rows, row_bytes], tensor.begin, block_type=tensor.dtype)


def _entries(tensors: Iterable[TensorLocation]) -> list[TensorEntry]:
    """Entries in the order of their data."""
    return sorted(map(tensor_entry, tensors), key=lambda entry: entry.offset)
