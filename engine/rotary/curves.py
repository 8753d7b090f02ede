"""Rotary curves: angles, mean cosine and decay bound by distance, in float64.

Takes and returns numbers; knows no model and no request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def angles(positions: Numbers, frequencies: Numbers) -> Numbers:
    """position times frequency, radians, [P, pairs]."""
    return positions[:, None] * frequencies[None]


def mean_cosine(distances: Numbers, frequencies: Numbers) -> Numbers:
    """The score of equal vectors of ones, over its value at distance 0: the mean of cos(r w_j), [R]."""
    return np.asarray(np.cos(angles(distances, frequencies)).mean(axis=1))


def decay_bound(distances: Numbers, frequencies: Numbers) -> Numbers:
    """RoFormer's bound by distance (arXiv 2104.09864, section 3.4.3): the mean of |S_j|, S_j = sum_{i<j} e^(i r w_i). [R].

    For equal vectors of ones it is the bound over the largest score; the paper draws it over its own value at 0, (pairs + 1) / 2.
    """
    sums = np.exp(1j * angles(distances, frequencies)).cumsum(axis=1)
    return np.asarray(np.abs(sums).mean(axis=1))


def slow_pairs(frequencies: Sequence[float], length: int) -> int:
    """Pairs that turn less than once within `length` tokens: in training they never saw a whole turn."""
    return sum(length * abs(w) < 2 * math.pi for w in frequencies)
