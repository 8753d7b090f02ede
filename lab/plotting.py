"""Matplotlib helpers shared by all pictures: palette, axes, and reproducible PNG and SVG output.

Matplotlib is optional and imported inside the functions. Colours are Okabe and Ito's palette.
"""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.errors import LoadError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Placeholder for the colour of the surrounding text: replaced by currentColor when the picture is embedded in a page.
INK = "#010203"

HIGHEST = 1e100  # largest value that matplotlib can plot on an axis


def require_matplotlib() -> None:
    """Raise LoadError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LoadError(
            "pictures need matplotlib: run `.venv/bin/pip install -c constraints.txt -e '.[plots]'` in Windlass's folder"
        )


def literal(text: str) -> str:
    """Escape $, between which matplotlib would parse mathematics."""
    return text.replace("$", r"\$")


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises LoadError if the file cannot be written."""
    write_figure(figure, path, "png", dpi=110)


def write_figure(figure: Figure, path: Path, file_format: str, *, dpi: int) -> None:
    """Write a picture on white. Raises LoadError if the file cannot be written."""
    data = figure_bytes(figure, file_format, dpi=dpi, facecolor="white")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from None


def figure_bytes(figure: Figure, file_format: str, **options: Any) -> bytes:
    """The figure as "png" or "svg", reproducible byte for byte. options: of matplotlib's `savefig`."""
    import matplotlib as mpl

    data = io.BytesIO()
    metadata = {"Software": None} if file_format == "png" else {"Date": None, "Creator": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "windlass"}):
        figure.savefig(data, format=file_format, metadata=metadata, **options)
    return data.getvalue()


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element for a page: transparent, with the page's text colour, reproducible byte for byte."""
    svg = figure_bytes(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Without the fixed size it scales with the page; the view box remains.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


# Okabe and Ito's palette, black first. Each colour has its own dashes, so that they differ in a grey print too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1), (9, 2), (1, 1))

TRAINED = "#009E73"

BEYOND = "#D55E00"


def new_figure(size: tuple[float, float], title: str = "", *, fontsize: int = 12) -> Figure:
    """A figure of `size` inches. matplotlib is imported here."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(literal(title), fontsize=fontsize)
    return figure


def style_axes(axes: Axes, *, x: str = "", y: str = "", title: str = "", ink: str | None = None) -> None:
    """Set labels and title; hide the frame at the top and at the right. ink: colour of all that remains, None: black."""
    colour: dict[str, Any] = {} if ink is None else {"color": ink}
    axes.set_xlabel(x, **colour)
    axes.set_ylabel(y, **colour)
    axes.set_title(title, fontsize=10, **colour)
    axes.spines[["top", "right"]].set_visible(False)
    if ink is not None:
        axes.tick_params(colors=ink, which="both")
        axes.spines[["left", "bottom"]].set_color(ink)


def mark_position(axes: Axes, position: float, label: str, colour: str, **line: Any) -> None:
    """A vertical line with a label at its upper end. line: style of matplotlib's `axvline`."""
    axes.axvline(position, color=colour, **line)
    axes.annotate(
        label,
        (position, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3, -8),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=colour,
    )


def thousands(axes: Axes, which: str = "x") -> None:
    from matplotlib.ticker import FuncFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if 1 <= value < 1e12 else f"{value:g}"))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a .png or .svg file, by its suffix. Raises LoadError if it cannot be written."""
    write_figure(figure, path, check_suffix(path), dpi=100)


def check_suffix(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise LoadError(f"--out {path}: pictures are .png or .svg")
    return kind
