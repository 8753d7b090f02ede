"""Draws in plain torch."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels import Filters
from windlass.kernels.torch.torch_sampler import sample


@pytest.mark.parametrize("top_p", [1 - 2**-53, 1 - 1e-15, 1 - 1e-13])
def test_top_p_a_hair_below_one_draws(top_p: float) -> None:
    # The row's mass is summed in another order than its bins: for many rows the target is beyond the last bin.
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0):
        for _ in range(40):
            logits = torch.randn(2, 1000, generator=generator) * scale
            likely = logits.argmax(-1).tolist()
            assert sample(logits.clone(), [Filters(top_p=top_p), Filters(temperature=1e-3, top_p=top_p)], [0.5, 0.5])[
                1
            ] in (
                likely[1],
                *logits[1].topk(5).indices.tolist(),
            )
