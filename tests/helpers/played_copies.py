"""Simulated asynchronous device copies: each is done as late as possible, when it is waited for.

Data that is overwritten before it is copied, or read too early, becomes a wrong byte.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from windlass.kernels import Copies, CopyStream, DeviceEvent


class PlayedCopyMark(DeviceEvent):
    """Event after a number of copies of a queue. Without a queue, an event of computation, which is always done."""

    def __init__(self, queue: PlayedCopyStream | None = None, place: int = 0) -> None:
        self._queue, self._place = queue, place

    def wait(self) -> None:
        if self._queue is not None:
            self._queue.do_until(self._place)

    def make_stream_wait(self) -> None:
        self.wait()


class PlayedCopyStream(CopyStream):
    """asked: events that each copy waits for. done: number of finished copies."""

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
    """before_ask: called before each copy, may raise a device error. marks: events of computation."""

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
