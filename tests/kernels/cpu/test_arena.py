"""Tensors in an arena: none that lives shares memory with another, and what dies is had again."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence

import pytest
import torch

from windlass.kernels.cpu.call_recording import Arena, ArenaAllocator

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.float64, torch.bool]


def place(arena: Arena) -> int:
    return torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()


def ranges(tensors: Sequence[torch.Tensor], start: int) -> list[tuple[int, int]]:
    """Begin and end of all memory that keeps these alive, in units of 64 bytes from `start`, in order."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sorted(((s.data_ptr() - start) // 64, -(-(s.data_ptr() + s.nbytes() - start) // 64)) for s in storages)


@pytest.mark.parametrize("seed", range(6))
def test_living_tensors_keep_what_is_theirs(seed: int) -> None:
    rng, arena = random.Random(seed), Arena(8192)
    tensors, start = ArenaAllocator(arena), place(arena)
    living: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, perhaps a view, and its values

    def come(shape: list[int], dtype: torch.dtype) -> bool:
        made = tensors.empty(shape, dtype)
        if made is None:
            return False
        assert list(made.shape) == shape and made.dtype == dtype
        assert made.is_contiguous() and made.data_ptr() % 64 == 0
        made.copy_(torch.randint(0, 100, shape))
        # A view keeps the memory of its base alive.
        kept = made[rng.randrange(shape[0]) :] if shape and rng.random() < 0.3 else made
        living.append((kept, kept.clone()))
        return True

    def go() -> None:
        tensor, values = living.pop(rng.randrange(len(living)))
        assert torch.equal(tensor, values)

    highest, refused = 0, 0
    for _ in range(2000):
        if rng.random() < 0.5 and living:
            go()
            continue
        shape, dtype = [rng.randint(1, 40) for _ in range(rng.randint(0, 2))], rng.choice(DTYPES)
        came = come(shape, dtype)
        taken = ranges([tensor for tensor, _ in living], start)
        edges = [0, *(edge for pair in taken for edge in pair), arena.capacity // 64]
        assert edges == sorted(edges), "two tensors share memory, or one lies outside"
        highest = max(highest, *edges[:-1])
        if not came:
            refused += 1
            largest = max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))
            assert largest * 64 < math.prod(shape) * dtype.itemsize
    assert refused, "the arena was never full"
    assert all(torch.equal(tensor, values) for tensor, values in living)
    assert tensors.peak == highest * 64
    living.clear()
    whole = tensors.empty((8192,), torch.int8)
    assert whole is not None and whole.data_ptr() == start


def test_memory_is_free_as_soon_as_the_last_view_is_gone() -> None:
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


def test_the_lowest_place_that_is_large_enough_is_taken() -> None:
    arena = Arena(1024)
    tensors, start = ArenaAllocator(arena), place(arena)
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
def test_they_are_ordinary_tensors(inference: bool) -> None:
    with torch.inference_mode(inference):
        made = ArenaAllocator(Arena(4096)).empty((3, 4), torch.bfloat16)
        assert made is not None and made.is_inference() == inference and not made.requires_grad
        made.zero_()
        made[1].add_(2)
        assert torch.equal(made.sum(1), torch.tensor([0.0, 8.0, 0.0], dtype=torch.bfloat16))


def test_no_capacity_has_no_place() -> None:
    assert ArenaAllocator(Arena(0)).empty((1,), torch.int8) is None
