"""How int8 codes of keys and values lie in a page: as the compiled products of bytes read them, four at a time.

Keys: [num_blocks, Hkv, P / 16, ceil(D / 4), 16, 4], so 64 bytes hold four dims (a quad) of 16 tokens and a quad of the
query meets all of them at once. Dims past D are zeros. Values: [num_blocks, Hkv, P / 4, Dv, 4], so 64 bytes hold 16 dims of
four tokens. Scales, float32, of both: [num_blocks, Hkv, P]. P is a multiple of 16. What one head of one block holds is
one run of memory, and nothing is ever moved across lanes to be read.

Rows below are the same codes token by token, [num_blocks, P, Hkv, D].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

PANEL_TOKENS = 16  # tokens side by side in a page's keys; block sizes are multiples of it
QUAD = 4  # codes that one product of bytes adds up


def key_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Of the key codes. Raises ValueError for a block size that is no multiple of 16."""
    _check_block_size(block_size)
    return num_blocks, kv_heads, block_size // PANEL_TOKENS, padded_dim(dim) // QUAD, PANEL_TOKENS, QUAD


def value_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Of the value codes. Raises ValueError for a block size that is no multiple of 16."""
    _check_block_size(block_size)
    return num_blocks, kv_heads, block_size // QUAD, dim, QUAD


def padded_dim(dim: int) -> int:
    """The codes that a key of `dim` dims takes."""
    return -(-dim // QUAD) * QUAD


def pack_keys(rows: Tensor) -> Tensor:
    """Key codes of rows int8 [num_blocks, P, Hkv, D]."""
    blocks, size, heads, dim = rows.shape
    shape = key_shape(blocks, size, heads, dim)
    padded = F.pad(rows, (0, padded_dim(dim) - dim))
    return padded.view(blocks, shape[2], PANEL_TOKENS, heads, shape[3], QUAD).permute(0, 3, 1, 4, 2, 5).contiguous()


def pack_values(rows: Tensor) -> Tensor:
    """Value codes of rows int8 [num_blocks, P, Hkv, Dv]."""
    blocks, size, heads, dim = rows.shape
    quads = value_shape(blocks, size, heads, dim)[2]
    return rows.view(blocks, quads, QUAD, heads, dim).permute(0, 3, 1, 4, 2).contiguous()


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
    return keys[_key_place(keys, slots)].flatten(2)


def put_keys(keys: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows int8 [N, Hkv, D] to the slots, distinct, and zeros to their padding."""
    count, heads, dim = rows.shape
    padded = F.pad(rows, (0, keys.shape[3] * QUAD - dim))
    keys[_key_place(keys, slots)] = padded.view(count, heads, keys.shape[3], QUAD)


def take_values(values: Tensor, slots: Tensor) -> Tensor:
    """Value codes of some slots: [N, Hkv, Dv]."""
    return values[_value_place(values, slots)]


def put_values(values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows int8 [N, Hkv, Dv] to the slots, distinct."""
    values[_value_place(values, slots)] = rows


def take_scales(scales: Tensor, slots: Tensor) -> Tensor:
    """Scales of some slots, [N, Hkv]."""
    return scales[_scale_place(scales, slots)]


def put_scales(scales: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write scales float32 [N, Hkv] to the slots, distinct."""
    scales[_scale_place(scales, slots)] = rows


_Place = tuple[Tensor | slice, ...]


def _key_place(keys: Tensor, slots: Tensor) -> _Place:
    panels, every = slots // PANEL_TOKENS, slice(None)
    return panels // keys.shape[2], every, panels % keys.shape[2], every, slots % PANEL_TOKENS


def _value_place(values: Tensor, slots: Tensor) -> _Place:
    quads, every = slots // QUAD, slice(None)
    return quads // values.shape[2], every, quads % values.shape[2], every, slots % QUAD


def _scale_place(scales: Tensor, slots: Tensor) -> _Place:
    return slots // scales.shape[2], slice(None), slots % scales.shape[2]


def _check_block_size(block_size: int) -> None:
    if block_size < PANEL_TOKENS or block_size % PANEL_TOKENS:
        raise ValueError(f"blocks of int8 codes hold a multiple of {PANEL_TOKENS} tokens, not {block_size}")
