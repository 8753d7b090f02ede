"""Page addressing in Triton: addresses of keys, values and scales in KV pages, and float8 and int8 conversion."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.torch.reference import SMALLEST_SCALE

SMALLEST = tl.constexpr(SMALLEST_SCALE)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of KV pages, a constant of a program (`PAGES`). size: slots of a block. codes: int8, in panels."""

    heads: int
    size: int
    dim: int
    value_dim: int
    codes: bool
    float8: bool

    @classmethod
    def of(cls, pages: KVPages, dim: int) -> "PageLayout":
        """dim: of keys, which padded codes do not show."""
        codes, float8 = pages.key_scale is not None, pages.key.dtype == torch.float8_e4m3fn
        return cls(pages.num_kv_heads, pages.block_size, dim, pages.value_dim, codes, float8)


def page_tensors(pages: KVPages) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and their scales as kernel arguments: float8 as uint8, which every GPU reads."""
    key, value = pages.key, pages.value
    if key.dtype == torch.float8_e4m3fn:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return key, value, pages.key_scale, pages.value_scale


@triton.jit
def key_offset(block, offset, head, dim, PAGES: tl.constexpr):
    """Index of an element of the key at an offset in a block. block: int64; all four broadcast."""
    if PAGES.codes:
        QUADS: tl.constexpr = (PAGES.dim + 3) // 4
        panel = (block * PAGES.heads + head) * (PAGES.size // 16) + offset // 16
        return (panel * QUADS + dim // 4) * 64 + offset % 16 * 4 + dim % 4
    return ((block * PAGES.size + offset) * PAGES.heads + head) * PAGES.dim + dim


@triton.jit
def value_offset(block, offset, head, dim, PAGES: tl.constexpr):
    if PAGES.codes:
        return (
            ((block * PAGES.heads + head) * (PAGES.size // 4) + offset // 4) * PAGES.value_dim + dim
        ) * 4 + offset % 4
    return ((block * PAGES.size + offset) * PAGES.heads + head) * PAGES.value_dim + dim


@triton.jit
def scale_offset(block, offset, head, PAGES: tl.constexpr):
    return (block * PAGES.heads + head) * PAGES.size + offset


@triton.jit
def from_float8(code):
    """float8_e4m3fn (as uint8) to float32. Triton supports the type only from compute capability 8.9 on."""
    # The same bits three places up are a float16 with an exponent that is 8 too small, subnormal ones too.
    plain = (code & 0x7F).to(tl.int16)
    number = (plain << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    number = tl.where(plain == 0x7F, float("nan"), number)
    return tl.where(code >= 0x80, -number, number)


@triton.jit
def to_float8(x):
    """float32 rounded to the nearest float8_e4m3fn (uint8), ties to even; saturates at its largest number."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = rounded(size * 512.0).to(tl.int32)  # multiples of 2^-9 below 2^-6
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded(x):
    """To the nearest integer, ties to even, of magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantized(x, largest):
    """int8 codes of x and their scale; see `reference.quantize`."""
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))
    usable = scale >= SMALLEST
    codes = rounded(tl.div_rn(x, tl.where(usable, scale, 1.0)))
    codes = tl.where(usable, codes, 0.0).to(tl.int8)
    return codes, tl.where(usable | (scale != scale), scale, 0.0)
