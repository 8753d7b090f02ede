"""Candidates: the scalings, frequency policies, windows and cuts that are measured.

`SweepCandidate` is a curve of a perplexity sweep, `TaskCandidate` a condition of the retrieval tasks. No model is loaded here.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextRule
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup, resolve
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate

_ScalingKind = Literal[
    "linear", "ntk", "yarn", "dynamic", "llama3", "longrope", "dual_chunk", "self_extend", "rerope", "log_n"
]
Kind = Literal["none", "cut", "own", _ScalingKind, "window", "other"]

_SCALING_KINDS: dict[str, _ScalingKind] = {kind: kind for kind in get_args(_ScalingKind)}  # rope_type -> kind

_DYNAMIC_FACTORS = (1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One condition under which texts are read.

    scaling: the `rope_scaling` object of a request; None is the model's own. context: which tokens a token sees.
    """

    name: str
    kind: Kind
    scaling: dict[str, Any] | None
    policy: RopeUpdate | None = None
    context: ContextRule = field(default_factory=ContextRule)

    @property
    def parsed(self) -> RopeScaling | None:
        return None if self.scaling is None else RopeScaling.from_dict(self.scaling)

    def body(self) -> dict[str, Any]:
        """Fields of a request body."""
        rule = self.context
        fields: dict[str, Any] = {}
        if self.scaling is not None:
            fields["rope_scaling"] = self.scaling
        if self.policy is not None:
            fields["rope_update"] = self.policy
        if rule.attention_window is not None:
            fields |= {"attention_window": rule.attention_window, "attention_sinks": rule.attention_sinks}
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCandidate(Candidate):
    """One curve of a perplexity sweep.

    label: the name in the plot. longest: the length that the frequencies are planned for; None where nothing depends on it.
    """

    label: str
    longest: int | None = None
    plotted: bool = False


_NO_SCALING = SweepCandidate("no scaling", "none", {"rope_type": "default"}, label="no scaling", plotted=True)


def static_candidates(
    *, trained_len: int, config_trained_len: int, max_len: int, target_len: int, own: RopeScaling
) -> list[SweepCandidate]:
    """No scaling, the model's own, and linear, NTK-aware and YaRN at several factors: one pass each.

    Factors: max_len and target_len divided by the trained length, and the powers of two below. If config.json gives a longer
    length than the model was trained on, YaRN gets the trained one.
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
        found.append(SweepCandidate("model's own", "own", None, label=f"model's own ({own.rope_type})", plotted=True))
    original = {} if trained_len == config_trained_len else {"original_max_position_embeddings": trained_len}
    kinds: tuple[tuple[_ScalingKind, str, dict[str, Any]], ...] = (
        ("linear", "PI (linear)", {}),
        ("ntk", "NTK-aware (ntk)", {}),
        ("yarn", "YaRN (yarn)", original),
    )
    for kind, title, extra in kinds:
        for factor in sorted(factors, reverse=True):
            scaling = {"rope_type": kind, "factor": factor, **extra}
            label = f"{title}, factor {factor:g}"
            found.append(SweepCandidate(f"{kind} {factor:g}", kind, scaling, label=label, plotted=factor == derived))
    return found


def frozen_candidates(*, max_len: int, target_len: int) -> list[SweepCandidate]:
    """Dynamic NTK frozen for the longest and for the target length, at a few factors: one pass each."""
    return [
        _dynamic(factor, "frozen", longest, suffix)
        for factor in _DYNAMIC_FACTORS
        for longest, suffix in _lengths("frozen", max_len, target_len)
    ]


def moving_candidates(factor: float, max_len: int) -> list[SweepCandidate]:
    """Dynamic NTK of one factor under the policies whose frequencies change as the text grows."""
    return [_dynamic(factor, policy, max_len) for policy in ("recompute", "rotate")]


def own_candidates(own: RopeScaling, max_len: int, target_len: int) -> list[SweepCandidate]:
    """The model's own scaling under each policy; empty if it does not depend on the length."""
    if not own.depends_on_length:
        return []
    found = []
    for policy in ROPE_UPDATES:
        for longest, suffix in _lengths(policy, max_len, target_len):
            found.append(
                SweepCandidate(
                    f"model's own, {policy}{suffix}",
                    "own",
                    None,
                    policy,
                    label=f"model's own ({own.rope_type}), {policy}{suffix}",
                    longest=longest,
                    plotted=policy == "recompute",
                )
            )
    return found


def chosen_candidates(
    scalings: Sequence[dict[str, Any]], policies: Sequence[RopeUpdate], max_len: int, target_len: int
) -> list[SweepCandidate]:
    """No scaling, and the requested ones. A scaling that depends on the length is measured under each policy."""
    found = [_NO_SCALING]
    for scaling in scalings:
        parsed = RopeScaling.from_dict(scaling)
        name = _name(scaling)
        kind: Kind = _SCALING_KINDS.get(parsed.rope_type, "other")
        if not parsed.depends_on_length:
            found.append(SweepCandidate(name, kind, scaling, label=name, plotted=True))
            continue
        for policy in policies:
            for longest, suffix in _lengths(policy, max_len, target_len):
                full = f"{name}, {policy}{suffix}"
                found.append(SweepCandidate(full, kind, scaling, policy, label=full, longest=longest, plotted=True))
    return found


def _lengths(policy: RopeUpdate, max_len: int, target_len: int) -> list[tuple[int, str]]:
    """(length, suffix of the name) for which a policy is measured; `frozen` differs for max_len and target_len."""
    if policy != "frozen" or max_len == target_len:
        return [(max_len, "")]
    return [(longest, f" for {longest:,}") for longest in sorted((max_len, target_len), reverse=True)]


def window_name(rule: ContextRule) -> str:
    return f"window {rule.attention_window:,} and {rule.attention_sinks:,} sinks"


def window_sweep_candidate(rule: ContextRule) -> SweepCandidate:
    """Without scaling; each token sees the last tokens and the first ones, the sinks (StreamingLLM, 2309.17453)."""
    name = window_name(rule)
    return SweepCandidate(name, "window", {"rope_type": "default"}, label=name, plotted=True, context=rule)


def _name(scaling: dict[str, Any]) -> str:
    """The kind and its factor; other fields as key=value, lists by their length."""
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


def _dynamic(factor: float, policy: RopeUpdate, longest: int, suffix: str = "") -> SweepCandidate:
    return SweepCandidate(
        f"dynamic {factor:g}, {policy}{suffix}",
        "dynamic",
        {"rope_type": "dynamic", "factor": factor},
        policy,
        label=f"dynamic NTK, factor {factor:g}, {policy}{suffix}",
        longest=longest,
    )


def _factor(ratio: float) -> float:
    return float(f"{ratio:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCandidate(Candidate):
    """One condition under which the documents of a retrieval sweep are read.

    plain_to: the length up to which it equals, bit for bit, the model without scaling. cut_to: the text is cut to its head and
    its last tokens, this many in total; None: it is read entirely. chosen: the user requested it, so a model that cannot run it
    is an error.
    """

    plain_to: int = 0
    cut_to: int | None = None
    chosen: bool = False

    @property
    def cost(self) -> int:
        """Cost for a server, to choose among equals: 0 nothing, 1 a fixed rule, 2 frequencies that change."""
        return 0 if self.kind in ("none", "own", "cut") else 2 if self.policy in ("recompute", "rotate") else 1

    def command(self, model: str | None, length: int) -> str:
        """The command line that serves contexts of `length` under this candidate."""
        return serve_command(model, length if self.cut_to is None else min(length, self.cut_to), self.body())


def serve_command(model: str | None, length: int, fields: dict[str, Any]) -> str:
    """The command line that serves contexts of `length` with these request fields as defaults."""
    words = ["windlass", "serve", *([model] if model else []), "--max-model-len", str(length)]
    options = dict(fields)
    if "attention_sinks" in options:  # an option has both numbers
        options["attention_window"] = f"{options['attention_window']},{options.pop('attention_sinks')}"
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(words)


def task_candidates(group: RotaryGroup, trained: int, longest: int) -> list[TaskCandidate]:
    """One candidate per kind, with the factor that the longest length needs; no scaling and the cut text come first.

    group: the model's main rotary group. trained: its trained length.
    """
    base, own = group.base, group.scaling
    factor = float(f"{max(longest / trained, 2.0):.4g}")
    original: dict[str, Any] = {} if trained == base.trained_len else {"original_max_position_embeddings": trained}
    # The smallest values that bring every distance within the trained length, with the default windows.
    near_group, near_rerope = max(trained // 4, 1), max(trained // 2, 1)
    group_size = max(2, math.ceil((longest - near_group) / (trained - near_group)))
    leak = float(max(2, math.ceil((longest - near_rerope) / (trained - near_rerope))))
    unscaled = _unscaled(own)
    found = [TaskCandidate("no scaling", "none", unscaled)]
    if own.rope_type != "default":
        found.append(TaskCandidate(f"model's own ({own.rope_type})", "own", None))
    found.append(_cut(unscaled, trained))
    found += [
        _scaled(f"linear {factor:g}", "linear", factor=factor),
        _scaled(f"ntk {factor:g}", "ntk", factor=factor),
        # A prompt given at once runs under the frequencies of its own length, whatever the policy.
        replace(_scaled("dynamic 2", "dynamic", factor=2.0), policy="recompute", plain_to=base.trained_len),
        _scaled(f"yarn {factor:g}", "yarn", factor=factor, **original),
        _scaled(f"llama3 {factor:g}", "llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, **original),
    ]
    by_distance = [
        _scaled("dual_chunk", "dual_chunk", **original),
        _scaled(f"self_extend {group_size}", "self_extend", group_size=group_size, **original),
        _scaled("rerope", "rerope", **original),
        _scaled(f"leaky rerope {leak:g}", "rerope", factor=leak, **original),
    ]
    found += [replace(candidate, plain_to=_unchanged_to(candidate, base, longest)) for candidate in by_distance]
    found.append(replace(_scaled("log_n", "log_n", **original), plain_to=trained))
    if base.inv_freq is None:
        found.append(_longrope(base, trained, factor))
    return found


def _scaled(name: str, kind: _ScalingKind, **fields: Any) -> TaskCandidate:
    """fields: of `rope_scaling`, after its `rope_type`."""
    return TaskCandidate(name, kind, {"rope_type": kind, **fields})


def window_candidate(group: RotaryGroup, rule: ContextRule) -> TaskCandidate:
    """As `window_sweep_candidate`, for the retrieval sweep."""
    unscaled, equal_to = _unscaled(group.scaling), rule.attention_window or 0
    return TaskCandidate(window_name(rule), "window", unscaled, context=rule, plain_to=equal_to, chosen=True)


def _unchanged_to(candidate: TaskCandidate, base: RotaryBase, longest: int) -> int:
    """The length up to which a scaling that changes distances does not: a chunk, or the window of near keys."""
    try:
        rule = resolve(candidate.parsed or RopeScaling(), base, longest).distances
    except RequestError:  # a model that cannot run it, which is reported when it is tried
        return 0
    return rule.chunk or rule.near or 0


def _longrope(base: RotaryBase, trained: int, factor: float) -> TaskCandidate:
    ramp = _ramp(base, trained, factor)
    lists = {"short_factor": [1.0] * len(ramp), "long_factor": ramp}
    name = f"longrope, untrained ramp to {factor:g}"
    scaled = _scaled(name, "longrope", **lists, factor=factor, original_max_position_embeddings=trained)
    return replace(scaled, plain_to=trained)


def _ramp(base: RotaryBase, trained: int, factor: float) -> list[float]:
    """Divisors shaped like LongRoPE's: 1 for pairs of 32 or more turns within the trained length, `factor` for those of less
    than one, and a logarithmic ramp between. They were neither searched nor trained."""
    divisors = []
    for frequency in base.unscaled():
        turns = trained * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, 1 - math.log(max(turns, 1e-9)) / math.log(32)))
        divisors.append(round(factor**share, 6))
    return divisors


def _unscaled(own: RopeScaling) -> dict[str, Any] | None:
    """`rope_scaling` of a request without scaling: None for a model that has none of its own."""
    return None if own.rope_type == "default" else {"rope_type": "default"}


def _cut(unscaled: dict[str, Any] | None, trained: int) -> TaskCandidate:
    return TaskCandidate("text cut to the trained length", "cut", unscaled, plain_to=trained, cut_to=trained)


def chosen_task_candidates(
    group: RotaryGroup,
    scalings: Sequence[dict[str, Any]],
    policies: Sequence[RopeUpdate],
    trained: int,
    longest: int,
    *,
    cut: bool,
) -> list[TaskCandidate]:
    """No scaling, the requested ones and, if `cut`, the text cut to the trained length."""
    unscaled = _unscaled(group.scaling)
    _, *asked = chosen_candidates(scalings, policies or ROPE_UPDATES, longest, longest)
    found = [TaskCandidate("no scaling", "none", unscaled)]
    if cut:
        found.append(_cut(unscaled, trained))
    return found + [TaskCandidate(c.name, c.kind, c.scaling, c.policy, chosen=True) for c in asked]
