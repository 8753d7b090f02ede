"""Checks of results that many kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative error of a result that is rounded to a dtype once.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_near(found: Tensor, expected: Tensor, slack: float = 1e-6) -> None:
    """slack: tolerance of float32 sums, in addition to rounding to the dtype. NaN only where expected."""
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    difference = (found.double() - expected).nan_to_num().abs()
    allowed = slack + ROUNDING[found.dtype] * 1.01 * expected.abs().nan_to_num()
    assert (difference <= allowed).all(), difference.max()


def same_on_threads(compute: Callable[[], Tensor], *counts: int) -> Tensor:
    """Return the result, after a check that it has the same bits at these numbers of threads (1, 2 and 3 by default)."""
    before, found = torch.get_num_threads(), []
    try:
        for count in counts or (1, 2, 3):
            torch.set_num_threads(count)
            found.append(compute())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    return found[0]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare bit patterns, so that NaN equals itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
