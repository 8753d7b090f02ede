"""What tests of Triton's programs start with: skipped where Triton is missing, run in its interpreter without a GPU.

`tests/conftest.py` asks for the interpreter before anything imports Triton.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")

# The interpreter computes with numpy, which warns of what a device does in silence.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Relative to the largest number; NaN where NaN is expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    wide, want = found.double().nan_to_num(), expected.double().nan_to_num()
    if want.numel():
        assert float((wide - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
