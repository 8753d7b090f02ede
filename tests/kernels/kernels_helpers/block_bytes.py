"""Blocks of GGUF files with any bits, and their values by the `gguf` package."""

from __future__ import annotations

import gguf
import torch

from windlass.kernels.layouts.weight_layouts import BlockForm

# Offsets of the float16 numbers of a block, which must be finite.
_FLOATS = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def kind(form: BlockForm) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[form.name.upper()]


def random_block_bytes(rows: int, columns: int, form: BlockForm) -> torch.Tensor:
    """Return random blocks with finite scales, [rows, row bytes]."""
    elements, size = gguf.GGML_QUANT_SIZES[kind(form)]
    blocks = torch.randint(0, 256, (rows, columns // elements, size), dtype=torch.uint8)
    for place in _FLOATS.get(form.name, (0,)):
        halves = torch.randn(rows, columns // elements, 1).half()
        halves[0, 0] = 6e-8  # the smallest number
        blocks[:, :, place : place + 2] = halves.view(torch.uint8)
    return blocks.flatten(1)


def numbers(blocks: torch.Tensor, form: BlockForm) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind(form)))
