"""Marks of tests of Triton programs: skipped without Triton, and interpreted without a GPU.

`tests/conftest.py` selects the interpreter before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from helpers.device import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")

# The interpreter uses numpy, which warns about overflow and NaN.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Tests of single programs. With a GPU, their tensors are on it and nothing is interpreted.
ON_THE_DEVICE = [QUIET, pytest.mark.usefixtures("on_the_device")]
PLAYED = [QUIET, pytest.mark.skipif(DEVICE != "cpu", reason="simulates a device on a CPU")]


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """tolerance: relative to the largest number. NaN only where expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    wide, want = found.double().nan_to_num(), expected.double().nan_to_num()
    if want.numel():
        assert float((wide - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
