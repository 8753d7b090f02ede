"""How all pictures of the gallery look: colours that colour-blind people tell apart, plain axes, one size of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from windlass.engine.errors import LoadError
from windlass.server.cli.rope.pictures import literal, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, black first; each with dashes of its own, so that a grey print tells them apart too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1), (9, 2), (1, 1))
TRAINED = "#009E73"
BEYOND = "#D55E00"


def new_figure(title: str, size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(literal(title), fontsize=12)
    return figure


def style_axes(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Labels, and no frame above and at the right."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def thousands(axes: Axes, which: str = "x") -> None:
    from matplotlib.ticker import FuncFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if 1 <= value < 1e12 else f"{value:g}"))


def save_figure(figure: Figure, path: Path) -> None:
    """By its suffix: .png or .svg, the same bytes from the same numbers. Raises LoadError where it cannot be written."""
    write_figure(figure, path, check_suffix(path), dpi=100)


def check_suffix(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise LoadError(f"--out {path}: pictures are .png or .svg")
    return kind
