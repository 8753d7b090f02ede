"""KV pages: the paged key and value tensors of one layer, in floats or int8 codes.

Int8 codes of heads are stored as byte dot products read them, four at a time. Keys: [num_blocks, Hkv, P / 16, ceil(D / 4),
16, 4]; 64 bytes hold four dims (a quad) of 16 tokens. Dims past D are zeros. Values: [num_blocks, Hkv, P / 4, Dv, 4]. Scales
of both: float32 [num_blocks, Hkv, P]. P is a multiple of 16. Everything that one head of one block holds is contiguous.

Int8 codes of latent rows (MLA) are stored token by token with a scale for each 32 numbers: codes [num_blocks, P, Hkv, D],
scales float32 [num_blocks, P, Hkv, ceil(D / 32)].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL_TOKENS = 16  # adjacent tokens in the keys of a page; block sizes are multiples of it

QUAD = 4  # codes that one byte dot product sums


def key_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Shape of the key codes. Raises ValueError for a block size that is not a multiple of 16."""
    _check_block_size(block_size)
    return num_blocks, kv_heads, block_size // PANEL_TOKENS, padded_dim(dim) // QUAD, PANEL_TOKENS, QUAD


def value_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Shape of the value codes. Raises ValueError for a block size that is not a multiple of 16."""
    _check_block_size(block_size)
    return num_blocks, kv_heads, block_size // QUAD, dim, QUAD


def padded_dim(dim: int) -> int:
    """Number of codes of a key with `dim` dims."""
    return -(-dim // QUAD) * QUAD


def key_rows(keys: Tensor) -> Tensor:
    """Rows of key codes, padding included: [num_blocks, P, Hkv, 4 * ceil(D / 4)]."""
    blocks, heads, panels, quads, _, _ = keys.shape
    return keys.permute(0, 2, 4, 1, 3, 5).reshape(blocks, panels * PANEL_TOKENS, heads, quads * QUAD)


def value_rows(values: Tensor) -> Tensor:
    """Rows of value codes: [num_blocks, P, Hkv, Dv]."""
    blocks, heads, quads, dim, _ = values.shape
    return values.permute(0, 2, 4, 1, 3).reshape(blocks, quads * QUAD, heads, dim)


def take_keys(keys: Tensor, slots: Tensor) -> Tensor:
    """Key codes of some slots, padding included: [N, Hkv, 4 * ceil(D / 4)]. slots: [N] int64, block * P + token."""
    return keys[_key_index(keys, slots)].flatten(2)


def put_keys(keys: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows int8 [N, Hkv, D] to distinct slots, and zeros to their padding."""
    count, heads, dim = rows.shape
    padded = F.pad(rows, (0, keys.shape[3] * QUAD - dim))
    keys[_key_index(keys, slots)] = padded.view(count, heads, keys.shape[3], QUAD)


def take_values(values: Tensor, slots: Tensor) -> Tensor:
    """Value codes of some slots: [N, Hkv, Dv]."""
    return values[_value_index(values, slots)]


def put_values(values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows int8 [N, Hkv, Dv] to distinct slots."""
    values[_value_index(values, slots)] = rows


def take_scales(scales: Tensor, slots: Tensor) -> Tensor:
    """Scales of some slots, [N, Hkv]."""
    return scales[_scale_index(scales, slots)]


def put_scales(scales: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write scales float32 [N, Hkv] to distinct slots."""
    scales[_scale_index(scales, slots)] = rows


_Index = tuple[Tensor | slice, ...]


def _key_index(keys: Tensor, slots: Tensor) -> _Index:
    panels, every = slots // PANEL_TOKENS, slice(None)
    return panels // keys.shape[2], every, panels % keys.shape[2], every, slots % PANEL_TOKENS


def _value_index(values: Tensor, slots: Tensor) -> _Index:
    quads, every = slots // QUAD, slice(None)
    return quads // values.shape[2], every, quads % values.shape[2], every, slots % QUAD


def _scale_index(scales: Tensor, slots: Tensor) -> _Index:
    return slots // scales.shape[2], slice(None), slots % scales.shape[2]


def _check_block_size(block_size: int) -> None:
    if block_size < PANEL_TOKENS or block_size % PANEL_TOKENS:
        raise ValueError(f"blocks of int8 codes hold a multiple of {PANEL_TOKENS} tokens, not {block_size}")


GROUP = 32


def num_groups(dim: int) -> int:
    """Number of scales of a row of `dim` numbers."""
    return -(-dim // GROUP)


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize codes [..., D] with scales [..., ceil(D / 32)] to float32 [..., D]."""
    return codes.to(torch.float32) * scales.repeat_interleave(GROUP, dim=-1)[..., : codes.shape[-1]]


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of one layer. Keys are stored rotated at their absolute position, at unit scale.

    Floats: key [num_blocks, P, Hkv, D], value [num_blocks, P, Hkv, Dv]; same dtype and device, contiguous. int8 pages hold
    codes in -127 .. 127 in the layouts of this module: of heads with key_scale and value_scale [num_blocks, Hkv, P] float32,
    or, without values (Dv is 0, latent attention), latent rows with key_scale [num_blocks, P, Hkv, groups]. Token t of block
    b is slot b * P + t either way.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def in_panels(self) -> bool:
        """Whether these are int8 codes of heads."""
        return self.key.dim() == 6

    @property
    def has_rows_of_codes(self) -> bool:
        """Whether these are int8 codes of latent rows."""
        return self.key_scale is not None and not self.in_panels

    @property
    def block_size(self) -> int:
        return self.key_scale.shape[2] if self.key_scale is not None and self.in_panels else self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1] if self.in_panels else self.key.shape[2]

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def with_keys_as_values(self) -> KVPages:
        """Pages without values (Dv is 0) for attention whose values are the keys themselves."""
        return KVPages(self.key, self.key, self.key_scale, self.key_scale)

    @property
    def key_dim(self) -> int:
        """Numbers of a key; int8 codes of heads include their padding."""
        return self.key.shape[3] * QUAD if self.in_panels else self.key.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    def holds_keys(self, kv_heads: int, dim: int) -> bool:
        """Whether keys of this shape fit the pages."""
        if self.in_panels:
            return (self.key.shape[1], self.key.shape[3]) == (kv_heads, padded_dim(dim) // QUAD)
        return self.key.shape[2:] == (kv_heads, dim)

    def keys_of(self, blocks: Tensor, dim: int) -> Tensor:
        """Keys of some blocks, float32 [N, P, Hkv, dim]. blocks: [N], not negative. dim: D, which padded codes do not show."""
        pages = self.key.index_select(0, blocks)
        if self.key_scale is None:
            return pages.to(torch.float32)
        if not self.in_panels:
            return widened(pages, self.key_scale.index_select(0, blocks))
        return _widened(key_rows(pages)[..., :dim], self.key_scale, blocks)

    def values_of(self, blocks: Tensor) -> Tensor:
        """Values of some blocks, float32 [N, P, Hkv, Dv]. blocks: [N], not negative."""
        pages = self.value.index_select(0, blocks)
        if self.value_scale is None:
            return pages.to(torch.float32)
        if not self.in_panels:
            return widened(pages, self.value_scale.index_select(0, blocks))
        return _widened(value_rows(pages), self.value_scale, blocks)


def page_tensor_shapes(
    num_blocks: int, block_size: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of the tensors of `KVPages`, in their order. value_dim 0: pages without values.

    Raises ValueError for int8 pages with values whose block size is not a multiple of 16.
    """
    size = num_blocks, block_size, kv_heads
    rows: list[tuple[tuple[int, ...], torch.dtype]] = [((*size, dim), dtype), ((*size, value_dim), dtype)]
    if dtype != torch.int8:
        return rows
    if not value_dim:
        return [*rows, *(((*size, num_groups(d)), torch.float32) for d in (dim, 0))]
    scales = (num_blocks, kv_heads, block_size), torch.float32
    return [
        (key_shape(*size, dim), dtype),
        (value_shape(*size, value_dim), dtype),
        scales,
        scales,
    ]


def _widened(rows: Tensor, scale: Tensor, blocks: Tensor) -> Tensor:
    return rows.to(torch.float32) * scale.index_select(0, blocks).transpose(1, 2)[..., None]
