"""Tells whether bytes of a floating-point type hold NaN or infinite numbers, exactly and at the speed of a cache.

Knows bit patterns only: a number that is not finite has all exponent bits set, so apart from its sign it is at least as
large, read as an integer, as infinity. One look for the largest integer with a sign finds the positive ones, one for the
largest without a sign the negative ones; nothing is summed, so nothing can overflow, and no memory is asked for.
"""

from __future__ import annotations

import numpy as np
import torch

# The smallest pattern that is not a finite number, as an integer of the type's width.
_FIRST = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e4m3fn: 0x7F,  # it has no infinities
    torch.float8_e5m2: 0x7C,
}


def all_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether no number in these bytes, whole elements of `dtype`, is NaN or infinite. Integers always are finite."""
    if dtype == torch.float8_e8m0fnu:  # powers of two without a sign; the largest pattern is its one NaN
        return not len(data) or bool(np.frombuffer(data, dtype="u1").max() < 0xFF)
    first = _FIRST.get(dtype)
    if first is None or not len(data):
        return True
    bits = 8 * dtype.itemsize
    signed = np.frombuffer(data, dtype=f"i{dtype.itemsize}")
    return bool(signed.max() < first and signed.view(f"u{dtype.itemsize}").max() < first + (1 << (bits - 1)))
