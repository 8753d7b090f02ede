"""What a device with memory of its own says of that memory, and of having none left.

It counts bytes. It knows nothing of what they are for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

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
