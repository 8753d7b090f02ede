"""Rotary curves: angles, mean cosine and decay bound by distance, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def angles(positions: Numbers, frequencies: Numbers) -> Numbers:
    """Position times frequency, in radians, [P, pairs]."""
    return positions[:, None] * frequencies[None]


def mean_cosine(distances: Numbers, frequencies: Numbers) -> Numbers:
    """Score of two equal vectors of ones, relative to distance 0: the mean over j of cos(r w_j), [R]."""
    return np.asarray(np.cos(angles(distances, frequencies)).mean(axis=1))


def decay_bound(distances: Numbers, frequencies: Numbers) -> Numbers:
    """RoFormer's bound by distance (arXiv 2104.09864, section 3.4.3): the mean of |S_j|, [R].

    S_j = sum_{i<j} e^(i r w_i). For equal vectors of ones this is the bound divided by the largest score; the paper plots
    it divided by its value at 0, (pairs + 1) / 2.
    """
    sums = np.exp(1j * angles(distances, frequencies)).cumsum(axis=1)
    return np.asarray(np.abs(sums).mean(axis=1))


def slow_pairs(frequencies: Sequence[float], length: int) -> int:
    """Number of pairs that make less than a full turn within `length` tokens, so that training never shows one."""
    return sum(length * abs(w) < 2 * math.pi for w in frequencies)
