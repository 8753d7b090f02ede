"""Quantization on the host before blocks are copied to the device has the bytes of plain torch."""

from __future__ import annotations

import pytest
import torch
from kernels_helpers.block_bytes import random_block_bytes
from kernels_helpers.interpreted import PLAYED

from windlass.kernels import FORMS, BlockWeight, cpu
from windlass.kernels.backend import BackendOptions
from windlass.kernels.backend_selector import _triton
from windlass.kernels.torch.torch_backend import TorchBackend
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = [*PLAYED, pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="needs the compiled kernels")]
OPTIONS = BackendOptions(torch.device("cpu"))
ROWS, COLUMNS = 37, 512


def both(form: str, fill: str, parts: list[tuple[int, torch.Tensor]]) -> tuple[BlockWeight, BlockWeight]:
    """Return a weight filled in parts in any order, by plain torch and on the host."""
    made = []
    for backend in (TorchBackend(OPTIONS), _triton(OPTIONS)):
        weight = backend.matrix(ROWS, COLUMNS, FORMS[form])
        assert isinstance(weight, BlockWeight)
        for tensor in weight.tensors().values():
            tensor.view(torch.uint8).fill_(7)  # rows of no part are unchanged
        for first, source in parts:
            getattr(backend, fill)(weight.narrow(first, len(source)), source)
        made.append(weight)
    return made[0], made[1]


def same_bytes(one: BlockWeight, other: BlockWeight) -> bool:
    pairs = zip(one.tensors().values(), other.tensors().values(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_blocks_are_quantized_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _triton(OPTIONS)
    assert isinstance(backend, TritonBackend)
    monkeypatch.setattr("windlass.kernels.torch.block_quantization.quantize_into_blocks", None)
    weight = backend.matrix(ROWS, COLUMNS, FORMS["q8_0"])
    assert isinstance(weight, BlockWeight)
    backend.pack(weight.narrow(0, 3), torch.randn(3, COLUMNS))


@pytest.mark.parametrize("form", ["q8_0", "q4_k", "q5_k", "q6_k"])
def test_quantized_floats(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, COLUMNS, generator=generator)
    one, other = both(form, "pack", [(20, rows[20:31].bfloat16()), (0, rows[:5]), (5, rows[5:20].half())])
    assert same_bytes(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_repacked_blocks_of_a_file(form: str) -> None:
    blocks = random_block_bytes(ROWS, COLUMNS, FORMS[form])
    one, other = both(form, "repack", [(20, blocks[20:37]), (0, blocks[:20])])
    assert same_bytes(one, other)
