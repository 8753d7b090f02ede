"""Gallery: pictures that explain rotary embeddings, each with title, explanation and figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.errors import LoadError
from windlass.engine.rotary.curves import decay_bound, mean_cosine
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab import gallery_figures as figures
from windlass.lab.gallery_subject import Subject
from windlass.lab.sweep_texts import Encoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureKind:
    """explain: short sentences about the picture of a subject. draw: None for the attention map, which needs a model."""

    title: str
    explain: Callable[[Subject], str]
    draw: Callable[[Subject], Figure] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Parameters of single kinds. learned: a checkpoint, for `encodings`. The others are for `attention`.

    text None: a default text. load_tokenizer: from the model's directory.
    """

    load_tokenizer: Callable[[Path], Encoder]
    model: Path | None = None
    learned: Path | None = None
    layer: int = 0
    heads: tuple[int, ...] = ()
    text: str | None = None
    scaling: RopeScaling | None = None


def _turns_within(subject: Subject, tokens: int) -> int:
    """Number of pairs that make at least one full turn within `tokens` tokens, unscaled."""
    return int((subject.frequencies(subject.compared[0][1]) * tokens >= 2 * math.pi).sum())


def _slowest(subject: Subject) -> float:
    return float(subject.frequencies(subject.compared[0][1])[-1])


def _rotation(subject: Subject) -> str:
    return (
        f"The {2 * subject.pairs} dimensions of a head form {subject.pairs} pairs, each an arrow in a plane. The first pair "
        "repeats after a few tokens, the last hardly move, like the hands of a clock. Lengths do not change."
    )


def _angles(subject: Subject) -> str:
    return (
        f"Angle by position, with θ = {subject.base.rope_theta:,.0f} and d = {2 * subject.pairs}, on a logarithmic scale. "
        f"At position 1 the first pair has rotated by one radian and the last by {_slowest(subject):.3g}."
    )


def _cos_sin(subject: Subject) -> str:
    return "Fast pairs change from row to row, slow ones hardly at all. Windlass computes only the rows of each step."


def _invariance(subject: Subject) -> str:
    return (
        "Scores of one query and one key at all pairs of positions, and of the same vectors, 5 tokens apart, up to position "
        f"{subject.length:,}: constant with float64 angles, but not with angles in float32 or tables in bfloat16."
    )


def _encodings(subject: Subject) -> str:
    return (
        "Upper row: the data of a model. Lower row: its effect on two positions, constant along diagonals where it depends on "
        "the distance only. T5 learns one number per bucket of distances, ALiBi uses a slope per head. RoPE learns nothing."
    )


def _decay(subject: Subject) -> str:
    frequencies = subject.frequencies()
    far = np.arange(subject.length // 2, subject.length, max(subject.length // 4000, 1), dtype=float)
    swing = float(np.abs(mean_cosine(far, frequencies)).max())
    least = float(decay_bound(np.unique(np.geomspace(1, subject.length, 4000).round()), frequencies).min())
    return (
        f"RoFormer's bound on scores falls with distance, but never below {least:.1f} times the largest score of equal "
        f"vectors, so it excludes nothing. Between {subject.length // 2:,} and {subject.length:,} tokens their score still "
        f"reaches {swing:.2f} of its maximum."
    )


def _scalings(subject: Subject) -> str:
    done, base = _turns_within(subject, subject.base.trained_len), subject.base
    slowest = 2 * math.pi / _slowest(subject)
    return (
        f"{done} of {subject.pairs} pairs complete a turn within the {base.trained_len:,} trained tokens; the slowest needs "
        f"{slowest:,.0f}. Position interpolation (PI) slows all pairs by {subject.stretch:.1f}, NTK-aware scaling only the "
        "last by as much, YaRN and Llama 3 only the slow ones. Evenly rising divisors replace LongRoPE's, which are searched "
        "for each model."
    )


def _extrapolation(subject: Subject) -> str:
    done = _turns_within(subject, subject.base.trained_len)
    largest = subject.base.trained_len * _slowest(subject)
    return (
        f"Within {subject.base.trained_len:,} tokens the first {done} pairs pass through every angle, the slowest only up to "
        f"{largest:.2f} radians. A text of {subject.length:,} tokens rotates it to {subject.length * _slowest(subject):.1f}, an "
        "untrained angle. Right: PI limits every pair to trained angles; YaRN and Llama 3 those that need it; NTK-aware "
        "scaling only the slowest, so its factor is usually chosen larger than the length requires."
    )


def _attention(subject: Subject) -> str:
    return (
        "Square root of the attention of each token (row) to itself and earlier ones, in heads from the shortest to the "
        "longest mean distance, and mean weight by distance. Vertical lines are tokens that many others attend to."
    )


KINDS: dict[str, PictureKind] = {
    "rotation": PictureKind(title="Rotating arrows", explain=_rotation, draw=figures.draw_rotation),
    "angles": PictureKind(title="Angle by pair", explain=_angles, draw=figures.draw_angles),
    "cos-sin": PictureKind(title="Tables of cos and sin", explain=_cos_sin, draw=figures.draw_cos_sin),
    "invariance": PictureKind(
        title="Scores depend on distance only", explain=_invariance, draw=figures.draw_invariance
    ),
    "encodings": PictureKind(
        title="Comparison with other encodings",
        explain=_encodings,
        draw=lambda subject: figures.draw_encodings(subject, None),
    ),
    "decay": PictureKind(title="Scores by distance", explain=_decay, draw=figures.draw_decay),
    "extrapolation": PictureKind(
        title="Beyond the trained length", explain=_extrapolation, draw=figures.draw_extrapolation
    ),
    "scalings": PictureKind(title="Effect of each scaling", explain=_scalings, draw=figures.draw_scalings),
    "attention": PictureKind(title="Attention of a real layer", explain=_attention, draw=None),
}


def draw(kind: str, subject: Subject, extras: Extras) -> Figure:
    """Draw one picture of `KINDS`. Raises LoadError and RequestError."""
    if kind == "encodings" and extras.learned is not None:
        return figures.draw_encodings(subject, figures.read_learned(extras.learned))
    figure_of = KINDS[kind].draw
    return _draw_attention(subject, extras) if figure_of is None else figure_of(subject)


def _draw_attention(subject: Subject, extras: Extras) -> Figure:
    if extras.model is None:
        raise LoadError("the attention picture needs a model: give --model")
    text = extras.text or figures.TEXT
    tokens, weights = figures.read_pattern(extras.model, text, extras.layer, extras.scaling, extras.load_tokenizer)
    heads = list(dict.fromkeys(extras.heads)) or figures.choose_heads(weights, 3)
    if len(heads) > 5 or not all(0 <= head < len(weights) for head in heads):
        raise LoadError(f"--head: up to 5 of the heads 0 to {len(weights) - 1} of this layer")
    return figures.draw_attention(subject.name, extras.layer, tokens, weights, heads)
