"""Places in the order of what a device was asked for, to wait for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


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
