"""Cosines and sines of every scaling at positions up to ten million, against mpmath."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from helpers.rotary_formulas import by_formula

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import select_backend

BASE = RotaryBase(500_000.0, 64, 64, 4096)
PARTIAL = RotaryBase(10_000.0, 64, 16, 4096)
POSITIONS = [0, 1, 4095, 4096, 131_071, 999_999, 1_000_000, 9_999_991, 10_000_000]


def kinds(pairs: int) -> dict[str, dict[str, Any]]:
    return {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "ntk": {"rope_type": "ntk", "factor": 8.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "alpha": {"rope_type": "dynamic", "alpha": 1000.0},
        "yarn": {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.01 * j for j in range(pairs)],
            "long_factor": [1.0 + 0.7 * j for j in range(pairs)],
            "original_max_position_embeddings": 1024,
        },
        "proportional": {"rope_type": "proportional", "factor": 8.0},
    }


CASES = [(kind, base) for base in (BASE, PARTIAL) for kind in kinds(1) if base is BASE or kind != "proportional"]


@pytest.mark.parametrize(("kind", "base"), CASES)
def test_angles_are_exact_at_any_position(kind: str, base: RotaryBase) -> None:
    pairs = base.rotary_dim // 2
    obj = kinds(pairs)[kind]
    spec = resolve(RopeScaling.from_dict(obj), base, 9000)
    w, _ = by_formula(obj, 9000, base)
    tables = RotaryTables(2, [base], select_backend("cpu"))
    rotation = tables.cos_sin(torch.full((len(POSITIONS),), tables.acquire([spec])), torch.tensor(POSITIONS))
    with mpmath.workdps(30):
        exact = [[mpmath.mpf(position) * mpmath.mpf(float(one)) for one in w] for position in POSITIONS]
        cos = np.array([[float(mpmath.cos(angle)) for angle in row] for row in exact])
        sin = np.array([[float(mpmath.sin(angle)) for angle in row] for row in exact])
    assert rotation.cos.dtype == torch.float32
    np.testing.assert_allclose(rotation.cos[0].numpy(), cos, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rotation.sin[0].numpy(), sin, rtol=0, atol=1e-6)


def test_plain_frequencies_are_exact() -> None:
    for theta, dim in ((1e4, 128), (5e5, 64), (1e6, 96)):
        got = resolve(RopeScaling(), RotaryBase(theta, dim, dim, 4096), 1).inv_freq
        with mpmath.workdps(30):
            exact = [float(mpmath.power(theta, mpmath.mpf(-2 * j) / dim)) for j in range(dim // 2)]
        np.testing.assert_allclose(got, exact, rtol=2e-15)
