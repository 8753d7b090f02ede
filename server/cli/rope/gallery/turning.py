"""Pictures of the rotation itself: arrows, angles, cosines and sines, and that only distances count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.rotary import curves
from windlass.server.cli.rope.gallery import numbers
from windlass.server.cli.rope.gallery.style import COLOURS, new_figure, style_axes, thousands
from windlass.server.cli.rope.gallery.subject import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_POSITIONS = 8
_MIN_LABEL_ANGLE = 0.22  # radians that two labels need between them


def draw_rotation(subject: Subject) -> Figure:
    """One unit vector in four of the planes, at positions 0 to 7."""
    figure = new_figure(f"Each pair of numbers is an arrow that turns with its position ({subject.name})", (10, 3.35))
    frequencies = subject.frequencies()
    chosen = sorted({min(subject.pairs - 1, subject.pairs * step // 16) for step in (0, 2, 4, 8)})
    for axes, pair in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        _arrows(axes, float(frequencies[pair]), pair)
    return figure


def _arrows(axes: Axes, frequency: float, pair: int) -> None:
    from matplotlib import colormaps

    colours = colormaps["viridis"](np.linspace(0.0, 0.85, _POSITIONS))
    axes.add_patch(_circle())
    labels = _labels(frequency)
    for position in range(_POSITIONS):
        x, y = numbers.rotated(np.array([1.0, 0.0]), position, np.array([frequency]))
        axes.annotate(
            "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colours[position], "lw": 1.6, "shrinkB": 0}
        )
        if position in labels:
            text = labels[position]
            axes.text(1.2 * x, 1.2 * y, text, ha="center", va="center", fontsize=9, color=colours[position])
    axes.set_xlim(-1.4, 1.4)
    axes.set_ylim(-1.3, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
    turn = f"a turn in {2 * math.pi / frequency:,.1f} tokens" if frequency else "never turns"
    axes.set_title(f"pair {pair}: {math.degrees(frequency):.3g}° a token,\n{turn}", fontsize=10)


def _labels(frequency: float) -> dict[int, str]:
    """The positions whose labels have room: those of arrows that nearly coincide would hide each other."""
    last = _POSITIONS - 1
    if last * frequency < _MIN_LABEL_ANGLE:
        return {0: f"0–{last}"}
    labelled = [last]
    for position in range(last):
        if all(
            abs(math.remainder((position - other) * frequency, 2 * math.pi)) > _MIN_LABEL_ANGLE for other in labelled
        ):
            labelled.append(position)
    return {position: str(position) for position in labelled}


def _circle() -> Patch:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1.0, fill=False, color="#bbbbbb", linewidth=1)


def draw_angles(subject: Subject) -> Figure:
    """Angle by pair for positions 1 to 7, on a plain scale and on a logarithmic one."""
    from matplotlib import colormaps

    figure = new_figure(f"Angle by pair at positions 1 to 7 ({subject.name})", (10, 4))
    left, right = figure.subplots(1, 2)
    frequencies = subject.frequencies()
    pairs = np.arange(subject.pairs)
    turning = curves.angles(np.arange(1.0, 8.0), frequencies)
    for position, row in enumerate(turning, 1):
        colour = colormaps["viridis"]((position - 1) / 7)
        for axes in (left, right):
            axes.plot(pairs, row, color=colour, linewidth=1.4, label=str(position))
    style_axes(left, x="pair", y="angle in radians", title="the first pairs turn far")
    style_axes(right, x="pair", y="angle in radians (logarithmic)", title="all pairs: straight lines, one step apart")
    right.set_yscale("log")
    for turns in range(1, int(7 / (2 * math.pi)) + 1):
        left.axhline(2 * math.pi * turns, color="#999999", linewidth=0.8, linestyle=":")
        left.annotate("a whole turn", (subject.pairs - 1, 2 * math.pi * turns), ha="right", va="bottom", fontsize=8)
    left.legend(title="position", ncols=2, fontsize=8, frameon=False)
    return figure


def draw_cos_sin(subject: Subject) -> Figure:
    """Heat maps of cos and sin, positions down, pairs across."""
    figure = new_figure(f"cos and sin of every position and pair ({subject.name})", (10, 4.4))
    rows = min(256, subject.length)
    turning = curves.angles(np.arange(float(rows)), subject.frequencies())
    panels = figure.subplots(1, 2, sharey=True)
    for axes, values, name in zip(panels, (np.cos(turning), np.sin(turning)), ("cos", "sin"), strict=True):
        image = axes.imshow(values, cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xlabel("pair (fast at the left, slow at the right)")
        axes.set_title(f"{name}(position × frequency)", fontsize=10)
    panels[0].set_ylabel("position")
    figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.02)
    return figure


def draw_invariance(subject: Subject) -> Figure:
    """Scores of one query and one key at all pairs of places, and how well a distance keeps its score far on."""
    figure = new_figure(f"Only the distance counts ({subject.name})", (10, 4.2))
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 1.35]})
    frequencies = subject.frequencies()
    q, k = np.random.default_rng(5).standard_normal((2, 2 * subject.pairs))
    places = np.arange(48)
    rotated = [np.stack([numbers.rotated(x, float(place), frequencies) for place in places]) for x in (q, k)]
    matrix = rotated[0] @ rotated[1].T / (np.linalg.norm(q) * np.linalg.norm(k))
    largest = float(np.abs(matrix).max())
    image = left.imshow(matrix, cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest")
    left.set(xlabel="place of the key", ylabel="place of the query")
    left.set_title("one query, one key, everywhere:\nequal along every diagonal", fontsize=10)
    figure.colorbar(image, ax=left, fraction=0.046, label="cosine of query and key")
    starts = np.unique(np.geomspace(1, subject.length, 400).round())
    errors = numbers.invariance_errors(q, k, 5, starts, frequencies)
    names = {
        "float64": "float64 angles, as here",
        "float32": "float32 angles",
        "bfloat16": "bfloat16 tables of cos and sin",
    }
    for index, (precision, values) in enumerate(errors.items()):
        style = {"color": COLOURS[index + 1], "linewidth": 1.1}
        right.plot(starts, np.maximum(values, 1e-17), label=names[precision], **style)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_ylim(1e-17, 20)
    thousands(right)
    style_axes(
        right,
        x="place of the key, the query 5 behind it",
        y="change of the score / |q||k|",
        title="the same distance, moved on",
    )
    right.legend(fontsize=8, frameon=False, loc="upper left")
    return figure
