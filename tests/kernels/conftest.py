"""Fixtures of all kernel tests: variants of the compiled kernels, repeatable random numbers, and poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.cpu_kernels import FORMS, kernels

from windlass.kernels.cpu.library import Library


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Fill new tensors with NaN, so that output elements that are not written are detected."""
    torch.manual_seed(11)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
