"""Which scalings and windows a sweep measures, and from where in a text. Of a model it knows its lengths and its own scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.api.context import ContextRule
from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.sweep_results import Kind

_KINDS: dict[str, Kind] = {
    "linear": "linear",
    "ntk": "ntk",
    "yarn": "yarn",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "longrope": "longrope",
    "dual_chunk": "dual_chunk",
    "self_extend": "self_extend",
    "rerope": "rerope",
    "log_n": "log_n",
}
_DYNAMIC_FACTORS = (1.0, 2.0, 4.0)
POLICIES: tuple[RopeUpdate, ...] = ("frozen", "recompute", "rotate")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One curve to measure; see `sweep_results.Curve` for the fields."""

    name: str
    label: str
    kind: Kind
    scaling: dict[str, Any] | None
    policy: RopeUpdate | None = None
    longest: int | None = None
    plotted: bool = False
    context: ContextRule = field(default_factory=ContextRule)


_NO_SCALING = Candidate("no scaling", "no scaling", "none", {"rope_type": "default"}, plotted=True)


def static_candidates(
    *, trained_len: int, config_trained_len: int, max_len: int, target_len: int, own: RopeScaling
) -> list[Candidate]:
    """No scaling, the model's own, and linear, NTK-aware and YaRN at every factor of interest: one pass each.

    Factors: max_len and target_len over the trained length, and the powers of two below. The model's config may give a
    longer length than it was trained on; then YaRN is told the shorter one.
    """
    derived = _factor(max_len / trained_len)
    factors = {derived, _factor(target_len / trained_len)}
    power = 2.0
    while power < max_len / trained_len:
        factors.add(power)
        power *= 2
    factors.discard(1.0)
    found = [_NO_SCALING]
    if own.rope_type != "default" and not own.depends_on_length:
        found.append(Candidate("model's own", f"model's own ({own.rope_type})", "own", None, plotted=True))
    original = {} if trained_len == config_trained_len else {"original_max_position_embeddings": trained_len}
    kinds: tuple[tuple[Kind, str, str, dict[str, Any]], ...] = (
        ("linear", "linear", "PI (linear)", {}),
        ("ntk", "ntk", "NTK-aware (ntk)", {}),
        ("yarn", "yarn", "YaRN (yarn)", original),
    )
    for kind, rope_type, label, extra in kinds:
        for factor in sorted(factors, reverse=True):
            scaling = {"rope_type": rope_type, "factor": factor, **extra}
            name = f"{rope_type} {factor:g}"
            found.append(Candidate(name, f"{label}, factor {factor:g}", kind, scaling, plotted=factor == derived))
    return found


def frozen_candidates(*, max_len: int, target_len: int) -> list[Candidate]:
    """Dynamic NTK frozen for the longest and for the wanted length, at a few factors: one pass each."""
    return [
        _dynamic(factor, "frozen", longest, suffix)
        for factor in _DYNAMIC_FACTORS
        for longest, suffix in _lengths("frozen", max_len, target_len)
    ]


def moving_candidates(factor: float, max_len: int) -> list[Candidate]:
    """Dynamic NTK of one factor under the policies whose frequencies follow the text."""
    return [_dynamic(factor, policy, max_len) for policy in ("recompute", "rotate")]


def own_candidates(own: RopeScaling, max_len: int, target_len: int) -> list[Candidate]:
    """The model's own scaling under each policy, where it depends on length."""
    if not own.depends_on_length:
        return []
    found = []
    for policy in POLICIES:
        for longest, suffix in _lengths(policy, max_len, target_len):
            name = f"model's own, {policy}{suffix}"
            label = f"model's own ({own.rope_type}), {policy}{suffix}"
            plotted = policy == "recompute"
            found.append(Candidate(name, label, "own", None, policy, longest, plotted))
    return found


def chosen_candidates(
    scalings: Sequence[dict[str, Any]], policies: Sequence[RopeUpdate], max_len: int, target_len: int
) -> list[Candidate]:
    """No scaling, and those a person asked for; one that follows the length, under each of the policies."""
    found = [_NO_SCALING]
    for scaling in scalings:
        parsed = RopeScaling.from_dict(scaling)
        name = _name(scaling)
        kind = _KINDS.get(parsed.rope_type, "other")
        if not parsed.depends_on_length:
            found.append(Candidate(name, name, kind, scaling, plotted=True))
            continue
        for policy in policies:
            for longest, suffix in _lengths(policy, max_len, target_len):
                full = f"{name}, {policy}{suffix}"
                found.append(Candidate(full, full, kind, scaling, policy, longest, plotted=True))
    return found


def _lengths(policy: RopeUpdate, max_len: int, target_len: int) -> list[tuple[int, str]]:
    """The lengths to measure a policy for, and what its name ends with: what is frozen for one length is not for another."""
    if policy != "frozen" or max_len == target_len:
        return [(max_len, "")]
    return [(longest, f" for {longest:,}") for longest in sorted((max_len, target_len), reverse=True)]


def window_name(window: int, sinks: int) -> str:
    return f"window {window:,} and {sinks:,} sinks"


def window_sweep_candidate(window: int, sinks: int) -> Candidate:
    """Each token sees the last `window` tokens and the first `sinks` (StreamingLLM, 2309.17453), unscaled."""
    rule = ContextRule(attention_window=window, attention_sinks=sinks)
    name = window_name(window, sinks)
    return Candidate(name, name, "window", {"rope_type": "default"}, plotted=True, context=rule)


def _name(scaling: dict[str, Any]) -> str:
    """The kind and its factor; other fields as they are spelt, lists by their length."""
    words = [str(scaling.get("rope_type", scaling.get("type")))]
    for key, value in scaling.items():
        if key in ("rope_type", "type"):
            continue
        shown = (
            f"{value:g}" if isinstance(value, float) else f"{len(value)} numbers" if isinstance(value, list) else value
        )
        words.append(str(shown) if key == "factor" else f"{key}={shown}")
    return " ".join(words)


def factor_of(candidate_name: str) -> float:
    """The factor in the name of a dynamic candidate."""
    return float(candidate_name.split()[1].rstrip(","))


def _dynamic(factor: float, policy: RopeUpdate, longest: int, suffix: str = "") -> Candidate:
    return Candidate(
        f"dynamic {factor:g}, {policy}{suffix}",
        f"dynamic NTK, factor {factor:g}, {policy}{suffix}",
        "dynamic",
        {"rope_type": "dynamic", "factor": factor},
        policy,
        longest,
    )


def _factor(ratio: float) -> float:
    return float(f"{ratio:.4g}")


def window_starts(tokens: int, needed: int, windows: int, *, max_len: int, text: str) -> tuple[int, ...]:
    """Starts of up to `windows` stretches of `needed` tokens, spread evenly over the text; they overlap in a short one.

    Raises LoadError where not even one fits.
    """
    slack = tokens - needed
    if slack < 0:
        raise LoadError(
            f"--text {text} has {tokens:,} tokens and --max-len {max_len} needs {needed:,}: give a longer text or a "
            "smaller --max-len"
        )
    count = min(windows, slack + 1)
    return tuple(round(i * slack / max(count - 1, 1)) for i in range(count))


def sample_rows(trained_len: int, max_len: int, samples: int, window: int, windows: int) -> list[int]:
    """Rows past the trained length at which one window is recomputed for the exact length, one per equal stretch.

    Each window takes other rows, so that together they cover every stretch evenly.
    """
    span = (max_len - trained_len) / samples if samples else 0.0
    return sorted({trained_len + int((j + (window + 0.5) / windows) * span) for j in range(samples)})
