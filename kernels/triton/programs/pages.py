"""Where keys and values lie in pages: floats by slot, int8 codes as `layouts.int8` has them."""

import triton
import triton.language as tl


@triton.jit
def key_place(
    block, offset, head, dim, HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, CODES: tl.constexpr
):
    """The element of a key that is at an offset of a block. block: int64; all four broadcast."""
    if CODES:
        QUADS: tl.constexpr = (DIM + 3) // 4
        panel = (block * HEADS + head) * (SIZE // 16) + offset // 16
        return (panel * QUADS + dim // 4) * 64 + offset % 16 * 4 + dim % 4
    return ((block * SIZE + offset) * HEADS + head) * DIM + dim


@triton.jit
def value_place(
    block, offset, head, dim, HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, CODES: tl.constexpr
):
    if CODES:
        return (((block * HEADS + head) * (SIZE // 4) + offset // 4) * DIM + dim) * 4 + offset % 4
    return ((block * SIZE + offset) * HEADS + head) * DIM + dim


@triton.jit
def scale_place(block, offset, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    return (block * HEADS + head) * SIZE + offset


@triton.jit
def rounded(x):
    """To the nearest integer, ties to even, of magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantized(x, largest, SMALLEST: tl.constexpr):
    """int8 codes of x under the scale that its largest magnitude gives, and that scale; see `reference.quantize`."""
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))
    usable = scale >= SMALLEST
    codes = rounded(tl.div_rn(x, tl.where(usable, scale, 1.0)))
    codes = tl.where(usable, codes, 0.0).to(tl.int8)
    return codes, tl.where(usable | (scale != scale), scale, 0.0)
