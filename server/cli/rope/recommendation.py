"""Which scaling to use for a wanted length, from what a sweep measured, in words and as a command line.

The rule: the lowest mean loss over all positions of a context of that length; among scalings within one per cent of it, the
one that asks least of the server. A window is never chosen: what it does not see, perplexity hardly asks for. Knows no model and
no picture.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any

from windlass.server.cli.rope.sweep_results import TOLERANCE, Curve, ScalingSweep

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
