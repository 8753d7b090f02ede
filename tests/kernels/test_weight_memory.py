"""A model's weights share few allocations: none overlap, all are aligned, and huge pages are asked for."""

from __future__ import annotations

import random

import pytest
import torch

from windlass.kernels import FORMS, BlockWeight
from windlass.kernels import device_memory as weight_memory
from windlass.kernels.device_memory import WeightMemory


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What huge pages were asked for, in blocks of 4 MiB."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(weight_memory, "advise_huge_pages", seen.append)
    monkeypatch.setattr(weight_memory, "_BLOCK_BYTES", 4 << 20)
    return seen


def test_tensors_have_memory_of_their_own(advised: list[torch.Tensor]) -> None:
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


def test_what_is_larger_than_a_block_gets_its_own(advised: list[torch.Tensor]) -> None:
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
def test_weights_in_blocks_can_lie_there(advised: list[torch.Tensor], form: str) -> None:
    weight = BlockWeight.empty(50, 70, FORMS[form], WeightMemory(torch.device("cpu")).empty)
    assert len(advised) == 1
    block = advised[0]
    for tensor in weight.tensors().values():
        assert block.data_ptr() <= tensor.data_ptr() < block.data_ptr() + block.nbytes
