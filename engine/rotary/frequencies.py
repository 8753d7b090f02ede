"""Rotary frequencies: the formulas of all scaling kinds, in float64.

Plain arithmetic without torch or numpy. Symbols: `d` rotary dimension, `b` base (theta), `j` pair index 0 .. d/2 - 1,
`w_j` the unscaled frequency in radians per token: b^(-2j/d), or a learned value from the checkpoint. Formulas that only
use frequencies take w; the others take the base as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Frequencies = tuple[float, ...]


def default(theta: float, dim: int, rotating: int | None = None) -> Frequencies:
    """w_j = theta^(-2j/dim), the frequencies of RoFormer (arXiv 2104.09864), shape [dim/2].

    rotating: number of leading pairs that rotate; the others have frequency 0 (p-RoPE, arXiv 2410.06205; "proportional"
    in Gemma 4). The exponents are over the full `dim` in either case.
    """
    pairs = dim // 2
    rotating = pairs if rotating is None else rotating
    return tuple(theta ** (-2 * j / dim) for j in range(rotating)) + (0.0,) * (pairs - rotating)


def wavelength(frequency: float) -> float | None:
    """Tokens per full turn of a pair; None if it never turns or the number exceeds float64."""
    tokens = 2 * math.pi / frequency if frequency else math.inf
    return tokens if math.isfinite(tokens) else None


def linear(w: Sequence[float], factor: float) -> Frequencies:
    """w / factor: position interpolation (arXiv 2306.15595)."""
    return tuple(one / factor for one in w)


def stretched_base(theta: float, dim: int, stretch: float) -> float:
    """Base of NTK-aware scaling, theta * stretch^(dim/(dim-2)): the slowest pair slows by exactly `stretch`.

    A single pair (dim 2) has frequency 1 with any base. Raises OverflowError if the base exceeds float64.
    """
    return theta if dim == 2 else theta * stretch ** (dim / (dim - 2))


def dynamic_stretch(factor: float, length_ratio: float) -> float:
    """The stretch of dynamic NTK at `length_ratio` = length / trained length (at least 1): f*n/M - (f - 1)."""
    return factor * max(length_ratio, 1.0) - (factor - 1)


def grid_ratio(trained_len: int, length: int) -> float:
    """length / trained_len rounded up on the grid 1, 2^(1/4), 2^(2/4), 2^(3/4), 2, … (never below 1)."""
    if length <= trained_len:
        return 1.0
    ratio = length / trained_len
    step = math.ceil(4 * math.log2(ratio))
    # The logarithm may be slightly off a grid point: compare the points themselves.
    while step > 0 and 2.0 ** ((step - 1) / 4) >= ratio:
        step -= 1
    while 2.0 ** (step / 4) < ratio:
        step += 1
    return float(2.0 ** (step / 4))


def yarn(
    w: Sequence[float],
    theta: float,
    dim: int,
    factor: float,
    original_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """YaRN's ramp from w (pairs that rotate often within `original_len`) to w / factor (arXiv 2309.00071, section 3.2).

    w: [dim/2], the unscaled frequencies of base theta. beta_fast, beta_slow: full rotations within `original_len` at
    which the ramp starts and ends. truncate: round the ends of the ramp outwards to whole pairs.
    """

    def pair_that_rotates(times: float) -> float:
        # A sum of logarithms: the quotient would exceed float64 for extreme numbers of rotations.
        return dim * (math.log(original_len) - math.log(times) - math.log(2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_rotates(beta_fast), pair_that_rotates(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, as in other implementations, instead of a division by zero

    frequencies = []
    for j, one in enumerate(w):
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        frequencies.append(one * (1 - ramp) + one / factor * ramp)
    return tuple(frequencies)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """m(mscale) / m(mscale_all_dim) when both are given and not 0, else m(1), with m as in `yarn_magnitude`."""
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1. DeepSeek's latent attention multiplies whole scores by m(mscale_all_dim)^2."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3(
    w: Sequence[float], factor: float, low_freq_factor: float, high_freq_factor: float, original_len: int
) -> Frequencies:
    """Llama 3.1: high frequencies stay, low ones are divided by `factor`, those between are blended.

    With low_freq_factor == high_freq_factor nothing is blended, and the result stays finite.
    """
    frequencies = []
    for one in w:
        rotations = original_len * one / (2 * math.pi)  # within the original length
        if rotations < low_freq_factor:
            frequencies.append(one / factor)
        elif rotations > high_freq_factor or low_freq_factor == high_freq_factor:
            frequencies.append(one)
        else:
            smooth = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)
            frequencies.append((1 - smooth) * one / factor + smooth * one)
    return tuple(frequencies)


def longrope(w: Sequence[float], divisors: Sequence[float]) -> Frequencies:
    """w_j / divisors_j: LongRoPE (arXiv 2402.13753); the caller picks the short or the long list, each as long as w."""
    return tuple(one / divisor for one, divisor in zip(w, divisors, strict=True))


def longrope_attention_factor(factor: float, original_len: int) -> float:
    """sqrt(1 + ln(factor) / ln(original_len)); 1 for a factor of at most 1. `original_len` is at least 2."""
    return math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
