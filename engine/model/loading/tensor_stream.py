"""Reads tensors of a file in the order of their data, where they belong if that can be, else in parts, some ahead of whoever
takes them.

Responsible for keeping the peak of memory low: a mapped file would count against the process page by page, until the weights
were there twice. Parts pass through a few buffers that are small enough to stay in a cache: memory asked for anew costs as
much as the reading (measured). Whoever reads also looks for NaN and infinite numbers, piece by piece while the bytes are still
in the core's cache. It knows no file format: what lies where is told to it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from windlass.engine.model.loading.finite import all_finite

_READERS = 2  # what a page cache hands out, one core cannot copy as fast as memory takes it
_READ_AHEAD = 6  # parts read or being read while one is in use
_PART = 4 << 20  # bytes
_LOOK = 256 << 10  # bytes read before they are looked at
_ROWS = 16  # a part has a multiple of so many, or what is left: weights in panels are written in panels


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What is wanted of a tensor. runs: of its rows, from one to before another, upwards. columns: of so many, the first and how
    many; None: all."""

    runs: tuple[tuple[int, int], ...]
    columns: tuple[int, int, int] | None = None

    def of(self, entry: TensorEntry) -> TensorEntry:
        """The entry that holds this alone; what it says of columns is true of the bytes of blocks, too."""
        _, *inner = entry.shape
        row_bytes, skipped = prod(inner) * entry.dtype.itemsize, 0
        if self.columns is not None:
            all_columns, first, count = self.columns
            skipped, inner = first * inner[0] // all_columns, [count * inner[0] // all_columns]
        shape = [sum(end - begin for begin, end in self.runs), *inner]
        return TensorEntry(
            entry.name, entry.dtype, shape, entry.offset + skipped * entry.dtype.itemsize, row_bytes, self.runs
        )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, or what is wanted of it: runs of rows that lie `row_bytes` apart, None for one behind the other."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int  # bytes from the start of the file
    row_bytes: int = 0
    runs: tuple[tuple[int, int], ...] | None = None

    def spans(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Where the bytes of so many of its rows lie in the file, and how many there are, piece by piece."""
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


# Where a tensor (name, dtype, shape) is wanted: a contiguous CPU tensor just like it, or None: nowhere, in parts.
Destination = Callable[[str, torch.dtype, list[int]], Tensor | None]


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Rows first .. first + len(tensor) of the tensor `name` of this shape; the last of its parts, or not the last.

    finite: no number of these rows is NaN or infinite.
    """

    name: str
    shape: list[int]
    first: int
    last: bool
    tensor: Tensor
    finite: bool


def read_entries(path: Path, entries: Iterable[TensorEntry], place: Destination) -> Iterator[TensorChunk]:
    """Tensors of the file, in this order: what `place` returned for it, filled, or one part after another.

    A part that had no place is overwritten once the next one is asked for. Raises OSError, which names no path.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:
        buffers: list[Tensor] = []
        pending: deque[tuple[_Request, Future[TensorChunk]]] = deque()
        for request in _requests(entries, place):
            if request.place is None:
                request.buffer = _take(buffers, request.size)
            pending.append((request, pool.submit(_read, file.fileno(), request)))
            if len(pending) > _READ_AHEAD:
                yield from _yield_chunk(*pending.popleft(), buffers)
        while pending:
            yield from _yield_chunk(*pending.popleft(), buffers)


def apply_slices(entries: Iterable[TensorEntry], cuts: Mapping[str, TensorSlice]) -> Iterator[TensorEntry]:
    """The same with what is wanted of those that have a cut."""
    for entry in entries:
        yield cuts[entry.name].of(entry) if entry.name in cuts else entry


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


@dataclass(slots=True)
class _Request:
    """Some rows of an entry, to be read into `place`, or else into the beginning of `buffer`."""

    entry: TensorEntry
    first: int
    shape: list[int]  # of these rows
    place: Tensor | None
    last: bool
    buffer: Tensor | None = None

    @property
    def size(self) -> int:
        return prod(self.shape) * self.entry.dtype.itemsize


def _requests(entries: Iterable[TensorEntry], place: Destination) -> Iterator[_Request]:
    for entry in entries:
        wanted = place(entry.name, entry.dtype, entry.shape)
        rows = entry.shape[0] if entry.shape else 1
        if wanted is not None or not prod(entry.shape) or not entry.shape:
            yield _Request(entry, 0, entry.shape, wanted, last=True)
            continue
        row_bytes = prod(entry.shape[1:]) * entry.dtype.itemsize
        step = max(1, _PART // row_bytes // _ROWS) * _ROWS
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield _Request(entry, first, [count, *entry.shape[1:]], None, last=first + count == rows)


def _take(buffers: list[Tensor], size: int) -> Tensor:
    """A free buffer of at least `size` bytes, or a new one."""
    if buffers and buffers[-1].numel() >= size:
        return buffers.pop()
    return torch.empty(max(size, _PART), dtype=torch.uint8)


def _yield_chunk(request: _Request, future: Future[TensorChunk], buffers: list[Tensor]) -> Iterator[TensorChunk]:
    yield future.result()
    if request.buffer is not None:
        buffers.append(request.buffer)


def _read(descriptor: int, request: _Request) -> TensorChunk:
    entry, tensor = request.entry, request.place
    if tensor is None:
        assert request.buffer is not None
        tensor = request.buffer[: request.size].view(entry.dtype).view(request.shape)
    finite, looked, filled = True, 0, 0
    with bytes_of(tensor) as view:
        for start, size in entry.spans(request.first, request.shape[0] if request.shape else 1):
            for begin in range(0, size, _LOOK):
                piece = view[filled : filled + min(_LOOK, size - begin)]
                done = 0
                while done < len(piece):
                    count = os.preadv(descriptor, [piece[done:]], start + begin + done)
                    if count <= 0:
                        raise OSError(f"the file ends inside tensor {entry.name!r}")
                    done += count
                filled += len(piece)
                if filled - looked >= _LOOK:
                    finite, looked = finite and all_finite(view[looked:filled], entry.dtype), filled
        finite = finite and all_finite(view[looked:filled], entry.dtype)
    return TensorChunk(entry.name, entry.shape, request.first, request.last, tensor, finite)
