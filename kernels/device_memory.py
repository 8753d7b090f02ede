"""Device memory: weight allocation, huge pages, pinned transfers, copy streams and events, and free memory of a device.

A product of few rows reads every weight once per step at memory speed. Weights therefore share few allocations, which huge
pages cover almost completely.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

# As on x86-64 and most of aarch64. The advice may cover any range; partial huge pages are ignored.
HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Advise Linux to use huge pages for a contiguous tensor in main memory, before the memory is touched. Returns its consent.

    With pages of 4 KiB, reads at memory speed and reads by block table miss the TLB (measured: 10 to 15 per cent of
    attention's time at 8,192 tokens). Memory is still untouched until used, then in units of a huge page.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE_BYTES:
        return False
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    libc = ctypes.CDLL(None)
    advise = getattr(libc, "madvise", None)
    return advise is not None and advise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE) == 0


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device in stream order, without waiting: torch keeps the pinned copy until it has been read."""
    if device.type == "cpu":
        return numbers
    # A view of a larger tensor would be pinned with gaps, and torch would wait to copy it through other memory.
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)


def copy_into(target: Tensor, numbers: Tensor) -> None:
    """`to_device` into existing memory. Both are contiguous, of one shape and type."""
    target.copy_(numbers if target.device.type == "cpu" else numbers.pin_memory(), non_blocking=True)


_ALIGNMENT = 64  # bytes, a cache line and the widest vector

_BLOCK_BYTES = 256 << 20  # reserved at a time; unused parts are never touched

_NOTE_BYTES = 4096


class SharedWeights:
    """Weights of one model in memory that several processes map. The first process fills it; the others find it filled.

    number: descriptor of a memory file, initially empty. Filled memory is never written again: the filling process can only
    read it from then on, and other processes map it privately. All processes allocate the same tensors in the same order;
    `layout` is a digest of the allocations of this one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._end = HUGE_PAGE_BYTES  # end of mapped memory; the note precedes it
        self._asked = hashlib.sha256()
        self._mapped: list[Tensor] = []
        self.note = self._read_note()

    @property
    def layout(self) -> str:
        return self._asked.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that are in memory, for all processes."""
        return os.fstat(self._number).st_blocks * 512

    def block(self, size: int) -> Tensor:
        """New memory of this size, rounded up to huge pages. Raises OSError if there is not enough memory."""
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
        """Add a tensor to the digest of allocations."""
        self._asked.update(f"{dtype} {shape};".encode())

    def finish(self, digest: bytes) -> None:
        """Publish that all tensors are filled. digest: of their contents."""
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
    """Allocates uninitialised weights on one device: in large blocks on a CPU, one by one on other devices.

    A block lives as long as any of its tensors, since the weights of a model have one lifetime anyway. shared: memory for
    them on a CPU; None: memory of this process.
    """

    def __init__(self, device: torch.device, shared: SharedWeights | None = None) -> None:
        self._device, self._shared = device, shared
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor. Raises what torch raises when memory is exhausted."""
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
    """Untouched memory that begins at a huge page."""
    whole = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE_BYTES
    block = whole[first : first + size]
    advise_huge_pages(block)
    return block


# CUDA errors after which the device is still usable; all others are permanent. From the runtime, the driver (through torch,
# or when Triton loads or launches a kernel), and a library.
_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class DeviceMemory(ABC):
    """Memory of one device, in bytes."""

    @property
    @abstractmethod
    def total(self) -> int:
        """All memory of the device."""

    @abstractmethod
    def free(self) -> int:
        """Memory that no process has allocated."""

    @abstractmethod
    def used_by_process(self) -> int:
        """Memory that this process has allocated since this object was made, for tensors or otherwise."""

    @abstractmethod
    def allocated(self) -> int:
        """Memory of tensors of this process."""

    @abstractmethod
    def peak(self) -> int:
        """The largest value of `allocated` since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset `peak` to the current value of `allocated`."""

    @abstractmethod
    def release_cached(self) -> None:
        """Return cached free memory of this process to the device."""


class CudaMemory(DeviceMemory):
    """Memory of an NVIDIA GPU, as reported by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before = self.free()

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def used_by_process(self) -> int:
        # The driver does not report memory per process: another process may have started or ended.
        return max(self._free_before - self.free(), torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()


def device_memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; None if it uses host memory."""
    return CudaMemory(device) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on a device other than a CPU failed and the device is still usable."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class DeviceEvent(ABC):
    """A point in the order of the work of a device stream."""

    @abstractmethod
    def wait(self) -> None:
        """Block until all work before this point is done. Raises errors of the device up to there."""

    @abstractmethod
    def make_stream_wait(self) -> None:
        """Order later torch operations of this thread after this point, without blocking the host."""


class CudaEvent(DeviceEvent):
    """An event recorded on torch's current stream of the current device, or on a given stream of that device."""

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._device = torch.cuda.current_device()

    def wait(self) -> None:
        self._event.synchronize()

    def make_stream_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CopyStream(ABC):
    """Copies that run in order. Used by one thread at a time."""

    @abstractmethod
    def submit(self, copies: Callable[[], None], after: Sequence[DeviceEvent] = ()) -> DeviceEvent:
        """Queue torch operations that do not wait, after these events; returns an event after them.

        The host does not block, and computation of the device continues.
        """


class Copies(ABC):
    """Copies between host memory and one device."""

    @abstractmethod
    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the device copies to and from asynchronously.

        Raises what torch raises when memory is exhausted.
        """

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """An event after all computation submitted so far. Any thread may call it."""

    @abstractmethod
    def queue(self) -> CopyStream:
        """A new copy stream."""


class CudaCopyStream(CopyStream):
    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copies: Callable[[], None], after: Sequence[DeviceEvent] = ()) -> DeviceEvent:
        with torch.cuda.stream(self._stream):
            for mark in after:
                mark.make_stream_wait()
            copies()
            return CudaEvent()


class CudaCopies(Copies):
    """To be made by the thread that submits computation, on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing: Any = torch.cuda.current_stream(device)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        with torch.cuda.device(self._device):
            return CudaEvent(self._computing)

    def queue(self) -> CopyStream:
        return CudaCopyStream(self._device)


def copies_of(device: torch.device) -> Copies | None:
    """The copies of a device; None if it uses host memory."""
    return CudaCopies(device) if device.type == "cuda" else None
