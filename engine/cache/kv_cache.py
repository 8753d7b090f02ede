"""KV cache tensors: keys and values per KV group, and recurrent states.

Copies whole blocks and swaps them to main memory. The block manager decides which sequence owns which block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from windlass.engine.cache.cache_operations import BlockCopy, SwappedPages
from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.kernels import Backend, KVPages, StatePages, is_out_of_memory, page_tensor_shapes

_SWAP_CHUNK_BYTES = 8 << 20  # copied at once to or from main memory: on a GPU the pages leave little free memory


class KVCache:
    """Pages of every KV group, in memory of one backend.

    num_blocks: per group. dtype int8 adds scales to the codes. states, num_states: shape and blocks of recurrent states,
    which form one more group, float32 for every dtype. Memory is reserved, not touched, so unused pages cost nothing
    on a CPU.
    """

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        backend: Backend,
        states: StateGroupSpec | None = None,
        num_states: int = 0,
    ) -> None:
        self.dtype = dtype
        self._pages: dict[int, KVPages] = {}
        self._states: dict[int, StatePages] = {}
        self._groups: list[tuple[torch.Tensor, ...]] = []  # planes [layers of the group, num_blocks, …]
        self._swapped_out: dict[int, list[list[list[torch.Tensor]]]] = {}  # seq_id -> chunks per group and plane
        for group, blocks in zip(groups, num_blocks, strict=True):
            planes = [
                backend.pages((len(group.layers), *shape), kind)
                for shape, kind in page_tensor_shapes(
                    blocks, block_size, group.num_kv_heads, group.head_dim, group.cached_value_dim, dtype
                )
            ]
            self._groups.append(tuple(planes))
            for i, layer in enumerate(group.layers):
                self._pages[layer] = KVPages(*(plane[i] for plane in planes))

        if states is not None:
            shapes = [(len(states.layers), num_states, *shape) for shape in states.shapes]
            windows, memories = (backend.pages(shape, torch.float32) for shape in shapes)
            self._groups.append((windows, memories))
            for i, layer in enumerate(states.layers):
                self._states[layer] = StatePages(windows[i], memories[i])

    def pages(self, layer: int) -> KVPages:
        return self._pages[layer]

    def states(self, layer: int) -> StatePages:
        return self._states[layer]

    @property
    def planes(self) -> Sequence[tuple[torch.Tensor, ...]]:
        """Per KV group the tensors of its pages, [layers, blocks, …] each."""
        return self._groups

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Apply whole-block copies in order, all layers of the group at once."""
        for copy in copies:
            for plane in self._groups[copy.group]:
                plane[:, copy.target] = plane[:, copy.source]

    def swap_out(self, swapped_out: SwappedPages) -> None:
        """Copy these blocks to main memory."""
        self._swapped_out[swapped_out.seq_id] = [
            [[_copy_to_host(plane, some) for some in _chunks(plane, blocks)] for plane in planes]
            for planes, blocks in zip(self._groups, swapped_out.blocks, strict=True)
        ]

    def swap_in(self, swapped_out: SwappedPages) -> None:
        """Copy a swapped-out sequence into these blocks and free the copies. KeyError if it was not swapped out."""
        copies = self._swapped_out[swapped_out.seq_id]
        for planes, blocks, copied in zip(self._groups, swapped_out.blocks, copies, strict=True):
            for plane, pieces in zip(planes, copied, strict=True):
                for some, piece in zip(_chunks(plane, blocks), pieces, strict=True):
                    _copy_to_device(plane, some, piece)
        del self._swapped_out[swapped_out.seq_id]

    def discard_swapped(self, seq_id: int) -> None:
        """Free the copies of a swapped-out sequence, if there are any."""
        self._swapped_out.pop(seq_id, None)


def _chunks(plane: torch.Tensor, blocks: Sequence[int]) -> Iterator[list[int]]:
    """The blocks of a plane [layers, blocks, …] in order, in chunks of at most `_SWAP_CHUNK_BYTES`."""
    count = max(1, _SWAP_CHUNK_BYTES // max(1, plane[:, :1].nbytes))
    for first in range(0, len(blocks), count):
        yield list(blocks[first : first + count])


def _copy_to_host(plane: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """Copy N blocks of a plane to main memory, [layers, N, …]."""
    try:
        return plane[:, blocks].cpu()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # One layer's part of a block is contiguous: copying it needs no further device memory.
    copy = torch.empty((plane.shape[0], len(blocks), *plane.shape[2:]), dtype=plane.dtype)
    for layer, own in enumerate(plane):
        for index, block in enumerate(blocks):
            copy[layer, index].copy_(own[block])
    return copy


def _copy_to_device(plane: torch.Tensor, blocks: list[int], piece: torch.Tensor) -> None:
    """Copy `piece`, [layers, N, …] in main memory, into N blocks of a plane."""
    try:
        plane[:, blocks] = piece.to(plane.device)
        return
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    for layer, own in enumerate(plane):
        for index, block in enumerate(blocks):
            own[block].copy_(piece[layer, index])
