"""Numbers on their way to a device, through memory that it reads by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host's memory on a device, in the order of what that is asked for. Nobody waits: torch keeps the pinned copy
    until it was read."""
    if device.type == "cpu":
        return numbers
    # A part of larger numbers would be pinned with gaps, and torch would wait to copy it through other memory.
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)


def copy_into(target: Tensor, numbers: Tensor) -> None:
    """The same into memory that is there. Both contiguous, of one shape and type."""
    target.copy_(numbers if target.device.type == "cpu" else numbers.pin_memory(), non_blocking=True)
