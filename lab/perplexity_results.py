"""Results of a perplexity sweep, and the recommended scaling.

Everything is derived from the loss of every row of every window, so ranges of any width are exact. Recommendation: the lowest mean
loss over all positions of a context of the target length; among scalings within one per cent of it, the cheapest for the server.
A window is never recommended, because perplexity hardly depends on what it hides.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.clients.loadtest.intervals import Interval, mean_interval
from windlass.engine.interface.context import ContextRule
from windlass.lab.candidates import Kind
from windlass.lab.sweep_texts import SweptText

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


_CLOSE = math.log(1.01)

_FEW = 5  # windows or texts, below which a sentence says that there should be more

# What asks least comes first: nothing to set, one set of frequencies, keys that are re-rotated, prompts that are computed again.
_COST = {None: 0, "frozen": 1, "rotate": 2, "recompute": 3}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """curve: the name of the chosen one. command: how to serve it. body: the same for one request. reasons: sentences."""

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
    """The scaling to serve contexts of `result.target_len` with."""
    target = result.target_len
    usable = [
        c for c in result.curves if c.kind not in ("cut", "window") and (c.policy != "frozen" or c.longest == target)
    ]
    ranked = sorted(usable, key=lambda curve: result.loss(curve, 0, target))
    best = result.loss(ranked[0], 0, target)
    close = [curve for curve in ranked if result.loss(curve, 0, target) <= best + _CLOSE]
    chosen = min(close, key=lambda curve: (curve.kind != "none", _COST[curve.policy], result.loss(curve, 0, target)))
    others = [curve for curve in ranked if curve is not chosen]
    return Recommendation(
        curve=chosen.name,
        target_len=target,
        command=serve_command(result.model, chosen, target),
        body=_body(chosen),
        reasons=tuple(_reasons(result, chosen, others)),
    )


def serve_command(model: str, curve: Curve, length: int) -> str:
    """The command line that serves contexts of `length` under this curve's scaling."""
    words = ["windlass", "serve", model, "--max-model-len", str(length)]
    if curve.scaling is not None and curve.kind != "none":
        words += ["--rope-scaling", json.dumps(curve.scaling)]
    if curve.policy is not None:
        words += ["--rope-update", curve.policy]
    return shlex.join(words)


def _body(curve: Curve) -> str | None:
    if curve.scaling is None or curve.kind == "none":
        return None
    update = {} if curve.policy is None else {"rope_update": curve.policy}
    return json.dumps({"rope_scaling": curve.scaling, **update})


def _reasons(result: ScalingSweep, chosen: Curve, others: list[Curve]) -> list[str]:
    target, trained = result.target_len, result.trained_len
    value = result.perplexity(chosen, 0, target)
    none = next(curve for curve in result.curves if curve.kind == "none")
    plain = result.perplexity(none, 0, target)
    if chosen.kind == "none":
        reasons = [
            f"Perplexity over all positions of a context of {target:,} tokens is {value:.1f} without any scaling."
        ]
    else:
        reasons = [
            f"Perplexity over all positions of a context of {target:,} tokens is {value:.1f}, "
            f"against {plain:.1f} without scaling."
        ]
    if others:
        mean, interval = result.difference(others[0], chosen, 0, target)
        ratio = math.exp(abs(mean))
        spread = "" if interval is None else f" ± {100 * ratio * (interval.high - interval.low) / 2:.1f}"
        way = "better" if mean < 0 else "worse"
        note = ", and asks more of the server" if mean < 0 else ""
        # Below what the figure shows there is nothing to call better or worse.
        gap = "the same" if ratio - 1 < 0.0005 else f"{100 * (ratio - 1):.1f}{spread} % {way}"
        reasons.append(f"Next comes {others[0].name}: {gap}{note}.")
        if interval is not None and interval.low < 0 < interval.high:
            reasons.append("This text cannot tell these two apart.")
    count = len(result.units)
    if count < _FEW:
        what = ("window" if len(result.texts) == 1 else "text") + ("" if count == 1 else "s")
        reasons.append(
            f"This rests on {count} {what} of text alone: read more before you rely on it (--windows, --text)."
        )
    cut = next((curve for curve in result.curves if curve.kind == "cut"), None)
    if cut is not None:
        reference = result.perplexity(cut, 0, target)
        if value > TOLERANCE * reference:
            reasons.append(
                f"It does not reach {reference:.1f}, which this model gets from the same text cut to its trained length: "
                "so far out no scaling here makes more of the text than its last few hundred tokens would. Use it where "
                "a request must be long, and keep requests short where they can be."
            )
        elif value > reference:
            reasons.append(
                f"The same text cut to the trained length gives {reference:.1f}, {100 * (1 - reference / value):.0f} % less: "
                "what a longer context costs this model is more than what it draws from it."
            )
        else:
            reasons.append(f"The same text cut to the trained length gives {reference:.1f}: reading further gains.")
    inside, own_inside = result.perplexity(chosen, 0, trained), result.perplexity(none, 0, trained)
    if chosen.kind != "none":
        reasons.append(_inside(chosen, trained, inside, own_inside))
    return reasons


def _inside(chosen: Curve, trained: int, inside: float, plain: float) -> str:
    if chosen.policy == "frozen":
        return (
            f"A request this long pays {100 * (inside / plain - 1):.0f} % over its first {trained:,} tokens; requests that "
            f"end within {trained:,} run unscaled and pay nothing."
        )
    if chosen.policy is not None:
        return f"Up to {trained:,} tokens it is the model as trained."
    change = inside / plain - 1
    if change < 0.03:
        return f"Up to {trained:,} tokens it costs next to nothing ({inside:.1f} against {plain:.1f})."
    return (
        f"Up to {trained:,} tokens it costs {100 * change:.0f} % ({inside:.1f} against {plain:.1f}): leave the server's "
        "default unscaled and ask for it per request where short requests matter."
    )
