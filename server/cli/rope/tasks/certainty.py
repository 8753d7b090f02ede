"""How sure a difference between two ways of reading the same questions is. Knows arrays of numbers only.

Shares: Wilson's interval. Differences of shares: a paired bootstrap, whose resamples draw the same units from both sides
(percentile interval; Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13), and McNemar's exact test,
which asks of the questions that only one side got right whether they fall on one side more often than a fair coin would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.clients.loadtest.intervals import Interval
from windlass.server.cli.rope.sweep_results import CONFIDENCE

RESAMPLES = 10_000
MIN_UNITS = 6  # fewer give no interval worth its name
_SEED = 20260101


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """second - first: mean, the bootstrap's interval (None where the units are too few), McNemar's p (None where it is no
    matter of right and wrong)."""

    mean: float
    interval: Interval | None
    p_value: float | None = None

    @property
    def is_certain(self) -> bool:
        """Whether both say that the difference is more than chance."""
        by_test = self.p_value is None or self.p_value < 1 - CONFIDENCE
        return by_test and self.interval is not None and self.interval.excludes_zero


def paired_bootstrap(differences: Sequence[Sequence[float]]) -> PairedDifference:
    """The mean of all differences, resampled by unit. differences: by unit, such as a document; empty units do not count."""
    units = [unit for unit in differences if len(unit)]
    sums = np.array([float(np.sum(unit)) for unit in units])
    sizes = np.array([len(unit) for unit in units], dtype=np.float64)
    if not units:
        return PairedDifference(math.nan, None)
    mean = float(sums.sum() / sizes.sum())
    if len(units) < MIN_UNITS:
        return PairedDifference(mean, None)
    generator = np.random.default_rng(_SEED)
    resamples = generator.multinomial(len(units), np.full(len(units), 1 / len(units)), size=RESAMPLES)  # [R, U]
    means = (resamples @ sums) / (resamples @ sizes)
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [rest, 1 - rest])
    return PairedDifference(mean, Interval(float(low), float(high)))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The two-sided exact p-value of pairs that agree alike (McNemar, 1947; exact by the binomial of the discordant pairs)."""
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**total))
