"""What the callers of the compiled kernels check before an address is handed over. Knows tensors, nothing of the operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from windlass.kernels.cpu.library import PAGE_CODES
from windlass.kernels.layouts.int8 import PANEL_TOKENS, QUAD, padded_dim
from windlass.kernels.layouts.int8_rows import num_groups


def check(condition: bool, message: str) -> None:
    """ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


class PageSizes(NamedTuple):
    """What the shapes of pages tell. dim: of a key; of int8 keys in panels the next multiple of 4."""

    num_blocks: int
    block_size: int
    kv_heads: int
    dim: int
    value_dim: int
    in_panels: bool

    def holds_keys(self, kv_heads: int, dim: int) -> bool:
        """Whether such keys fit."""
        return self.kv_heads == kv_heads and self.dim == (padded_dim(dim) if self.in_panels else dim)


def page_sizes(key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None) -> PageSizes:
    """Of pages that neither function below refuses."""
    if key_scales is None or key_pages.dim() == 4:
        num_blocks, block_size, kv_heads, dim = key_pages.shape
        return PageSizes(num_blocks, block_size, kv_heads, dim, value_pages.shape[3], False)
    num_blocks, kv_heads, block_size = key_scales.shape
    return PageSizes(num_blocks, block_size, kv_heads, QUAD * key_pages.shape[3], value_pages.shape[3], True)


def pages_refusal(key_pages: Tensor, value_pages: Tensor) -> str | None:
    """Why these are not pages that the kernels take, or None when they are."""
    if key_pages.dtype not in PAGE_CODES or key_pages.dtype != value_pages.dtype:
        return f"pages are {key_pages.dtype} and {value_pages.dtype}, not one of float32, bfloat16, float16, int8"
    if key_pages.dtype == torch.int8 and key_pages.dim() != 4:
        shapes = tuple(key_pages.shape), tuple(value_pages.shape)
        if key_pages.dim() != 6 or value_pages.dim() != 5:
            return f"int8 pages {shapes} are not codes laid out for the kernels (see int8_layout)"
        num_blocks, kv_heads, panels, _, tokens, quad = key_pages.shape
        value_dim = value_pages.shape[3]
        if (tokens, quad) != (PANEL_TOKENS, QUAD) or value_pages.shape != (
            num_blocks,
            kv_heads,
            panels * PANEL_TOKENS // QUAD,
            value_dim,
            QUAD,
        ):
            return f"int8 pages {shapes} are not the keys and values of the same tokens"
    elif key_pages.dim() != 4 or key_pages.shape[:3] != value_pages.shape[:3]:
        return f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} differ before their last dimension"
    if not (key_pages.is_cpu and key_pages.is_contiguous() and value_pages.is_cpu and value_pages.is_contiguous()):
        return "the pages are not contiguous CPU tensors"
    return None


def scales_refusal(
    key_pages: Tensor, value_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> str | None:
    """Why these are not the scales of such pages, which `pages_refusal` takes, or None when they are."""
    for scales, dim in ((key_scales, key_pages.shape[3]), (value_scales, value_pages.shape[3])):
        if (scales is not None) != (key_pages.dtype == torch.int8):
            return "int8 pages need scales for keys and values, pages of floats have none"
        if scales is None:
            continue
        shape: tuple[int, ...] = (key_pages.shape[0], key_pages.shape[1], key_pages.shape[2] * PANEL_TOKENS)
        if key_pages.dim() == 4:
            shape = (*key_pages.shape[:3], num_groups(dim))
        if not (scales.dtype == torch.float32 and scales.shape == shape and scales.is_cpu and scales.is_contiguous()):
            return f"scales are {scales.dtype} {tuple(scales.shape)}, not float32 {shape}, contiguous"
    return None


def table_ok(table: Tensor, shape: tuple[int, int]) -> bool:
    """A float32 matrix of this shape with adjacent elements in a row."""
    return (
        table.dtype == torch.float32
        and table.shape == shape
        and table.is_cpu
        and (shape[1] < 2 or table.stride(1) == 1)
    )


def vector_ok(vector: Tensor, dtype: torch.dtype, length: int) -> bool:
    """A contiguous vector of this type and length."""
    return vector.dtype == dtype and vector.shape == (length,) and vector.is_cpu and vector.is_contiguous()


def check_out(out: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    """ValueError unless this is a matrix of that shape and type, with adjacent elements in a row, to be written."""
    if out.shape != (rows, columns) or out.dtype != dtype or (columns > 1 and out.stride(1) != 1) or not out.is_cpu:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {dtype} {(rows, columns)} with adjacent elements")
