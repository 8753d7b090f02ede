"""Pictures of what becomes of distance: scores by it, scalings, and what lies beyond the trained length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.rotary import curves
from windlass.server.cli.rope.gallery import numbers
from windlass.server.cli.rope.gallery.style import BEYOND, COLOURS, DASHES, TRAINED, new_figure, style_axes, thousands
from windlass.server.cli.rope.gallery.subject import Numbers, Subject
from windlass.server.cli.rope.pictures import HIGHEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_decay(subject: Subject) -> Figure:
    """The bound on a score by distance, and scores."""
    figure = new_figure(f"Scores by distance ({subject.name})", (10, 4.2))
    left, right = figure.subplots(1, 2)
    frequencies = subject.frequencies()
    near = np.arange(0.0, min(513, subject.length))
    rng = np.random.default_rng(7)
    for index in range(6):
        q = rng.standard_normal(2 * subject.pairs)
        k = q + rng.standard_normal(2 * subject.pairs)
        drawn = numbers.scores(q, k, near, frequencies) / (np.linalg.norm(q) * np.linalg.norm(k))
        left.plot(near, drawn, color="#8a8a8a", linewidth=0.7, label="six random alike pairs" if index == 0 else None)
    left.plot(near, curves.mean_cosine(near, frequencies), color=COLOURS[1], label="equal vectors of ones")
    left.plot(
        near,
        _bound_shape(near, frequencies),
        color=COLOURS[2],
        dashes=DASHES[1],
        label="shape of the bound, drawn from 1",
    )
    style_axes(
        left, x="distance in tokens", y="score over its largest", title="near: scores, and the shape of the bound"
    )
    left.axhline(0, color="#999999", linewidth=0.6)
    left.legend(fontsize=8, frameon=False)
    far = _log_places(subject.length)
    right.plot(far, curves.mean_cosine(far, frequencies), color=COLOURS[1], linewidth=0.8)
    right.plot(far, _bound_shape(far, frequencies), color=COLOURS[2], dashes=DASHES[1])
    _trained(right, subject)
    right.set_xscale("log")
    right.axhline(0, color="#999999", linewidth=0.6)
    thousands(right)
    style_axes(right, x="distance in tokens (logarithmic)", title="far: what is left never dies away")
    return figure


def draw_scalings(subject: Subject) -> Figure:
    """Wavelengths by pair, and scores by distance, under each scaling."""
    title = f"{subject.base.trained_len:,} trained, {subject.length:,} wanted: what each scaling does ({subject.name})"
    figure = new_figure(title, (10, 4.8))
    left, right = figure.subplots(1, 2)
    far = _smooth_places(subject.length)
    for index, (label, scaling) in enumerate(subject.compared):
        style = _style(index)
        frequencies = subject.frequencies(scaling)
        turning = frequencies >= 2 * math.pi / HIGHEST
        left.plot(np.arange(subject.pairs)[turning], 2 * math.pi / frequencies[turning], label=label, **style)
        right.plot(far, _smoothed(far, frequencies), **style)
    left.set_yscale("log")
    for length, text, colour in (
        (subject.base.trained_len, "trained length", TRAINED),
        (subject.length, "wanted length", BEYOND),
    ):
        left.axhline(length, color=colour, linewidth=1)
        left.annotate(text, (0, length), xytext=(2, 3), textcoords="offset points", fontsize=8, color=colour)
    thousands(left, "y")
    style_axes(left, x="pair", y="tokens per turn (logarithmic)", title="which pairs turn slower")
    right.set_xscale("log")
    thousands(right)
    _trained(right, subject)
    style_axes(
        right,
        x="distance in tokens (logarithmic)",
        y="score of equal vectors, smoothed",
        title="how far apart tokens seem",
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def draw_extrapolation(subject: Subject) -> Figure:
    """Angles that training has shown against those that a longer text asks for."""
    title = f"Trained on {subject.base.trained_len:,} tokens, read to {subject.length:,} ({subject.name})"
    figure = new_figure(title, (10, 4.8))
    left, right = figure.subplots(1, 2)
    own = subject.frequencies(subject.compared[0][1])
    pairs = np.arange(subject.pairs)
    seen = np.maximum(subject.base.trained_len * own / (2 * math.pi), 1e-9)
    asked = np.maximum(subject.length * own / (2 * math.pi), 1e-9)
    whole = np.ones_like(seen)
    left.fill_between(
        pairs, 1e-9, np.minimum(seen, whole), color=TRAINED, alpha=0.35, linewidth=0, label="angles seen in training"
    )
    new = np.minimum(asked, whole)
    left.fill_between(
        pairs,
        np.minimum(seen, whole),
        new,
        color=BEYOND,
        alpha=0.45,
        linewidth=0,
        hatch="//",
        label="angles never seen",
    )
    left.set_ylim(0, 1)
    left.set_xlim(0, subject.pairs - 1)
    style_axes(left, x="pair", y="part of the circle", title="unscaled: slow pairs reach new angles")
    left.legend(fontsize=9, loc="lower left")
    known = int((seen >= 1).sum())
    for index, (label, scaling) in enumerate(subject.compared):
        reach = subject.length * subject.frequencies(scaling) / (subject.base.trained_len * own)
        right.plot(pairs, reach, label=label, **_style(index))
    right.axhline(1, color=TRAINED, linewidth=1, linestyle=":")
    right.axvspan(0, known - 0.5, color=TRAINED, alpha=0.2, linewidth=0)
    right.annotate("whole circle known:\nany angle will do", (0.03, 0.06), xycoords="axes fraction", fontsize=9)
    right.set_xlim(0, subject.pairs - 1)
    right.set_yscale("log")
    thousands(right, "y")
    style_axes(
        right,
        x="pair",
        y="largest angle over that of training",
        title="scaled: at the right, 1 or less is known ground",
    )
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _style(index: int) -> dict[str, object]:
    style: dict[str, object] = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.6}
    if DASHES[index % len(DASHES)]:
        style["dashes"] = DASHES[index % len(DASHES)]
    return style


def _trained(axes: Axes, subject: Subject) -> None:
    axes.axvline(subject.base.trained_len, color=TRAINED, linewidth=1, linestyle="--")
    axes.annotate(
        "trained length",
        (subject.base.trained_len, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3, -8),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=TRAINED,
    )


def _bound_shape(distances: Numbers, frequencies: Numbers) -> Numbers:
    """The bound over its value at distance 0, as it is mostly drawn."""
    return curves.decay_bound(distances, frequencies) / ((len(frequencies) + 1) / 2)


def _log_places(length: int) -> Numbers:
    return np.unique(np.geomspace(1, length, 1500).round())


def _smooth_places(length: int) -> Numbers:
    return np.geomspace(1, length, 160)


def _smoothed(places: Numbers, frequencies: Numbers) -> Numbers:
    """The mean score around each distance, half an octave wide: single distances swing too much to compare six curves by."""
    near = places[:, None] * 2 ** np.linspace(-0.25, 0.25, 41)[None]
    return np.stack([curves.mean_cosine(around, frequencies).mean() for around in near])
