"""The picture of five ways to tell a model where a token stands, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.errors import LoadError
from windlass.engine.rotary import curves
from windlass.server.cli.rope.gallery import numbers
from windlass.server.cli.rope.gallery.style import COLOURS, DASHES, new_figure
from windlass.server.cli.rope.gallery.subject import Numbers, Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 48
_TABLES = ("wpe.weight", "transformer.wpe.weight", "model.embed_positions.weight")


def draw_encodings(subject: Subject, learned: Numbers | None) -> Figure:
    """Above what a model has, below what that makes of two places. learned: a table [P, dim]; None: random numbers."""
    figure = new_figure(f"Five ways to say where a token stands ({subject.name})", (11, 5))
    panels = figure.subplots(2, 5)
    rng = np.random.default_rng(3)
    rows, dim = np.arange(float(ROWS)), 2 * subject.pairs
    frequencies = subject.frequencies()
    table = rng.standard_normal((ROWS, dim)) if learned is None else learned[:ROWS]
    sines = numbers.sinusoids(rows, dim)
    biases = rng.standard_normal(32)
    buckets = numbers.t5_buckets(rows)
    slopes = numbers.alibi_slopes(8)

    _map(panels[0, 0], np.cos(curves.angles(rows, frequencies)), "RoPE", "pair", "position")
    _map(panels[0, 1], sines, "sinusoidal", "dimension", "")
    _map(
        panels[0, 2],
        table[:, :ROWS] / np.abs(table).max(),
        "learned" + (" (random here)" if learned is None else ""),
        "dimension",
        "",
    )
    panels[0, 3].step(rows, buckets, color=COLOURS[1], where="mid")
    panels[0, 3].set(xlabel="distance", title="T5 bias: buckets")
    for index, slope in enumerate(slopes[:4]):
        style = {"dashes": DASHES[index]} if DASHES[index] else {}
        panels[0, 4].plot(rows, -slope * rows, color=COLOURS[index], label=f"head {index + 1}", **style)
    panels[0, 4].set(xlabel="distance", title="ALiBi: four of 8 heads")
    panels[0, 4].legend(fontsize=7, frameon=False)

    _map(
        panels[1, 0],
        numbers.relative(ROWS, curves.mean_cosine(rows, frequencies)),
        "equal vectors turned",
        "key",
        "query",
    )
    _map(panels[1, 1], numbers.products(sines), "row · row", "key", "")
    _map(panels[1, 2], numbers.products(table), "row · row", "key", "")
    bias = biases[buckets.astype(int)]
    _map(panels[1, 3], numbers.relative(ROWS, bias / np.abs(bias).max()), "added (random here)", "key", "")
    _map(panels[1, 4], numbers.relative(ROWS, -slopes[1] * rows / (slopes[1] * ROWS)), "added, second head", "key", "")
    for axes in panels.flat:
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
    return figure


def _map(axes: Axes, values: Numbers, title: str, x: str, y: str) -> None:
    axes.imshow(values, cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)


def read_learned(path: Path) -> Numbers:
    """The table of learned positions in a checkpoint such as GPT-2's, float64 [P, dim]. path: a safetensors file, or its
    folder."""
    import safetensors

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            names = set(tensors.keys())
            for name in _TABLES:
                if name in names:
                    table = np.asarray(tensors.get_tensor(name), dtype=np.float64)
                    if table.ndim == 2 and len(table) >= ROWS:
                        return table
    except (OSError, safetensors.SafetensorError, TypeError) as error:
        raise LoadError(f"--learned {path}: cannot be read ({error})") from None
    raise LoadError(f"--learned {path}: has no table of at least {ROWS} learned positions ({', '.join(_TABLES)})")
