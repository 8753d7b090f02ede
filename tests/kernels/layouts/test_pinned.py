"""Numbers on their way to a device: side by side in the memory that it copies from, whatever they were taken from."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels import to_device

TABLES = torch.arange(2 * 6 * 10, dtype=torch.int32).view(2, 6, 10)


@pytest.mark.parametrize(
    "part", [TABLES, TABLES[:, 1:3, :4], TABLES[0].T, TABLES[0, 2]], ids=["all", "some", "turned", "row"]
)
def test_what_is_pinned_has_no_gaps(part: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_device(part, torch.device("cpu")) is part
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda numbers: pinned.append(numbers) or numbers)
    found = to_device(part, torch.device("meta"))
    (copied,) = pinned
    assert copied.is_contiguous() and torch.equal(copied, part) and found.shape == part.shape
