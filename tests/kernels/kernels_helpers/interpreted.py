"""What tests of Triton's programs start with: skipped where Triton is missing, run in its interpreter without a GPU.

`tests/conftest.py` asks for the interpreter before anything imports Triton.
"""

from __future__ import annotations

import pytest
import torch
from helpers.device import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")

# The interpreter computes with numpy, which warns of what a device does in silence.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Of programs by themselves: where there is a GPU to test on, what they are given lies there and nothing is interpreted.
ON_THE_DEVICE = [QUIET, pytest.mark.usefixtures("on_the_device")]
PLAYED = [QUIET, pytest.mark.skipif(DEVICE != "cpu", reason="plays a device on a CPU")]


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Relative to the largest number; NaN where NaN is expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    wide, want = found.double().nan_to_num(), expected.double().nan_to_num()
    if want.numel():
        assert float((wide - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
