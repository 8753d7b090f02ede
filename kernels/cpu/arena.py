"""Memory that tensors of a recording take and give back, so that a step needs one layer's activations whatever its depth.

Responsible for where such tensors lie and for nothing else: ranges of one piece of memory, taken at the lowest place
that is large enough (so that what is used stays small, and in the caches) and free again once the tensor and all views
of it are gone, which is when torch's own allocator would have had them back.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # of torch's own allocator too: a cache line


class Arena:
    """`capacity` bytes; pages of them that nothing ever used cost nothing. Tensors in it keep them alive."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = torch.empty(capacity, dtype=torch.uint8, device="cpu").numpy().data


class ArenaAllocator:
    """Tensors in an arena, no two living ones of which share memory. peak: bytes from its start that have been in use.

    It knows nothing of other tensors in the same arena, and hands out what those have.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._taken: list[tuple[int, int]] = []  # begin and end in bytes, in order
        self.peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised contiguous tensor of at least one element, or None where the arena has no room for it."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._take(-(-size // _ALIGNMENT) * _ALIGNMENT)
        if begin is None:
            return None
        # A storage made of a buffer holds the buffer's exporter, here this very view, for as long as it lives itself.
        lender = self._arena.memory[begin : begin + size]
        weakref.finalize(lender, self._give_back, begin)
        return torch.frombuffer(lender, dtype=dtype).view(shape)

    def _take(self, size: int) -> int | None:
        begin = 0
        for taken, end in self._taken:
            if taken - begin >= size:
                break
            begin = end
        if begin + size > self._arena.capacity:
            return None
        bisect.insort(self._taken, (begin, begin + size))
        self.peak = max(self.peak, begin + size)
        return begin

    def _give_back(self, begin: int) -> None:
        del self._taken[bisect.bisect_left(self._taken, (begin, 0))]
