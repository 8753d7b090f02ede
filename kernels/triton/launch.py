"""Starts programs on the device of their tensors, and says what sizes they like.

Knows no operation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a rounded compute dtype tiles are multiplied as they are, with float32 sums; everything else in float32.
_DOTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **sizes: Any) -> None:
    """Run the program for every place of a grid, where `on` lies; nothing for an empty grid."""
    if 0 in grid:
        return
    with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]
        kernel[grid](*operands, **sizes)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest one that is no less than either."""
    return max(least, int(triton.next_power_of_2(max(size, 1))))


def dot_type(dtype: torch.dtype) -> tuple[Any, str]:
    """What tiles of rows of a type are multiplied in, and how exactly."""
    found = _DOTS.get(dtype)
    return (tl.float32, "ieee") if found is None else (found, "tf32")


def as_bytes(pages: Tensor) -> Tensor:
    """Pages as programs take them: float8 as uint8, which every GPU reads."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def strided(x: Tensor) -> Tensor:
    """x [..., D], its last dim contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
