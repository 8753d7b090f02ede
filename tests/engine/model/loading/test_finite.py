"""Non-finite bit patterns compared with torch, for all patterns of 8 and 16 bits."""

from __future__ import annotations

import pytest
import torch

from windlass.engine.model.loading.tensor_reader import all_finite


def finite(tensor: torch.Tensor) -> bool:
    return all_finite(tensor.view(torch.uint8).numpy().data, tensor.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
)
def test_every_pattern_equals_torch(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << (8 * dtype.itemsize)).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    numbers = patterns.view(dtype)
    wanted = numbers.float().isfinite()
    found = torch.tensor([finite(numbers[i : i + 1]) for i in range(len(numbers))])
    assert torch.equal(found, wanted) and 0 < wanted.sum() < len(wanted)
    assert finite(numbers[wanted]) and not finite(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_of_wide_types(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor([info.max, info.min, info.tiny, 0.0, -0.0, 1.0], dtype=dtype).repeat(1000)
    assert finite(numbers)
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for place in (0, 2999, -1):
            damaged = numbers.clone()
            damaged[place] = value
            assert not finite(damaged)


def test_integers_and_empty_tensors_are_finite() -> None:
    assert finite(torch.full((16,), -1, dtype=torch.int8)) and finite(torch.full((16,), 255, dtype=torch.uint8))
    assert finite(torch.empty(0, dtype=torch.float32))
