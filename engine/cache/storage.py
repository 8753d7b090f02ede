"""The tensors behind the block tables: pages of keys and values per KV group. Knows nothing of who holds which block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from windlass.engine.huge_pages import advise_huge_pages
from windlass.engine.model.spec import KVGroupSpec
from windlass.engine.schedule import BlockCopy
from windlass.kernels import KVPages, plane_shapes

_BLOCK = 16  # tokens of the smallest block


class KVStorage:
    """Pages of every KV group on one device.

    groups and num_blocks run in parallel. dtype int8 adds scales beside the codes.
    Memory is reserved, not touched, so unused pages cost nothing on a CPU.
    """

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pages: dict[int, KVPages] = {}
        self._groups: list[tuple[torch.Tensor, ...]] = []  # planes [layers of the group, num_blocks, …]
        for group, blocks in zip(groups, num_blocks, strict=True):
            planes = []
            for shape, kind in plane_shapes(blocks, block_size, group.num_kv_heads, group.head_dim, dtype):
                planes.append(torch.empty((len(group.layers), *shape), dtype=kind, device=device))
                advise_huge_pages(planes[-1])
            self._groups.append(tuple(planes))
            for i, layer in enumerate(group.layers):
                self._pages[layer] = KVPages(*(plane[i] for plane in planes))

    def pages(self, layer: int) -> KVPages:
        return self._pages[layer]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Apply whole-block copies in order, all layers of the group at once."""
        for copy in copies:
            for plane in self._groups[copy.group]:
                plane[:, copy.target] = plane[:, copy.source]


def bytes_per_token(group: KVGroupSpec, dtype: torch.dtype) -> int:
    """What one token takes in a KV group's pages, padding and scales included."""
    planes = plane_shapes(1, _BLOCK, group.num_kv_heads, group.head_dim, dtype)
    return len(group.layers) * sum(math.prod(shape) * kind.itemsize for shape, kind in planes) // _BLOCK


def plan_blocks(
    groups: Sequence[KVGroupSpec],
    *,
    budget_bytes: int,
    block_size: int,
    dtype: torch.dtype,
    max_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """Blocks per KV group that fit in `budget_bytes`; (0, …) when not even one block each does.

    A window group never needs more than its windows plus one step's tokens for every running sequence, so whatever it
    does not need goes to the full-attention groups. max_blocks: what all sequences at full length could hold.
    """
    cost = [bytes_per_token(group, dtype) * block_size for group in groups]

    def blocks_for(count: int) -> tuple[int, ...]:
        result = []
        for group in groups:
            need = count
            if group.window is not None:
                per_sequence = -(-group.window // block_size) + 2
                need = min(count, max_num_seqs * per_sequence + -(-max_num_batched_tokens // block_size))
            result.append(need)
        return tuple(result)

    low, high = 0, max_blocks
    while low < high:  # the largest count that fits
        middle = (low + high + 1) // 2
        if sum(c * n for c, n in zip(cost, blocks_for(middle), strict=True)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return blocks_for(low)
