"""Memory for a model's weights: many tensors in few allocations, so that huge pages cover nearly all of it.

A product of few rows reads every weight once a step and runs at the memory's speed; with pages of 4 KiB it also walks
the page tables at that speed. A tensor of its own rarely fills whole huge pages, and the allocator's header before it
touches the first of them. Knows sizes, not what the tensors are.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from math import prod
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.layouts.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages

_ALIGNMENT = 64  # bytes, a cache line and the widest vector
_BLOCK_BYTES = 256 << 20  # reserved at a time; what is not given out is never touched
_NOTE_BYTES = 4096


class SharedWeights:
    """The weights of one model in memory that several processes map: the first fills it, the others find it filled.

    number: the descriptor of a memory file, empty at first. What is filled is never written to again: the process that
    filled it may only read it from then on, and what another one would write it would write to a copy of its own.
    All of them ask for the same tensors in the same order; `layout` is a digest of what this one asked for.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._end = HUGE_PAGE_BYTES  # of what is mapped; the note stands before it
        self._asked = hashlib.sha256()
        self._mapped: list[Tensor] = []
        self.note = self._read_note()

    @property
    def layout(self) -> str:
        return self._asked.hexdigest()

    @property
    def num_bytes(self) -> int:
        """What is in memory of it, whichever process asked for it."""
        return os.fstat(self._number).st_blocks * 512

    def block(self, size: int) -> Tensor:
        """So many bytes that are not handed out yet, whole huge pages. Raises OSError where there is no memory."""
        size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        start, self._end = self._end, self._end + size
        if self.note is None:
            os.ftruncate(self._number, self._end)
        flags = mmap.MAP_SHARED if self.note is None else mmap.MAP_PRIVATE
        block = torch.frombuffer(mmap.mmap(self._number, size, flags=flags, offset=start), dtype=torch.uint8)
        advise_huge_pages(block)
        self._mapped.append(block)
        return block

    def record_request(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Keep in mind that such a tensor was handed out."""
        self._asked.update(f"{dtype} {shape};".encode())

    def finish(self, digest: bytes) -> None:
        """The tensors are filled: tell the others. digest: of what they were filled with."""
        self.note = {"layout": self.layout, "digest": digest.hex()}
        text = json.dumps(self.note).encode()
        os.pwrite(self._number, len(text).to_bytes(8, "little") + text, 0)
        protect = getattr(ctypes.CDLL(None), "mprotect", None)
        if protect is not None:
            for block in self._mapped:
                protect(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.nbytes), mmap.PROT_READ)

    def _read_note(self) -> dict[str, Any] | None:
        data = os.pread(self._number, _NOTE_BYTES, 0)
        length = int.from_bytes(data[:8], "little")
        found: dict[str, Any] | None = json.loads(data[8 : 8 + length]) if length else None
        return found


class WeightMemory:
    """Hands out uninitialised tensors on one device; on others than a CPU each is an allocation of its own.

    The tensors of a block keep it alive together, as a model's weights live and die together anyway.
    shared: where they lie on a CPU, None for memory of this process.
    """

    def __init__(self, device: torch.device, shared: SharedWeights | None = None) -> None:
        self._device, self._shared = device, shared
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor. Raises what torch raises when there is no memory."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        size = prod(shape) * dtype.itemsize
        if self._shared is not None:
            self._shared.record_request(shape, dtype)
        if self._used + size > self._block.nbytes:
            wanted = max(size, _BLOCK_BYTES)
            self._block = _huge_page_block(wanted) if self._shared is None else self._shared.block(wanted)
            self._used = 0
        tensor = self._block[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor


def _huge_page_block(size: int) -> Tensor:
    """Untouched bytes from the start of a huge page on."""
    whole = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE_BYTES
    block = whole[first : first + size]
    advise_huge_pages(block)
    return block
