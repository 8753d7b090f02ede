"""Memory of weights and pages, pinned copies, and copies concurrent with steps on a simulated CUDA."""

from __future__ import annotations

import contextlib
import mmap
import random
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.kernels import FORMS, BlockWeight, device_memory, to_device
from windlass.kernels.device_memory import CudaCopies, WeightMemory, advise_huge_pages, copies_of

TABLES = torch.arange(2 * 6 * 10, dtype=torch.int32).view(2, 6, 10)
DEVICE = torch.device("cuda:1")


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the blocks that huge pages are requested for, of 4 MiB each."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(device_memory, "advise_huge_pages", seen.append)
    monkeypatch.setattr(device_memory, "_BLOCK_BYTES", 4 << 20)
    return seen


def test_tensors_do_not_overlap(advised: list[torch.Tensor]) -> None:
    rng, memory = random.Random(0), WeightMemory(torch.device("cpu"))
    types = (torch.float32, torch.bfloat16, torch.uint8)
    tensors = [memory.empty((rng.randrange(1, 40), rng.randrange(1, 30_000)), rng.choice(types)) for _ in range(60)]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.fill_(i + 1)
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors))
    assert len(advised) > 1
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(block.data_ptr() <= begin and end <= block.data_ptr() + block.nbytes for block in advised)
    assert all(block.data_ptr() % (2 << 20) == 0 for block in advised)


def test_large_tensors_have_their_own_block(advised: list[torch.Tensor]) -> None:
    tensor = WeightMemory(torch.device("cpu")).empty((3 << 20,), torch.float32)
    assert tensor.shape == (3 << 20,)
    assert [block.nbytes for block in advised] == [12 << 20]


def test_small_and_empty_shapes(advised: list[torch.Tensor]) -> None:
    memory = WeightMemory(torch.device("cpu"))
    assert memory.empty((0, 7), torch.bfloat16).shape == (0, 7)
    assert memory.empty((1,), torch.float32).shape == (1,)
    assert len(advised) == 1


def test_other_devices_keep_their_allocator(advised: list[torch.Tensor]) -> None:
    assert WeightMemory(torch.device("meta")).empty((5, 3), torch.float16).device.type == "meta"
    assert not advised


@pytest.mark.parametrize("form", ["q8_0", "q4_k"])
def test_block_weights_use_the_memory(advised: list[torch.Tensor], form: str) -> None:
    weight = BlockWeight.empty(50, 70, FORMS[form], WeightMemory(torch.device("cpu")).empty)
    assert len(advised) == 1
    block = advised[0]
    for tensor in weight.tensors().values():
        assert block.data_ptr() <= tensor.data_ptr() < block.data_ptr() + block.nbytes


# -- huge pages ------------------------------------------------------------------------------------------------------


def huge_bytes_around(address: int) -> int:
    """Return AnonHugePages of the mapping that contains the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's madvise")
def test_huge_pages_are_used_once_memory_is_written() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    # From the system, since the allocator may return memory that an earlier test has written.
    tensor = torch.frombuffer(mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    assert advise_huge_pages(tensor)
    middle = tensor.data_ptr() + (32 << 20)
    before = huge_bytes_around(middle)  # the mapping may have merged with a neighbour of the same kind
    assert before < 64 << 20
    tensor.fill_(1)
    assert huge_bytes_around(middle) > before


def test_small_tensors_have_no_huge_pages() -> None:
    assert not advise_huge_pages(torch.empty(4096, dtype=torch.uint8))


# -- pinned copies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [TABLES, TABLES[:, 1:3, :4], TABLES[0].T, TABLES[0, 2]], ids=["all", "some", "turned", "row"]
)
def test_pinned_copies_are_contiguous(part: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_device(part, torch.device("cpu")) is part
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda numbers: pinned.append(numbers) or numbers)
    found = to_device(part, torch.device("meta"))
    (copied,) = pinned
    assert copied.is_contiguous() and torch.equal(copied, part) and found.shape == part.shape


# -- copies concurrent with steps ------------------------------------------------------------------------------------


class PlayedCuda:
    """Streams of two devices. done: the operations of each stream, in order."""

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
        """Return the current device of this thread, and its stream if it is not the one of steps."""
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


def test_copies_wait_for_steps_and_steps_for_copies(cuda: PlayedCuda) -> None:
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


def test_copies_of_another_thread_wait_for_steps(cuda: PlayedCuda) -> None:
    """The thread has neither the device nor the streams of the engine, and does not change them."""
    copies = CudaCopies(DEVICE)

    def work() -> None:
        copies.queue().submit(lambda: None, [copies.record_event()]).wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cuda.done == [("1: copies 3", "waits for 1: steps at 0"), ("host", "waits for 1: copies 3 at 1")]
    assert cuda.state == (0, None)


def test_a_cpu_has_no_concurrent_copies() -> None:
    assert copies_of(torch.device("cpu")) is None and copies_of(torch.device("meta")) is None
