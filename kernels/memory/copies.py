"""Copies between a device's memory and its host's, which are done beside what the device computes.

It knows tensors and orders. It knows nothing of what is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.memory.marks import CudaEvent, DeviceEvent


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
