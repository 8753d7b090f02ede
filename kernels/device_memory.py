"""Device memory: weight allocation, huge pages, pinned transfers, copy streams and events, and free memory of a device.

A product of few rows reads every weight once per step at memory speed. Weights therefore share few allocations, which huge pages
cover almost completely.
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

# As on x86-64 and most of aarch64. The advice may be for any range; what is not whole is left alone.
HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Whether Linux took the advice for a contiguous tensor in main memory. Call it before the memory is touched.

    What is read at the memory's speed, or from page to page as a block table leads attention, misses the TLB with pages
    of 4 KiB (measured: 10 to 15 per cent of attention's time at 8,192 tokens). Memory stays untouched until used, then in
    units of a huge page.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE_BYTES:
        return False
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    libc = ctypes.CDLL(None)
    advise = getattr(libc, "madvise", None)
    return advise is not None and advise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE) == 0


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host's memory on a device, in the order of what that is asked for. Nobody waits: torch keeps the pinned copy
    until it was read."""
    if device.type == "cpu":
        return numbers
    # A part of larger numbers would be pinned with gaps, and torch would wait to copy it through other memory.
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)


def copy_into(target: Tensor, numbers: Tensor) -> None:
    """The same into memory that is there. Both contiguous, of one shape and type."""
    target.copy_(numbers if target.device.type == "cpu" else numbers.pin_memory(), non_blocking=True)


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


# Of CUDA errors these leave the device as it was, and every other one is there to stay: of the runtime, of the driver where torch
# asks it or where Triton loads or starts a program, and of a library.
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
        """All that the device has."""

    @abstractmethod
    def free(self) -> int:
        """What nobody has taken, in this process or another."""

    @abstractmethod
    def used_by_process(self) -> int:
        """What this process has taken since this object was made, for tensors or otherwise."""

    @abstractmethod
    def allocated(self) -> int:
        """What tensors of this process take."""

    @abstractmethod
    def peak(self) -> int:
        """The most that `allocated` has been since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let `peak` begin anew with what is allocated now."""

    @abstractmethod
    def release_cached(self) -> None:
        """Return to the device what this process keeps of it for tensors to come."""


class CudaMemory(DeviceMemory):
    """Of an NVIDIA GPU, as torch's allocator and the driver tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before = self.free()

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def used_by_process(self) -> int:
        # The driver does not say whose memory is gone: another process may have begun or ended.
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
    """That of a device; None where it has the machine's."""
    return CudaMemory(device) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device other than a CPU had no memory for a tensor, and has lost nothing by it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class DeviceEvent(ABC):
    """A place in the order of what a device was asked for."""

    @abstractmethod
    def wait(self) -> None:
        """Until all that was asked for before this place is done. Raises what the device met until there."""

    @abstractmethod
    def make_stream_wait(self) -> None:
        """What torch is asked for from now on, where this thread asks, is done after this place. Nobody waits."""


class CudaEvent(DeviceEvent):
    """Made where it stands: on the stream of the current device that torch uses now, or the one given, of that device too."""

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._device = torch.cuda.current_device()

    def wait(self) -> None:
        self._event.synchronize()

    def make_stream_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CopyStream(ABC):
    """Copies that are done one after the other. One thread at a time asks."""

    @abstractmethod
    def submit(self, copies: Callable[[], None], after: Sequence[DeviceEvent] = ()) -> DeviceEvent:
        """Have torch operations that do not wait done here, behind these marks; the mark behind them comes back.

        Nobody waits, and what the device computes goes on meanwhile.
        """


class Copies(ABC):
    """Of one device."""

    @abstractmethod
    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device copies to and from by itself; what it holds is nobody's to say.

        Raises what torch raises when there is none.
        """

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """Behind all that the device was asked to compute until now. Any thread may ask."""

    @abstractmethod
    def queue(self) -> CopyStream:
        """One of its own."""


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
    """Made by the thread that has the device compute, on the stream where it does."""

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
    """Those of a device; None where its memory is the host's."""
    return CudaCopies(device) if device.type == "cuda" else None
