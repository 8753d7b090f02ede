"""Tensors in an arena: live ones do not overlap, and memory of deleted ones is reused."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence

import pytest
import torch

from windlass.kernels.cpu.call_recording import Arena, ArenaAllocator

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.float64, torch.bool]


def address(arena: Arena) -> int:
    return torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()


def ranges(tensors: Sequence[torch.Tensor], start: int) -> list[tuple[int, int]]:
    """Return the sorted begin and end of the storages of these tensors, in units of 64 bytes from `start`."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sorted(((s.data_ptr() - start) // 64, -(-(s.data_ptr() + s.nbytes() - start) // 64)) for s in storages)


@pytest.mark.parametrize("seed", range(6))
def test_live_tensors_do_not_overlap(seed: int) -> None:
    rng, arena = random.Random(seed), Arena(8192)
    tensors, start = ArenaAllocator(arena), address(arena)
    live: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor or view, and its values

    def allocate(shape: list[int], dtype: torch.dtype) -> bool:
        made = tensors.empty(shape, dtype)
        if made is None:
            return False
        assert list(made.shape) == shape and made.dtype == dtype
        assert made.is_contiguous() and made.data_ptr() % 64 == 0
        made.copy_(torch.randint(0, 100, shape))
        # A view keeps the memory of its base alive.
        tensor = made[rng.randrange(shape[0]) :] if shape and rng.random() < 0.3 else made
        live.append((tensor, tensor.clone()))
        return True

    def delete() -> None:
        tensor, values = live.pop(rng.randrange(len(live)))
        assert torch.equal(tensor, values)

    highest, refused = 0, 0
    for _ in range(2000):
        if rng.random() < 0.5 and live:
            delete()
            continue
        shape, dtype = [rng.randint(1, 40) for _ in range(rng.randint(0, 2))], rng.choice(DTYPES)
        allocated = allocate(shape, dtype)
        taken = ranges([tensor for tensor, _ in live], start)
        edges = [0, *(edge for pair in taken for edge in pair), arena.capacity // 64]
        assert edges == sorted(edges), "two tensors overlap, or one is outside the arena"
        highest = max(highest, *edges[:-1])
        if not allocated:
            refused += 1
            largest = max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))
            assert largest * 64 < math.prod(shape) * dtype.itemsize
    assert refused, "the arena was never full"
    assert all(torch.equal(tensor, values) for tensor, values in live)
    assert tensors.peak == highest * 64
    live.clear()
    whole = tensors.empty((8192,), torch.int8)
    assert whole is not None and whole.data_ptr() == start


def test_memory_is_free_after_the_last_view_is_deleted() -> None:
    tensors = ArenaAllocator(Arena(256))
    gc.disable()
    try:
        first = tensors.empty((4, 16), torch.float32)
        assert first is not None
        address, row, flat = first.data_ptr(), first[2], first.view(-1)
        assert tensors.empty((1,), torch.int8) is None
        del first, flat
        assert tensors.empty((1,), torch.int8) is None
        del row
        again = tensors.empty((64,), torch.float32)
        assert again is not None and again.data_ptr() == address
    finally:
        gc.enable()


def test_the_lowest_free_range_is_used() -> None:
    arena = Arena(1024)
    tensors, start = ArenaAllocator(arena), address(arena)
    a, b, c, d = (tensors.empty((size,), torch.int8) for size in (100, 64, 192, 1))  # 128, 64, 192 and 64 bytes
    assert b is not None and d is not None and d.data_ptr() == start + 384
    del a, c
    found = [tensors.empty((size,), torch.int8) for size in (129, 1, 65, 64)]
    assert [tensor.data_ptr() - start for tensor in found if tensor is not None] == [192, 0, 448, 64]
    assert tensors.empty((449,), torch.int8) is None and tensors.peak == 576


def test_tensors_outlive_their_arena() -> None:
    made = ArenaAllocator(Arena(4096)).empty((1024,), torch.float32)
    assert made is not None
    made.fill_(7.0)
    gc.collect()
    others = [torch.zeros(1024) for _ in range(64)]
    assert (made == 7.0).all() and len(others) == 64


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_of_an_arena_support_inference_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        made = ArenaAllocator(Arena(4096)).empty((3, 4), torch.bfloat16)
        assert made is not None and made.is_inference() == inference and not made.requires_grad
        made.zero_()
        made[1].add_(2)
        assert torch.equal(made.sum(1), torch.tensor([0.0, 8.0, 0.0], dtype=torch.bfloat16))


def test_an_empty_arena_has_no_memory() -> None:
    assert ArenaAllocator(Arena(0)).empty((1,), torch.int8) is None
