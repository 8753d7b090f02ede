"""Results of a perplexity sweep, and the recommended scaling.

All figures are derived from the loss of every row of every window, so ranges of any width are exact. Recommended is the lowest
mean loss over all positions of a context of the target length; among scalings within one per cent of it, the cheapest for the
server. A window is never recommended, because perplexity hardly depends on what it hides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.clients.loadtest.intervals import Interval, mean_interval
from windlass.lab.candidates import SweepCandidate, serve_command
from windlass.lab.sweep_texts import SweptText

CONFIDENCE = 0.95

# A scaling "holds" up to the length where its perplexity exceeds that of the cut text by this factor.
TOLERANCE = 1.25

_MAX_BUCKETS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(SweepCandidate):
    """A measured candidate. longest: the length that `frozen` was planned for, None under other policies.

    nll: negative log-likelihood of the next token in nats, [windows, rows], NaN for rows that were not read.
    """

    nll: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExactPoint:
    """Recompute for the exact length, at sampled rows around `position`: the grid's perplexity times the measured ratio.

    low, high: the perplexity one standard error of that ratio below and above.
    """

    position: float
    perplexity: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ExactComparison:
    """Loss of each policy above recomputing for the exact length, in nats per token at the same sampled rows.

    difference, error: mean and standard error by policy.
    """

    name: str
    rows: int
    points: tuple[ExactPoint, ...]
    difference: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True)
class ScalingSweep:
    """Results of one sweep. The windows of all texts are concatenated.

    model: the argument of `windlass serve`. kv_cache_dtype: as given, "auto" by default.
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
        """Units of means and intervals, as ranges of windows: texts, or the windows of a single text."""
        if len(self.texts) == 1:
            return [slice(index, index + 1) for index in range(len(self.texts[0].starts))]
        ends = list(accumulate(len(text.starts) for text in self.texts))
        return [slice(end - len(text.starts), end) for end, text in zip(ends, self.texts, strict=True)]

    @property
    def unit_name(self) -> str:
        return "text" if len(self.texts) > 1 else "window"

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """Row ranges [low, high) of a quarter of the trained length, doubled until there are at most _MAX_BUCKETS."""
        width = max(self.trained_len // 4, 1)
        while self.max_len / width > _MAX_BUCKETS:
            width *= 2
        return [(low, min(low + width, self.max_len)) for low in range(0, self.max_len, width)]

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Columns of the table: up to the trained length, half a trained length before each mark, all positions."""
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
        """Nats per token over rows low .. high: the mean of the units' means. NaN if rows were not read."""
        part = curve.nll[:, low:high]
        if not part.size or np.isnan(part).any():
            return math.nan
        return float(np.mean(self._by_unit(curve.nll, low, high)))

    def loss_interval(self, curve: Curve, low: int, high: int) -> Interval | None:
        """Student's t interval of `loss` over units, or None."""
        if math.isnan(self.loss(curve, low, high)):
            return None
        return mean_interval(self._by_unit(curve.nll, low, high), CONFIDENCE)[1]

    def perplexity(self, curve: Curve, low: int, high: int) -> float:
        return math.exp(min(self.loss(curve, low, high), 700.0))

    def bucket_perplexity(self, curve: Curve) -> list[float]:
        return [self.perplexity(curve, low, high) for low, high in self.buckets]

    def holds_to(self, curve: Curve) -> int | None:
        """The length up to which every range of half a trained length is within TOLERANCE of the cut text, at least 0.

        None if the cut text was not read.
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
        """Mean nats by which `a` exceeds `b` over rows low .. high, and its Student's t interval.

        Paired: both read the same texts, so differences between texts cancel out.
        """
        if math.isnan(self.loss(a, low, high)) or math.isnan(self.loss(b, low, high)):
            return math.nan, None
        return mean_interval(self._by_unit(a.nll - b.nll, low, high), CONFIDENCE)

    def to_json(self) -> dict[str, Any]:
        """All figures of the report, rounded to significant digits, without a date."""
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
    """[low, high] with `digits` significant digits. scale: applied to both ends, such as `math.exp`."""
    if interval is None:
        return None
    return [float(f"{scale(min(end, 700.0)):.{digits}g}") for end in (interval.low, interval.high)]


def rounded(value: float) -> float | None:
    """Four significant digits; None for NaN."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def _finite(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


_CLOSE = math.log(1.01)

_FEW = 5  # units, below which the report asks for more

# By cost for a server: nothing to set, one set of frequencies, re-rotated keys, recomputed prompts.
_COST = {None: 0, "frozen": 1, "rotate": 2, "recompute": 3}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """curve: the name of the chosen curve. command: serves it. body: the same for one request, as JSON. reasons: sentences."""

    curve: str
    target_len: int
    command: str
    body: str | None
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "curve": self.curve,
            "target_length": self.target_len,
            "command": self.command,
            "request": self.body,
            "reasons": list(self.reasons),
        }


def recommend(result: ScalingSweep) -> Recommendation:
    """The recommended scaling for contexts of `result.target_len`."""
    target = result.target_len
    usable = [
        c for c in result.curves if c.kind not in ("cut", "window") and (c.policy != "frozen" or c.longest == target)
    ]
    ranked = sorted(usable, key=lambda curve: result.loss(curve, 0, target))
    best = result.loss(ranked[0], 0, target)
    close = [curve for curve in ranked if result.loss(curve, 0, target) <= best + _CLOSE]
    chosen = min(close, key=lambda curve: (curve.kind != "none", _COST[curve.policy], result.loss(curve, 0, target)))
    others = [curve for curve in ranked if curve is not chosen]
    fields = {} if chosen.kind == "none" else chosen.body()
    return Recommendation(
        curve=chosen.name,
        target_len=target,
        command=serve_command(result.model, target, fields),
        body=json.dumps(fields) if "rope_scaling" in fields else None,
        reasons=tuple(_reasons(result, chosen, others)),
    )


def _reasons(result: ScalingSweep, chosen: Curve, others: list[Curve]) -> list[str]:
    target, trained = result.target_len, result.trained_len
    value = result.perplexity(chosen, 0, target)
    none = next(curve for curve in result.curves if curve.kind == "none")
    plain = result.perplexity(none, 0, target)
    without = " without any scaling" if chosen.kind == "none" else f", against {plain:.1f} without scaling"
    reasons = [f"Perplexity over all positions of a context of {target:,} tokens is {value:.1f}{without}."]
    if others:
        mean, interval = result.difference(others[0], chosen, 0, target)
        ratio = math.exp(abs(mean))
        spread = "" if interval is None else f" ± {100 * ratio * (interval.high - interval.low) / 2:.1f}"
        direction = "better" if mean < 0 else "worse"
        note = ", at a higher cost for the server" if mean < 0 else ""
        # A difference that would be shown as 0.0 is neither better nor worse.
        gap = "the same" if ratio - 1 < 0.0005 else f"{100 * (ratio - 1):.1f}{spread} % {direction}"
        reasons.append(f"Next comes {others[0].name}: {gap}{note}.")
        if interval is not None and interval.low < 0 < interval.high:
            reasons.append("This text cannot distinguish the two.")
    count = len(result.units)
    if count < _FEW:
        units = result.unit_name + ("" if count == 1 else "s")
        reasons.append(f"This is based on {count} {units} only: read more before you rely on it (--windows, --text).")
    cut = next((curve for curve in result.curves if curve.kind == "cut"), None)
    if cut is not None:
        reference = result.perplexity(cut, 0, target)
        if value > TOLERANCE * reference:
            reasons.append(
                f"It does not reach {reference:.1f}, the model's perplexity on the same text cut to its trained length: "
                "at this length no scaling here gains more from the text than its last few hundred tokens would. Use it "
                "where a request must be long, and keep other requests short."
            )
        elif value > reference:
            reasons.append(
                f"The same text cut to the trained length gives {reference:.1f}, {100 * (1 - reference / value):.0f} % less: "
                "a longer context costs this model more than it gains."
            )
        else:
            reasons.append(f"The same text cut to the trained length gives {reference:.1f}: a longer context helps.")
    inside, own_inside = result.perplexity(chosen, 0, trained), result.perplexity(none, 0, trained)
    if chosen.kind != "none":
        reasons.append(_inside(chosen, trained, inside, own_inside))
    return reasons


def _inside(chosen: Curve, trained: int, inside: float, plain: float) -> str:
    if chosen.policy == "frozen":
        return (
            f"A request of this length loses {100 * (inside / plain - 1):.0f} % over its first {trained:,} tokens; requests "
            f"that end within {trained:,} run unscaled and lose nothing."
        )
    if chosen.policy is not None:
        return f"Up to {trained:,} tokens it equals the model as trained."
    change = inside / plain - 1
    if change < 0.03:
        return f"Up to {trained:,} tokens it costs almost nothing ({inside:.1f} against {plain:.1f})."
    return (
        f"Up to {trained:,} tokens it costs {100 * change:.0f} % ({inside:.1f} against {plain:.1f}): leave the server's "
        "default unscaled and set the scaling per request where short requests matter."
    )
