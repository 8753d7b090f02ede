"""Default device of tensors in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.device import DEVICE


@pytest.fixture
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield
