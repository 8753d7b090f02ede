"""Memory for a model's weights: many tensors in few allocations, so that huge pages cover nearly all of it.

A product of few rows reads every weight once a step and runs at the memory's speed; with pages of 4 KiB it also walks
the page tables at that speed. A tensor of its own rarely fills whole huge pages, and the allocator's header before it
touches the first of them. Knows sizes, not what the tensors are.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from windlass.kernels.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages

_ALIGNMENT = 64  # bytes, a cache line and the widest vector
_BLOCK_BYTES = 256 << 20  # reserved at a time; what is not given out is never touched


class WeightMemory:
    """Hands out uninitialised tensors on one device; on others than a CPU each is an allocation of its own.

    The tensors of a block keep it alive together, as a model's weights live and die together anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor. Raises what torch raises when there is no memory."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        size = prod(shape) * dtype.itemsize
        if self._used + size > self._block.nbytes:
            self._block, self._used = _huge_block(max(size, _BLOCK_BYTES)), 0
        tensor = self._block[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor


def _huge_block(size: int) -> Tensor:
    """Untouched bytes from the start of a huge page on."""
    whole = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE_BYTES
    block = whole[first : first + size]
    advise_huge_pages(block)
    return block
