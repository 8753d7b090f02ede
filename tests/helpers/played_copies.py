"""Copies beside what a device computes, played on a CPU: each is done as late as it may be, when somebody waits for it.

So what is overwritten before it was copied, or read before it has come, shows as a wrong byte.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from windlass.kernels import Copies, CopyStream, DeviceEvent


class PlayedCopyMark(DeviceEvent):
    """Behind so many copies of a queue; of what is computed where there is none: that is done by then."""

    def __init__(self, queue: PlayedCopyStream | None = None, place: int = 0) -> None:
        self._queue, self._place = queue, place

    def wait(self) -> None:
        if self._queue is not None:
            self._queue.do_until(self._place)

    def make_stream_wait(self) -> None:
        self.wait()


class PlayedCopyStream(CopyStream):
    """asked: the marks that each was asked for behind. done: how many of them are done."""

    def __init__(self, device: PlayedCopies) -> None:
        self._device = device
        self._pending: deque[tuple[Callable[[], None], Sequence[DeviceEvent]]] = deque()
        self.asked: list[list[DeviceEvent]] = []
        self.done = 0
        self._lock = threading.RLock()

    def submit(self, copies: Callable[[], None], after: Sequence[DeviceEvent] = ()) -> DeviceEvent:
        with self._lock:
            self._device.before_ask()
            self._pending.append((copies, after))
            self.asked.append(list(after))
            return PlayedCopyMark(self, len(self.asked))

    def do_until(self, place: int) -> None:
        with self._lock, torch.inference_mode():
            while self.done < place:
                copies, after = self._pending.popleft()
                for mark in after:
                    mark.wait()
                copies()
                self.done += 1


class PlayedCopies(Copies):
    """before_ask: called before each; it may raise what a device raises. marks: of what was computed."""

    def __init__(self) -> None:
        self.before_ask: Callable[[], None] = lambda: None
        self.queues: list[PlayedCopyStream] = []
        self.marks: list[DeviceEvent] = []

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, 85, dtype=dtype)

    def record_event(self) -> DeviceEvent:
        self.marks.append(PlayedCopyMark())
        return self.marks[-1]

    def queue(self) -> CopyStream:
        self.queues.append(PlayedCopyStream(self))
        return self.queues[-1]
