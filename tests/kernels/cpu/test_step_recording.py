"""Recorded calls have the same bits when they are repeated on shared memory. Calls that cannot be repeated are reported."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.attention_case import decode_call
from helpers.cpu_kernels import PACKED_FORMS, choose, kernels

from windlass.kernels import KVPages, Routing, cpu, select_backend
from windlass.kernels.cpu.call_recording import CompiledRecording
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.torch import reference

HEADS, KV_HEADS, DIM = 4, 2, 16
HIDDEN, INNER, VOCABULARY = HEADS * DIM, 160, 200
BLOCK, WIDTH = 16, 3


@pytest.fixture
def arena() -> cpu.Arena:
    return cpu.Arena(1 << 20)


def compiled() -> CompiledBackend:
    backend = select_backend("cpu")
    assert isinstance(backend, CompiledBackend)
    return backend


@pytest.fixture
def backend() -> CompiledBackend:
    kernels()
    return compiled()


@pytest.fixture(params=PACKED_FORMS)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompiledBackend:
    """Return the backend with these kernels as the fastest ones of the process."""
    found = kernels(request.param)
    choose(monkeypatch, found)
    return compiled()


class Layers:
    """The calls of a decode step. Every layer has its own weights and pages."""

    def __init__(self, backend: CompiledBackend, layers: int, rows: int) -> None:
        self.backend = backend

        def matrix(out: int, inner: int) -> torch.Tensor:
            return torch.randn(out, inner) / inner**0.5

        qkv = (HEADS + 2 * KV_HEADS) * DIM
        sizes = (qkv, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        self.matrices = [[matrix(*size) for size in sizes] for _ in range(layers)]
        self.norms = torch.rand(layers, 2, HIDDEN) + 0.5
        self.head = matrix(VOCABULARY, HIDDEN)
        self.table = torch.randn(VOCABULARY, HIDDEN)
        self.pages = torch.randn(layers, 2, rows * WIDTH, BLOCK, KV_HEADS, DIM)
        self.blocks = torch.arange(rows * WIDTH, dtype=torch.int32).view(rows, WIDTH)
        self.ones = torch.ones(rows)
        self.ids, self.lengths, self.slots = torch.zeros(3, rows, dtype=torch.int64)
        self.angles = torch.zeros(2, rows, DIM // 2)
        self.attention = decode_call(self.blocks, self.lengths, self.ones, 0.25)
        self.change()

    def change(self) -> None:
        """Write the inputs of another step."""
        rows = len(self.ids)
        self.ids.copy_(torch.randint(0, VOCABULARY, (rows,)))
        self.lengths.copy_(torch.randint(1, BLOCK * WIDTH + 1, (rows,)))
        self.slots.copy_(torch.arange(rows) * BLOCK * WIDTH + self.lengths - 1)
        self.angles.copy_(torch.rand(2, rows, DIM // 2))

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the last layer [T, HIDDEN] and the logits [T, VOCABULARY]."""
        backend = self.backend
        x = backend.embed(self.table, self.ids)
        normed = backend.rms_norm(x, self.norms[0, 0], 1e-5)
        for (qkv, out, up, down), norm, pages in zip(self.matrices, self.norms, self.pages, strict=True):
            y = backend.linear(self.attend(backend.linear(normed, qkv), KVPages(*pages)), out)
            normed = backend.add_rms_norm(x, y, norm[0], 1e-5)
            y = backend.linear(backend.gated_activation(backend.linear(normed, up), "silu"), down)
            normed = backend.add_rms_norm(x, y, norm[1], 1e-5)
        return normed, backend.linear(normed, self.head)

    def attend(self, qkv: torch.Tensor, pages: KVPages) -> torch.Tensor:
        heads = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        self.backend.rotate_and_append(q, k, v, *self.angles, self.ones, pages, self.slots)
        return self.backend.paged_attention(q, pages, self.attention).view(-1, HIDDEN)


def clones(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def poison(arena: cpu.Arena) -> None:
    torch.frombuffer(arena.memory, dtype=torch.uint8).fill_(0xFF)  # NaN in every float type


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_repeated_calls_have_the_same_bits(rows: int, chosen: CompiledBackend, arena: cpu.Arena) -> None:
    work = Layers(chosen, 3, rows)
    with torch.inference_mode(), chosen.record(arena) as recording:
        found = work()
    assert recording.obstacle is None and len(recording.calls) == 1 + 1 + 3 * 9 + 1
    assert all(map(torch.equal, clones(found), work()))
    pages = work.pages.clone()
    for _ in range(3):
        work.change()
        want, wanted_pages = clones(work()), work.pages.clone()
        work.pages.copy_(pages)
        poison(arena)  # results do not depend on earlier contents
        assert recording.repeat()
        assert all(map(torch.equal, found, want)) and torch.equal(work.pages, wanted_pages)
        pages = wanted_pages


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_repeated_calls_have_the_same_bits_on_any_number_of_threads(
    threads: int, chosen: CompiledBackend, arena: cpu.Arena
) -> None:
    """With more threads than cores, some threads start late or do not work at all."""
    work = Layers(chosen, 3, 33)
    with torch.inference_mode(), chosen.record(arena) as recording:
        found = work()
    pages, before = work.pages.clone(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = clones(work())
        torch.set_num_threads(threads)
        for _ in range(40):
            work.pages.copy_(pages)
            poison(arena)
            assert recording.repeat()
            assert all(map(torch.equal, found, want))
    finally:
        torch.set_num_threads(before)


def test_layers_share_memory(backend: CompiledBackend, arena: cpu.Arena) -> None:
    used = {}
    for layers in (3, 7, 40):  # fewer layers may need less memory
        work = Layers(backend, layers, 8)
        with backend.record(arena) as recording:
            work()
        assert recording.obstacle is None
        used[layers] = recording.num_bytes
    assert used[3] == used[7] == used[40]
    bytes_of_a_layer = 8 * 4 * ((HEADS + 2 * KV_HEADS) * DIM + 5 * HIDDEN + 3 * INNER)
    assert used[40] < bytes_of_a_layer


def test_recordings_share_an_arena(backend: CompiledBackend, arena: cpu.Arena) -> None:
    few, many = Layers(backend, 2, 2), Layers(backend, 2, 8)
    recordings = []
    for work in (few, many):
        with backend.record(arena) as recording:
            found = work()
        recordings.append((work, recording, found))
    for work, recording, found in (*recordings, *recordings[::-1]):
        work.change()
        assert recording.repeat()
        kept = clones(found)
        assert all(map(torch.equal, kept, work()))


def test_memory_of_live_tensors_is_not_reused(backend: CompiledBackend, arena: cpu.Arena) -> None:
    x, weight = torch.randn(5, 32), torch.randn(32, 32)
    products, views = [], []

    def work() -> None:
        y = x
        for i in range(12):
            y = backend.linear(y, weight)
            if i % 3 == 0:
                products.append(y)
            elif i % 3 == 1:
                views.append(y[2:4])

    with backend.record(arena) as recording:
        work()
    kept = [*products, *views]
    want = clones(tuple(kept))
    assert len({tensor.data_ptr() for tensor in kept}) == 8
    assert recording.repeat() and all(map(torch.equal, kept, want))
    assert recording.num_bytes == 9 * x.nbytes  # these and one temporary tensor


def test_computation_outside_the_kernels_cannot_be_repeated(backend: CompiledBackend, arena: cpu.Arena) -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with backend.record(arena) as recording:
        y = backend.linear(x, weight)
    assert recording.obstacle is None and len(recording.calls) == 1
    x.copy_(torch.randn(2, 8))
    assert recording.repeat() and torch.equal(y, backend.linear(x, weight))
    with backend.record(cpu.Arena(4096)) as other:
        backend.linear(torch.randn(2, 8), weight)
    assert recording.same_calls(other)  # addresses aside
    with backend.record(arena) as wider:
        backend.linear(torch.randn(3, 8), weight)
    assert not recording.same_calls(wider)
    with backend.record(arena) as torch_work:
        backend.linear(x + 1, weight)
    assert "add" in str(torch_work.obstacle)
    with backend.record(arena) as angles:
        backend.rotary_angles(torch.ones(1, 1, 2, dtype=torch.float64), torch.tensor([0]), torch.tensor([5]))
    assert "rotary_angles" in str(angles.obstacle)
    with pytest.raises(ValueError, match="cannot be repeated"):
        angles.repeat()
    with backend.record(arena) as afterwards:
        pass
    assert not afterwards.calls  # later calls are not recorded
    backend.linear(x, weight)
    assert not afterwards.calls and len(angles.calls) == 1


OUTSIDE: dict[str, Callable[[], torch.Tensor]] = {
    "too large": lambda: torch.empty(1025),
    "on the meta device": lambda: torch.empty(4, device="meta"),
    "channels last": lambda: torch.empty((2, 3, 4, 5), memory_format=torch.channels_last),
    "sparse": lambda: torch.empty((2, 3), layout=torch.sparse_coo),
}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_tensors_outside_the_arena_cannot_be_recorded(
    make: Callable[[], torch.Tensor], backend: CompiledBackend
) -> None:
    with backend.record(cpu.Arena(4096)) as recording:
        made = make()
    like = make()
    assert (made.shape, made.dtype, made.device, made.layout) == (like.shape, like.dtype, like.device, like.layout)
    assert "no place" in str(recording.obstacle) and recording.num_bytes == 0


def test_empty_tensors_need_no_memory(backend: CompiledBackend) -> None:
    x, weight = torch.randn(0, 8), torch.randn(4, 8)
    with backend.record(cpu.Arena(0)) as recording:
        found = backend.linear(x, weight)
    assert found.shape == (0, 4) and recording.obstacle is None and recording.num_bytes == 0


def test_recorded_tensors_have_the_requested_dtype(backend: CompiledBackend, arena: cpu.Arena) -> None:
    with backend.record(arena) as recording:
        made = [torch.empty((2, 3), dtype=dtype) for dtype in (torch.float16, torch.int64, torch.int8, None)]
        made.append(torch.empty(()))
    assert [(x.dtype, tuple(x.shape)) for x in made] == [
        (torch.float16, (2, 3)),
        (torch.int64, (2, 3)),
        (torch.int8, (2, 3)),
        (torch.get_default_dtype(), (2, 3)),
        (torch.get_default_dtype(), ()),
    ]
    assert recording.obstacle is None and recording.num_bytes == 5 * 64


def test_every_kind_of_argument_is_repeated(backend: CompiledBackend, arena: cpu.Arena) -> None:
    """Calls have floats between integers, null addresses, and several arguments of one kind."""
    x, weight, residual = torch.randn(3, 8), torch.rand(8), torch.randn(3, 8)

    def work() -> list[torch.Tensor]:
        a = backend.rms_norm(x, weight, 0.25)
        b = backend.add_rms_norm(residual, a, weight, 1e-5)
        return [
            a,
            b,
            backend.soft_cap(b, 0.3),
            backend.gated_activation(b, "gelu_tanh"),
            backend.gated_activation(a, "silu"),
        ]

    with backend.record(arena) as recording:
        recorded = work()
    x.copy_(torch.randn(3, 8))
    start = residual.copy_(torch.randn(3, 8)).clone()
    assert recording.repeat()
    after = residual.clone()
    residual.copy_(start)
    assert all(map(torch.equal, recorded, work())) and torch.equal(residual, after)


def test_factors_are_read_from_memory(backend: CompiledBackend, arena: cpu.Arena) -> None:
    """A repetition uses the current contents."""
    x, wide, factor, logits, scales = (
        torch.randn(3, 8),
        torch.randn(3, 24),
        torch.rand(1),
        torch.randn(3, 6),
        torch.rand(6),
    )

    def work() -> torch.Tensor:
        backend.multiply(x, wide[:, 8:16])
        backend.multiply(x, factor)
        return backend.route(logits, Routing(2), scales=scales).weights

    with backend.record(arena) as recording:
        weights = work()
    assert recording.obstacle is None and len(recording.calls) == 3
    for _ in range(2):
        for changed in (x, wide, factor, logits, scales):
            changed.copy_(torch.randn(changed.shape))
        before, want = x.clone(), reference.route(logits, Routing(2), scales=scales).weights
        assert recording.repeat() and torch.equal(x, before * wide[:, 8:16] * factor)
        torch.testing.assert_close(weights, want)


def test_attention_calls_are_compared_without_addresses(backend: CompiledBackend, arena: cpu.Arena) -> None:
    """The arguments are a struct, which the recording stores."""

    def recorded(**options: Any) -> CompiledRecording:
        q, lengths, ones = torch.randn(2, 4, 16), torch.tensor([5, 9]), torch.ones(2)
        pages = KVPages(torch.randn(3, 16, 2, 16), torch.randn(3, 16, 2, 16))
        call = decode_call(torch.tensor([[1], [2]]).int(), lengths, ones, 0.25, **options)
        used.append((q, lengths, ones, pages, call))
        with backend.record(arena) as recording:
            backend.paged_attention(q, pages, call)
        return recording

    used: list[object] = []
    first = recorded(window=4)
    assert first.same_calls(recorded(window=4))
    assert not any(first.same_calls(recorded(**other)) for other in ({}, {"window": 5}, {"window": 4, "soft_cap": 1.0}))
    assert not first.same_calls(recorded(window=4, sink_logits=torch.zeros(4)))
    gc.collect()
    assert first.obstacle is None and first.repeat()


def test_a_failing_call_ends_the_repetition(backend: CompiledBackend, arena: cpu.Arena) -> None:
    x, pages, slots = torch.randn(1, 1, 4), torch.zeros(1, 2, 1, 4), torch.tensor([1])
    table, ones, values = torch.ones(1, 2), torch.ones(1), torch.zeros(1, 2, 1, 4)
    row = torch.randn(1, 4)
    with backend.record(arena) as recording:
        backend.rotate_and_append(x, x, x, table, table, ones, KVPages(pages, values), slots)
        y = backend.soft_cap(row, 1.0)
    y.zero_()
    slots[0] = 2  # past the pages
    assert not recording.repeat() and not y.any()
    slots[0] = 0
    assert recording.repeat() and y.any()


def test_recording_ends_with_an_error(backend: CompiledBackend, arena: cpu.Arena) -> None:
    with pytest.raises(ZeroDivisionError), backend.record(arena) as recording:
        _ = 1 // 0
    backend.soft_cap(torch.zeros(1, 4), 1.0)
    assert not recording.calls
