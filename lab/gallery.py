"""Gallery: the kinds of pictures, with title, explanation and figure."""

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
from windlass.lab.gallery_figures import (
    TEXT,
    choose_heads,
    draw_angles,
    draw_attention,
    draw_cos_sin,
    draw_decay,
    draw_encodings,
    draw_extrapolation,
    draw_invariance,
    draw_rotation,
    draw_scalings,
    read_learned,
    read_pattern,
)
from windlass.lab.gallery_subject import Subject
from windlass.lab.sweep_texts import Encoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureKind:
    """draw: None for the one that needs more than a subject. explain: short sentences on the picture of a subject."""

    title: str
    explain: Callable[[Subject], str]
    draw: Callable[[Subject], Figure] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What single kinds take. learned: of `encodings`. The others of `attention`; text None: one of its own.

    load_tokenizer: from the model's directory.
    """

    load_tokenizer: Callable[[Path], Encoder]
    model: Path | None = None
    learned: Path | None = None
    layer: int = 0
    heads: tuple[int, ...] = ()
    text: str | None = None
    scaling: RopeScaling | None = None


def _turns_within(subject: Subject, tokens: int) -> int:
    """Pairs that make a whole turn within so many tokens, unscaled."""
    return int((subject.frequencies(subject.compared[0][1]) * tokens >= 2 * math.pi).sum())


def _slowest(subject: Subject) -> float:
    return float(subject.frequencies(subject.compared[0][1])[-1])


def _rotation(subject: Subject) -> str:
    return (
        f"A head's {2 * subject.pairs} numbers are taken as {subject.pairs} pairs, and each pair as an arrow in a plane. "
        "The token at position p has its arrow turned by p times the pair's frequency. So position 0 is not turned at all. "
        "The first pair turns fast and is the same again after a few tokens. The last ones hardly move. "
        "Together they are like the hands of a clock. "
        "Turning changes no arrow's length, so a position never makes a token louder."
    )


def _angles(subject: Subject) -> str:
    return (
        f"Pair j turns by θ^(-2j/d) radians a token, here with θ = {subject.base.rope_theta:,.0f} and d = {2 * subject.pairs}. "
        "On a plain scale only the first pairs seem to move. The picture is mostly drawn that way. "
        "On a logarithmic scale all pairs lie on straight lines: each is slower than the one before by the same factor. "
        f"At position 1 the first pair has turned by one radian and the last by {_slowest(subject):.3g}."
    )


def _cos_sin(subject: Subject) -> str:
    return (
        "These two tables are all that a rotation needs: a pair (x, y) becomes (x cos − y sin, x sin + y cos). "
        "At the left fast pairs flicker from row to row. At the right slow pairs hardly change over the whole picture. "
        "A row is a position, and no two rows are equal. "
        "Windlass forms the rows of each step anew from float64 angles, so no table has to be as long as the context."
    )


def _invariance(subject: Subject) -> str:
    return (
        "The product of a turned query and a turned key depends only on the difference of their angles, so on their distance. "
        "The left matrix shows one query and one key at all pairs of places. It is constant along every diagonal. "
        "This is why a key can be turned once and then cached. "
        "In floating point it holds only as well as the angles do. "
        "At the right the same two vectors, 5 tokens apart, move on together. "
        f"Angles rounded to float32 lose digits as positions grow to {subject.length:,}. "
        "Tables rounded to bfloat16 are off from the beginning. float64 angles keep the score."
    )


def _encodings(subject: Subject) -> str:
    return (
        "Above is what a model has, below what that makes of two places. "
        "Sinusoids and learned rows are added to a token's vector, so places mix with meanings. "
        "Learned rows end with the table, and rows next to each other are alike only as far as training made them so. "
        "T5 and ALiBi add a number to each score instead, by distance. "
        "T5 learns one for each bucket of distances, ALiBi takes a slope for each head. "
        "RoPE multiplies: it turns queries and keys, adds nothing, learns nothing, and has a score for every distance."
    )


def _decay(subject: Subject) -> str:
    frequencies = subject.frequencies()
    far = np.arange(subject.length // 2, subject.length, max(subject.length // 4000, 1), dtype=float)
    swing = float(np.abs(mean_cosine(far, frequencies)).max())
    least = float(decay_bound(np.unique(np.geomspace(1, subject.length, 4000).round()), frequencies).min())
    return (
        "RoFormer proves a bound on scores that falls with distance. It is mostly drawn from 1 on, as the dashed line is. "
        "That is only its shape. For equal vectors of ones the bound itself begins at "
        f"{(subject.pairs + 1) / 2:.1f} times the largest score and never falls below {least:.1f} times. So it forbids nothing. "
        "Scores of real vectors swing, and two near tokens may score lower than two far ones. "
        f"Even the score of equal ones does not die away: between {subject.length // 2:,} and {subject.length:,} tokens "
        f"it still reaches {swing:.2f} of its largest size. So distance alone hides nothing."
    )


def _scalings(subject: Subject) -> str:
    done, base = _turns_within(subject, subject.base.trained_len), subject.base
    slowest = 2 * math.pi / _slowest(subject)
    return (
        f"{done} of {subject.pairs} pairs turn at least once within the {base.trained_len:,} trained tokens. "
        f"The slowest needs {slowest:,.0f} for one turn, and at {subject.length:,} reaches angles that training never showed. "
        f"Position interpolation (PI) slows all pairs by {subject.stretch:.1f}. "
        f"So near tokens seem {subject.stretch:.1f} times as near. At the right its score stays high for longer. "
        "NTK-aware scaling raises θ, which leaves the first pair alone and slows the last as much as PI does. "
        "YaRN and Llama 3 leave every fast pair as it was, slow the slow ones as PI does, and blend between. "
        "LongRoPE's divisors are searched for each model, so the even ones here only stand for them."
    )


def _extrapolation(subject: Subject) -> str:
    done = _turns_within(subject, subject.base.trained_len)
    largest = subject.base.trained_len * _slowest(subject)
    return (
        f"Within {subject.base.trained_len:,} tokens the first {done} pairs pass every angle of the circle, so "
        "nothing new can come to them. "
        f"The other {subject.pairs - done} know only a part of it, the slowest only up to {largest:.2f} radians. "
        f"A text of {subject.length:,} tokens turns that one to {subject.length * _slowest(subject):.1f}. "
        "The model was never trained on such angles, and perplexity breaks down. "
        "At the right, PI keeps every pair at angles it knows. So do YaRN and Llama 3 for the pairs that need it. "
        "NTK-aware scaling does so only for the slowest pair, and the pairs before it still go too far. "
        "So its factor is mostly taken larger than the length asks for."
    )


def _attention(subject: Subject) -> str:
    return (
        "Each row is a token, and shows how it shares its attention among itself and the tokens before it. "
        "Colours go by the square root, so that small weights can be seen. "
        "The heads were picked by how far back they look on average, from the nearest to the farthest. "
        "Columns are tokens that many others look at, mostly the first: attention that is not needed goes there. "
        "Spots on short diagonals are what stood in the same place of the sentence before. "
        "At the right is the mean weight by distance, which no formula gives. Its peaks lie where the text repeats itself."
    )


KINDS: dict[str, PictureKind] = {
    "rotation": PictureKind(title="Arrows that turn", explain=_rotation, draw=draw_rotation),
    "angles": PictureKind(title="Angle by pair", explain=_angles, draw=draw_angles),
    "cos-sin": PictureKind(title="The tables of cos and sin", explain=_cos_sin, draw=draw_cos_sin),
    "invariance": PictureKind(title="Only the distance counts", explain=_invariance, draw=draw_invariance),
    "encodings": PictureKind(
        title="Beside other encodings", explain=_encodings, draw=lambda subject: draw_encodings(subject, None)
    ),
    "decay": PictureKind(title="Scores by distance", explain=_decay, draw=draw_decay),
    "extrapolation": PictureKind(title="Beyond the trained length", explain=_extrapolation, draw=draw_extrapolation),
    "scalings": PictureKind(title="What each scaling does", explain=_scalings, draw=draw_scalings),
    "attention": PictureKind(title="What a real layer attends to", explain=_attention, draw=None),
}


def draw(kind: str, subject: Subject, extras: Extras) -> Figure:
    """One picture of `KINDS`; raises LoadError and RequestError, one line."""
    if kind == "encodings" and extras.learned is not None:
        return draw_encodings(subject, read_learned(extras.learned))
    token_sampler = KINDS[kind].draw
    return token_sampler(subject) if token_sampler is not None else _draw_attention(subject, extras)


def _draw_attention(subject: Subject, extras: Extras) -> Figure:
    if extras.model is None:
        raise LoadError("the picture of attention needs a model: give --model")
    text = extras.text or TEXT
    tokens, weights = read_pattern(extras.model, text, extras.layer, extras.scaling, extras.load_tokenizer)
    heads = list(dict.fromkeys(extras.heads)) or choose_heads(weights, 3)
    if len(heads) > 5 or not all(0 <= head < len(weights) for head in heads):
        raise LoadError(f"--head: up to 5 of the heads 0 to {len(weights) - 1} of this layer")
    return draw_attention(subject.name, extras.layer, tokens, weights, heads)
