"""What a sweep measured, as numbers: perplexity by position, by range, and how far each scaling holds.

Knows neither models nor pictures. Everything derives from the loss of every row of every window, so ranges of any width
are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from windlass.clients.loadtest.intervals import Interval, mean_interval
from windlass.engine.api.context import ContextRule

Kind = Literal[
    "none",
    "cut",
    "own",
    "linear",
    "ntk",
    "yarn",
    "dynamic",
    "llama3",
    "longrope",
    "dual_chunk",
    "self_extend",
    "rerope",
    "log_n",
    "window",
    "other",
]

CONFIDENCE = 0.95
# A scaling "holds" while its perplexity stays within this of the same text cut to the trained length.
TOLERANCE = 1.25
_MAX_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Curve:
    """One scaling under one policy.

    scaling: the object as a person would write it, None for the model's own. longest: what `frozen` was frozen for,
    None where nothing depends on length. nll: nats of the next token, [windows, rows], NaN for rows not read. context: what a
    token saw.
    """

    name: str
    label: str
    kind: Kind
    scaling: dict[str, Any] | None
    policy: str | None
    longest: int | None
    plotted: bool
    nll: NDArray[np.float64]
    context: ContextRule = field(default_factory=ContextRule)


@dataclass(frozen=True, slots=True)
class ExactPoint:
    """Recompute for the exact length at sampled rows about `position`: the grid's perplexity there times the measured ratio.

    low, high: one standard error of that ratio either way.
    """

    position: float
    perplexity: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ExactComparison:
    """Nats per token lost by each policy against recomputing for the exact length, at the same sampled rows.

    difference, error: mean and standard error by policy.
    """

    name: str
    rows: int
    points: tuple[ExactPoint, ...]
    difference: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True, slots=True)
class SweptText:
    """One text: its file's name, its length in tokens, its SHA-256, and the first token of each window read."""

    name: str
    tokens: int
    digest: str
    starts: tuple[int, ...]


@dataclass(frozen=True)
class ScalingSweep:
    """A whole sweep. model: what `windlass serve` takes for it. Windows of all texts lie behind each other.

    kv_cache_dtype: what keys and values were cached as, "auto" where that was not chosen.
    """

    model: str
    model_name: str
    texts: tuple[SweptText, ...]
    trained_len: int
    max_len: int
    target_len: int
    curves: tuple[Curve, ...]
    exact: ExactComparison | None = None
    kv_cache_dtype: str = "auto"

    @cached_property
    def units(self) -> list[slice]:
        """What means and intervals are taken over, as ranges of windows: texts, or the windows of the only text."""
        if len(self.texts) == 1:
            return [slice(index, index + 1) for index in range(len(self.texts[0].starts))]
        ends = list(accumulate(len(text.starts) for text in self.texts))
        return [slice(end - len(text.starts), end) for end, text in zip(ends, self.texts, strict=True)]

    @property
    def unit_name(self) -> str:
        return "text" if len(self.texts) > 1 else "window"

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """[low, high) row ranges of a quarter of the trained length, or wider ones where those would be too many."""
        width = max(self.trained_len // 4, 1)
        while self.max_len / width > _MAX_BUCKETS:
            width *= 2
        return [(low, min(low + width, self.max_len)) for low in range(0, self.max_len, width)]

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The table's columns: all up to the trained length, then half a trained length before each mark, then all."""
        m, half = self.trained_len, max(self.trained_len // 2, 1)
        found = {f"up to {m:,}": (0, m)}
        for times in (2, 4):
            if times * m < self.max_len:
                found[f"at {times}× ({times * m:,})"] = (times * m - half, times * m)
        found[f"at the end ({self.max_len:,})"] = (self.max_len - half, self.max_len)
        return {**found, "all positions": (0, self.max_len)}

    def curve(self, name: str) -> Curve:
        return next(curve for curve in self.curves if curve.name == name)

    def plotted(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.plotted]

    def _by_unit(self, nll: NDArray[np.float64], low: int, high: int) -> list[float]:
        return [float(nll[unit, low:high].mean()) for unit in self.units]

    def loss(self, curve: Curve, low: int, high: int) -> float:
        """Nats per token over rows low .. high: the mean over texts of each text's mean. NaN where rows were not read."""
        part = curve.nll[:, low:high]
        if not part.size or np.isnan(part).any():
            return math.nan
        return float(np.mean(self._by_unit(curve.nll, low, high)))

    def loss_interval(self, curve: Curve, low: int, high: int) -> Interval | None:
        """Student's interval of `loss` over texts, None where it has none."""
        if math.isnan(self.loss(curve, low, high)):
            return None
        return mean_interval(self._by_unit(curve.nll, low, high), CONFIDENCE)[1]

    def perplexity(self, curve: Curve, low: int, high: int) -> float:
        return math.exp(min(self.loss(curve, low, high), 700.0))

    def bucket_perplexity(self, curve: Curve) -> list[float]:
        return [self.perplexity(curve, low, high) for low, high in self.buckets]

    def holds_to(self, curve: Curve) -> int | None:
        """The length up to which every stretch of half a trained length stays within TOLERANCE of the cut text; 0: none.

        None where the cut text was not read.
        """
        reference = next((c for c in self.curves if c.kind == "cut"), None)
        if reference is None:
            return None
        width = max(self.trained_len // 2, 1)
        for low in range(0, self.max_len, width):
            high = min(low + width, self.max_len)
            if not self.perplexity(curve, low, high) <= TOLERANCE * self.perplexity(reference, low, high):
                return low
        return self.max_len

    def difference(self, a: Curve, b: Curve, low: int, high: int) -> tuple[float, Interval | None]:
        """Mean nats by which `a` exceeds `b` over rows low .. high, and Student's interval of it.

        Paired: both read the same texts, so what texts differ by cancels out.
        """
        apart = a.nll - b.nll
        if math.isnan(self.loss(a, low, high)) or math.isnan(self.loss(b, low, high)):
            return math.nan, None
        return mean_interval(self._by_unit(apart, low, high), CONFIDENCE)

    def to_json(self) -> dict[str, Any]:
        """Every number of the report, rounded to what means something; no date."""
        return {
            "model": self.model_name,
            "texts": [
                {"name": text.name, "tokens": text.tokens, "sha256": text.digest, "windows": list(text.starts)}
                for text in self.texts
            ],
            "kv_cache_dtype": self.kv_cache_dtype,
            "confidence": CONFIDENCE,
            "trained_length": self.trained_len,
            "max_length": self.max_len,
            "target_length": self.target_len,
            "buckets": [list(bucket) for bucket in self.buckets],
            "curves": [self._curve_json(curve) for curve in self.curves],
            "exact": None
            if self.exact is None
            else {
                "of": self.exact.name,
                "sampled_rows": self.exact.rows,
                "points": [[round(p.position), rounded(p.perplexity)] for p in self.exact.points],
                "nats_above_exact": {name: round(value, 5) for name, value in self.exact.difference.items()},
                "standard_error": {name: _finite(value, 5) for name, value in self.exact.error.items()},
            },
        }

    def _curve_json(self, curve: Curve) -> dict[str, Any]:
        return {
            "name": curve.name,
            "rope_scaling": curve.scaling,
            "rope_update": curve.policy,
            "frozen_for": curve.longest,
            "attention_window": curve.context.attention_window,
            "attention_sinks": curve.context.attention_sinks,
            "perplexity": {name: rounded(self.perplexity(curve, *span)) for name, span in self.ranges.items()},
            "perplexity_interval": {
                name: interval_ends(self.loss_interval(curve, *span), math.exp) for name, span in self.ranges.items()
            },
            "nats_above_no_scaling": {name: self._above_json(curve, *span) for name, span in self.ranges.items()},
            "holds_to": self.holds_to(curve),
            "by_bucket": [rounded(value) for value in self.bucket_perplexity(curve)],
        }

    def _above_json(self, curve: Curve, low: int, high: int) -> dict[str, Any] | None:
        plain = next((c for c in self.curves if c.kind == "none"), None)
        if plain is None or plain is curve:
            return None
        mean, interval = self.difference(curve, plain, low, high)
        return None if math.isnan(mean) else {"mean": round(mean, 5), "interval": interval_ends(interval)}


def interval_ends(
    interval: Interval | None, scale: Callable[[float], float] = float, *, digits: int = 5
) -> list[float] | None:
    """[low, high] in significant digits. scale: applied to each, such as `math.exp`."""
    if interval is None:
        return None
    return [float(f"{scale(min(end, 700.0)):.{digits}g}") for end in (interval.low, interval.high)]


def rounded(value: float) -> float | None:
    """Four significant digits; None for NaN."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def _finite(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)
