"""Pages as rows: a block of a KV group is one row of words, whatever planes it has, so that blocks are moved by many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits is moved quickest


class GroupRows:
    """planes: [layers, blocks, …] of one KV group each, contiguous. dtype, num_words: of a block's row."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        flat = [plane.flatten(2) for plane in planes]
        sizes = [plane.shape[2] * plane.dtype.itemsize for plane in flat]
        self.dtype = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))
        self._views = [plane.view(self.dtype).transpose(0, 1) for plane in flat]  # [blocks, layers, words] each
        self._ends = [0]
        for view in self._views:
            self._ends.append(self._ends[-1] + view.shape[1] * view.shape[2])
        self.num_words = self._ends[-1]

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Take blocks [N], int64 on the device, into rows [N, words] there."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            torch.index_select(view, 0, blocks, out=part)

    def scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Put rows [N, words] of the device into blocks [N], int64 there."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            view.index_copy_(0, blocks, part)

    def put(self, row: Tensor, block: int) -> None:
        """Put a row [words] of the device into a block, which takes no memory there."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            # A layer at a time: those of a block lie apart, and for what lies together no program has to be loaded.
            for layer, own in zip(view[block], part[0], strict=True):
                layer.copy_(own)

    def read_block(self, block: int, row: Tensor) -> None:
        """Take a block into a row [words] of the device."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            part[0].copy_(view[block])

    def _parts(self, rows: Tensor) -> Iterator[Tensor]:
        """Of each plane [N, layers, words]."""
        for view, first, end in zip(self._views, self._ends, self._ends[1:], strict=False):
            yield rows[:, first:end].view(len(rows), *view.shape[1:])


def consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of entries whose numbers follow one another, in order."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield first, index
            first = index
