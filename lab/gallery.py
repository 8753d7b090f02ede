"""Gallery: pictures that explain rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.engine.errors import LoadError
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab import gallery_figures as figures
from windlass.lab.gallery_subject import Subject
from windlass.lab.sweep_texts import Encoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# None: the attention map, which needs a model.
KINDS: dict[str, Callable[[Subject], Figure] | None] = {
    "rotation": figures.draw_rotation,
    "angles": figures.draw_angles,
    "cos-sin": figures.draw_cos_sin,
    "invariance": figures.draw_invariance,
    "encodings": lambda subject: figures.draw_encodings(subject, None),
    "decay": figures.draw_decay,
    "extrapolation": figures.draw_extrapolation,
    "scalings": figures.draw_scalings,
    "attention": None,
}


def draw(kind: str, subject: Subject, extras: Extras) -> Figure:
    """Draw one picture of `KINDS`. Raises LoadError and RequestError."""
    if kind == "encodings" and extras.learned is not None:
        return figures.draw_encodings(subject, figures.read_learned(extras.learned))
    figure_of = KINDS[kind]
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
