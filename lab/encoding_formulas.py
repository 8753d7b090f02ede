"""Formulas of position encodings in float64, with their sources.

Rotated vectors and scores use the engine's frequencies. For comparison, sinusoids, T5's buckets and ALiBi's slopes are
implemented as in their papers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from windlass.engine.rotary.curves import angles

Numbers = NDArray[np.float64]


def rotated(vectors: Numbers, position: float, frequencies: Numbers) -> Numbers:
    """Half-split vectors [..., 2 * pairs] at a position: pair j is (x_j, x_{j + pairs}) (RoFormer, arXiv 2104.09864)."""
    half = len(frequencies)
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    first, second = vectors[..., :half], vectors[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def scores(q: Numbers, k: Numbers, distances: Numbers, frequencies: Numbers) -> Numbers:
    """Scores of q at distance r after k, for every r: Re sum_j q_j conj(k_j) exp(i r w_j) over complex pairs j. [R].

    q, k: [2 * pairs], half-split, unrotated.
    """
    half = len(frequencies)
    a, b = q[:half] + 1j * q[half:], k[:half] + 1j * k[half:]
    turns = np.exp(1j * angles(distances, frequencies))  # [R, pairs]
    return np.asarray((turns * (a * b.conj())).sum(axis=1).real)


def sinusoids(positions: Numbers, dim: int, theta: float = 10000.0) -> Numbers:
    """The table of "Attention is all you need" (arXiv 1706.03762): sines in even columns, cosines in odd ones. [P, dim]."""
    turning = angles(positions, theta ** (-np.arange(0, dim, 2) / dim))
    table = np.empty((len(positions), dim))
    table[:, 0::2], table[:, 1::2] = np.sin(turning), np.cos(turning)
    return table


def t5_buckets(distances: Numbers, buckets: int = 32, farthest: int = 128) -> Numbers:
    """Bucket of each backward distance, [R]: half of the buckets hold one distance each, the others are logarithmic
    (arXiv 1910.10683).
    """
    exact = buckets // 2
    far = np.log(np.maximum(distances, 1) / exact) / math.log(farthest / exact) * (buckets - exact)
    return np.where(distances < exact, distances, np.minimum(exact + np.floor(far), buckets - 1))


def alibi_slopes(heads: int) -> Numbers:
    """2^(-8 h / heads) for h = 1 … heads, a power of two (ALiBi, arXiv 2108.12409). [heads]."""
    return np.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / heads))


def relative(rows: int, values: Numbers) -> Numbers:
    """Matrix of values by distance: entry (m, n) is values[m - n], NaN for keys after their query. [rows, rows]."""
    distance = np.arange(rows)[:, None] - np.arange(rows)[None]
    return np.where(distance >= 0, values[np.maximum(distance, 0)], np.nan)


def products(table: Numbers) -> Numbers:
    """Products of rows divided by the mean squared norm: similarity of two positions by their vectors. [P, P]."""
    return np.asarray(table @ table.T / (table**2).sum(axis=1).mean())


def invariance_errors(
    q: Numbers, k: Numbers, distance: int, starts: Numbers, frequencies: Numbers
) -> dict[str, Numbers]:
    """Change of the score at one distance when both tokens move to `starts`, divided by |q||k|, by precision. [S] each.

    "float64": the engine's angles. "float32": position times frequency rounded to float32. "bfloat16": cosines and sines of
    float32 angles rounded to 8 bits, as in a table of the weights' dtype.
    """
    exact = scores(q, k, np.array([float(distance)]), frequencies)[0]
    size = float(np.linalg.norm(q) * np.linalg.norm(k))
    found: dict[str, list[float]] = {"float64": [], "float32": [], "bfloat16": []}
    for start in starts:
        for name in found:
            ends = [
                _rotated_at_precision(name, x, place, frequencies) for x, place in ((q, start + distance), (k, start))
            ]
            found[name].append(abs(float(ends[0] @ ends[1]) - exact) / size)
    return {name: np.array(errors) for name, errors in found.items()}


def _rotated_at_precision(precision: str, x: Numbers, position: float, frequencies: Numbers) -> Numbers:
    if precision == "float64":
        return rotated(x, position, frequencies)
    angle = (np.float32(position) * frequencies.astype(np.float32)).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    if precision == "bfloat16":
        cos, sin = _to_bfloat16(cos), _to_bfloat16(sin)
    half = len(frequencies)
    return np.concatenate((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))


def _to_bfloat16(values: Numbers) -> Numbers:
    """Round to 8 significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(mantissa * 256) / 256, exponent))
