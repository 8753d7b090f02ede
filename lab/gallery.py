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
        f"The {2 * subject.pairs} numbers of a head form {subject.pairs} pairs, and each pair is an arrow in a plane. "
        "At position p the arrow is rotated by p times the pair's frequency. So at position 0 it is not rotated. "
        "The first pair rotates fast and repeats after a few tokens. The last pairs hardly move. "
        "Together they are like the hands of a clock. "
        "Rotation does not change the length of an arrow, so no position gives a token more weight."
    )


def _angles(subject: Subject) -> str:
    return (
        f"Pair j rotates by θ^(-2j/d) radians per token, here with θ = {subject.base.rope_theta:,.0f} and "
        f"d = {2 * subject.pairs}. "
        "On a linear scale, which most pictures use, only the first pairs seem to move. "
        "On a logarithmic scale all pairs form straight lines: each pair is slower than the previous one by the same factor. "
        f"At position 1 the first pair has rotated by one radian and the last by {_slowest(subject):.3g}."
    )


def _cos_sin(subject: Subject) -> str:
    return (
        "A rotation needs only these two tables: a pair (x, y) becomes (x cos − y sin, x sin + y cos). "
        "On the left, fast pairs change from row to row. On the right, slow pairs hardly change over the entire picture. "
        "Each row is a position, and no two rows are equal. "
        "Windlass computes the rows of each step from float64 angles, so no table has to be as long as the context."
    )


def _invariance(subject: Subject) -> str:
    return (
        "The product of a rotated query and a rotated key depends only on the difference of their angles, so on their distance. "
        "The left matrix shows one query and one key at all pairs of positions. It is constant along every diagonal. "
        "This is why a key can be rotated once and then cached. "
        "In floating point this holds only as precisely as the angles are. "
        "On the right the same two vectors, 5 tokens apart, move together to higher positions. "
        f"Angles rounded to float32 lose digits as positions grow to {subject.length:,}. "
        "Tables rounded to bfloat16 are inexact from the beginning. With float64 angles the score does not change."
    )


def _encodings(subject: Subject) -> str:
    return (
        "The upper row shows the data of a model, the lower row its effect on two positions. "
        "Sinusoids and learned rows are added to a token's vector, which mixes positions with meanings. "
        "Learned rows end with the table, and neighbouring rows are similar only as far as training made them so. "
        "T5 and ALiBi instead add a number to each score, by distance. "
        "T5 learns one per bucket of distances, ALiBi uses a slope per head. "
        "RoPE multiplies: it rotates queries and keys, adds nothing, learns nothing, and defines a score for every distance."
    )


def _decay(subject: Subject) -> str:
    frequencies = subject.frequencies()
    far = np.arange(subject.length // 2, subject.length, max(subject.length // 4000, 1), dtype=float)
    swing = float(np.abs(mean_cosine(far, frequencies)).max())
    least = float(decay_bound(np.unique(np.geomspace(1, subject.length, 4000).round()), frequencies).min())
    return (
        "RoFormer proves a bound on scores that falls with distance. It is usually plotted from 1 on, like the dashed line. "
        "That is only its shape. For equal vectors of ones the bound itself starts at "
        f"{(subject.pairs + 1) / 2:.1f} times the largest score and never falls below {least:.1f} times. So it excludes nothing. "
        "Scores of real vectors oscillate, and two near tokens may score lower than two distant ones. "
        f"Even the score of equal ones does not vanish: between {subject.length // 2:,} and {subject.length:,} tokens "
        f"it still reaches {swing:.2f} of its maximum. So distance alone hides nothing."
    )


def _scalings(subject: Subject) -> str:
    done, base = _turns_within(subject, subject.base.trained_len), subject.base
    slowest = 2 * math.pi / _slowest(subject)
    return (
        f"{done} of {subject.pairs} pairs complete at least one turn within the {base.trained_len:,} trained tokens. "
        f"The slowest needs {slowest:,.0f} for one turn, and at {subject.length:,} reaches angles that training never showed. "
        f"Position interpolation (PI) slows all pairs by {subject.stretch:.1f}. "
        f"So near tokens appear {subject.stretch:.1f} times as near. On the right its score stays high for longer. "
        "NTK-aware scaling raises θ, which does not change the first pair and slows the last as much as PI does. "
        "YaRN and Llama 3 do not change the fast pairs, slow the slow ones as PI does, and interpolate between. "
        "LongRoPE's divisors are searched for each model, so evenly rising ones replace them here."
    )


def _extrapolation(subject: Subject) -> str:
    done = _turns_within(subject, subject.base.trained_len)
    largest = subject.base.trained_len * _slowest(subject)
    return (
        f"Within {subject.base.trained_len:,} tokens the first {done} pairs pass through every angle of the circle, so "
        "no angle is new to them. "
        f"The other {subject.pairs - done} cover only a part of it, the slowest only up to {largest:.2f} radians. "
        f"A text of {subject.length:,} tokens rotates that one to {subject.length * _slowest(subject):.1f}. "
        "The model was never trained on such angles, and perplexity rises steeply. "
        "On the right, PI limits every pair to trained angles. So do YaRN and Llama 3 for the pairs that need it. "
        "NTK-aware scaling does so only for the slowest pair, and the pairs before it still exceed them. "
        "So its factor is usually chosen larger than the length requires."
    )


def _attention(subject: Subject) -> str:
    return (
        "Each row is a token, and shows how its attention is divided among itself and earlier tokens. "
        "Colours show the square root of the weight, so that small weights are visible. "
        "The heads were selected by their mean distance of attention, from the nearest to the farthest. "
        "Vertical lines are tokens that many others attend to, mostly the first: it absorbs attention that is not needed. "
        "Short diagonals are tokens at the same place of the previous sentence. "
        "The right panel is the mean weight by distance, which no formula gives. Its peaks are where the text repeats itself."
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
