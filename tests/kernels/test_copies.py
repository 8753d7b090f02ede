"""Copies concurrent with steps on CUDA: which stream waits for which event. CUDA itself is simulated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from windlass.kernels.device_memory import CudaCopies, copies_of

DEVICE = torch.device("cuda:1")


class PlayedCuda:
    """Streams of two devices. done: what was asked of which stream, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []
        self._mine = threading.local()
        cuda, self.count = self, 0

        class Stream:
            def __init__(self, device: Any) -> None:
                cuda.count += 1
                self.name = f"{torch.device(device).index}: copies {cuda.count}"

            def wait_event(self, event: Event) -> None:
                cuda.done.append((self.name, f"waits for {event.name}"))

        class Event:
            def __init__(self) -> None:
                self.name = ""

            def record(self, stream: Any = None) -> None:
                on = cuda.current(None) if stream is None else stream
                self.name = f"{on.name} at {len(cuda.done)}"

            def synchronize(self) -> None:
                cuda.done.append(("host", f"waits for {self.name}"))

        self.computing = [Stream(torch.device("cuda", index)) for index in range(2)]
        for index, stream in enumerate(self.computing):
            stream.name = f"{index}: steps"
        for name, found in {
            "Stream": Stream,
            "Event": Event,
            "stream": self.using,
            "device": self.on,
            "current_stream": self.current,
            "current_device": lambda: self.state[0],
        }.items():
            monkeypatch.setattr(torch.cuda, name, found)

    @property
    def state(self) -> tuple[int, Any]:
        """Of this thread: the current device, and its stream where that is not the one of steps."""
        return getattr(self._mine, "state", (0, None))

    def current(self, device: Any) -> Any:
        index, stream = self.state
        wanted = (
            index if device is None else torch.device("cuda", device).index if isinstance(device, int) else device.index
        )
        return stream if stream is not None and wanted == index else self.computing[wanted]

    @contextlib.contextmanager
    def _within(self, state: tuple[int, Any]) -> Iterator[None]:
        before, self._mine.state = self.state, state
        try:
            yield
        finally:
            self._mine.state = before

    def using(self, stream: Any) -> Any:
        return self._within((int(stream.name[0]), stream))

    def on(self, device: torch.device) -> Any:
        return self._within((device.index, None))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    return PlayedCuda(monkeypatch)


def test_a_copy_comes_after_what_was_computed_and_computing_after_the_copy(cuda: PlayedCuda) -> None:
    copies = CudaCopies(DEVICE)
    queue = copies.queue()
    cuda.done.append(("1: steps", "gathers"))
    mark = queue.submit(lambda: cuda.done.append((cuda.current(None).name, "copies")), [copies.record_event()])
    mark.make_stream_wait()
    mark.wait()
    assert cuda.done == [
        ("1: steps", "gathers"),
        ("1: copies 3", "waits for 1: steps at 1"),
        ("1: copies 3", "copies"),
        ("1: steps", "waits for 1: copies 3 at 3"),
        ("host", "waits for 1: copies 3 at 3"),
    ]


def test_another_thread_marks_what_the_engine_computes(cuda: PlayedCuda) -> None:
    """And leaves that alone: it has neither its device nor its streams."""
    copies = CudaCopies(DEVICE)

    def work() -> None:
        copies.queue().submit(lambda: None, [copies.record_event()]).wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cuda.done == [("1: copies 3", "waits for 1: steps at 0"), ("host", "waits for 1: copies 3 at 1")]
    assert cuda.state == (0, None)


def test_a_cpu_has_none() -> None:
    assert copies_of(torch.device("cpu")) is None and copies_of(torch.device("meta")) is None
