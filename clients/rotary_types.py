"""What answers ran under, and what a server tells of rotary scalings: frozen dataclasses, as those of `types`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryChosen:
    """What `auto` chose a scaling by. length: tokens it was chosen for, None where it follows the text as that grows.

    up_to: tokens for which the choice is the same, None for any longer text. profile: that of the operator's ladder.
    """

    length: int | None = None
    up_to: int | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryGroup:
    """The rotary scaling of one group of layers. fingerprint: equal for equal frequencies and factors of the group."""

    rope_type: str
    parameters: dict[str, Any] = field(default_factory=dict)
    effective_length: float | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """What became of an answer's context; None where it does not apply.

    window: tokens that were held at most where the oldest are dropped; kept_tokens: leading ones that stayed; dropped_tokens
    in so many shifts. attention_window, attention_sinks: what each token saw. dropped_turns: oldest turns left out of the
    chat. reused_tokens, reused_passages: taken from passages that stood elsewhere.
    """

    window: int | None = None
    kept_tokens: int | None = None
    dropped_tokens: int | None = None
    shifts: int | None = None
    attention_window: int | None = None
    attention_sinks: int | None = None
    dropped_turns: int | None = None
    reused_tokens: int | None = None
    reused_passages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary scaling an answer ran under. parameters: its fields, theta included.

    policy: frozen, recompute or rotate. effective_length: tokens the frequencies were formed for, None for kinds that
    do not depend on length. fingerprint: equal for equal frequencies and factors. moves: how often the cached
    keys were re-rotated. groups: the same for each group of layers, where a model has several. context: where
    anything may be dropped. auto: where the scaling was chosen by length.
    """

    rope_type: str
    parameters: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    effective_length: float | None = None
    fingerprint: str | None = None
    moves: int = 0
    groups: dict[str, RotaryGroup] | None = None
    context: ContextUse | None = None
    auto: RotaryChosen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySettings:
    """What /v1/rotary tells. profiles: scalings a request may name. policy: what requests may set: allow, profiles, off.

    rope_update: of requests that set none; None: each kind's own. rope_exact: whether they may ask for it. auto: what
    `rope_scaling="auto"` chooses from.
    """

    model: dict[str, Any]
    default: dict[str, Any]
    profiles: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    rope_update: str | None = None
    rope_exact: bool | None = None
    max_model_len: int | None = None
    auto: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryInspectionGroup:
    """What a scaling means for one group of layers. inv_freq: radians per token, one per rotated pair.

    wavelengths: tokens per turn, None for a pair that never turns. attention_factor: on cosines and sines.
    effective_length: tokens the frequencies are formed for, None for kinds that do not depend on length. distances: how far
    keys seem, where the kind changes that: chunk_size, local_size, log_n_length.
    """

    rope_type: str
    inv_freq: tuple[float, ...]
    wavelengths: tuple[float | None, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    attention_factor: float = 1.0
    softmax_scale: float = 1.0
    distances: dict[str, int] | None = None
    fingerprint: str | None = None
    effective_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryInspection(RotaryInspectionGroup):
    """What a scaling means for the served model: the main group of layers, and all of them where there are several.

    fingerprint: of all groups together. policy: frozen, recompute or rotate. length: what was asked about, in tokens.
    auto: what the scaling was chosen by, where it was.
    """

    policy: str | None = None
    length: int | None = None
    auto: RotaryChosen | None = None
    groups: dict[str, RotaryInspectionGroup] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryCurves:
    """What the frequencies of one group of layers come to. cos, sin: a row a position, a column a rotated pair.

    slow_pairs: pairs that turn less than once within trained_length tokens. decay_bound: RoFormer's, mean_cosine: the score of
    equal vectors of ones, both by distance and over their values at 0.
    """

    group: str
    rope_type: str
    length: int
    trained_length: int
    rotary_dim: int
    slow_pairs: int
    fingerprint: str | None = None
    positions: tuple[int, ...] = ()
    cos: tuple[tuple[float, ...], ...] = ()
    sin: tuple[tuple[float, ...], ...] = ()
    distances: tuple[int, ...] = ()
    decay_bound: tuple[float, ...] = ()
    mean_cosine: tuple[float, ...] = ()
