"""Every picture of `windlass rope`, drawn with matplotlib, which is optional. Knows no model: it draws what it is given."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.errors import LoadError
from windlass.engine.rotary.frequencies import wavelength
from windlass.server.cli.rope.inspection import Inspection
from windlass.server.cli.rope.sweep_results import Curve, ScalingSweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stands for "the colour of the text around": replaced by currentColor when the picture goes into a page.
INK = "#010203"
# Mid-tones that stand out on white and on black alike; every curve also has its own dashes.
COLOURS = {
    "none": "#d1495b",
    "cut": "#8a8a8a",
    "own": "#b0569e",
    "linear": "#d9822b",
    "ntk": "#9c6b4a",
    "yarn": "#2f9e62",
    "dynamic": "#3b82c4",
    "llama3": "#5fae3a",
    "longrope": "#b58b00",
    "dual_chunk": "#8e6bbf",
    "self_extend": "#4f6fd0",
    "rerope": "#c76b2f",
    "log_n": "#c2607f",
    "window": "#2aa6a6",
    "frozen": "#3b82c4",
    "recompute": "#2aa6a6",
    "rotate": "#8e6bbf",
    "other": "#6b7fa3",
}
HIGHEST = 1e100  # matplotlib has no axis for more
DASHES = {"cut": (1, 1.5), "linear": (5, 2), "ntk": (5, 1.5, 1, 1.5), "rotate": (3, 1.2), "recompute": (7, 1.5)}


def require_matplotlib() -> None:
    """Raise LoadError, one line, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LoadError(
            "pictures need matplotlib: run `.venv/bin/pip install -c constraints.txt -e '.[plots]'` in Windlass's folder"
        )


def literal(text: str) -> str:
    """Text that matplotlib draws as it is: between two $ it would read mathematics."""
    return text.replace("$", r"\$")


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG; raises LoadError where the file cannot be written."""
    write_figure(figure, path, "png", dpi=110)


def write_figure(figure: Figure, path: Path, file_format: str, *, dpi: int) -> None:
    """Write a picture on white; raises LoadError where the file cannot be written."""
    data = figure_bytes(figure, file_format, dpi=dpi, facecolor="white")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from None


def figure_bytes(figure: Figure, file_format: str, **options: Any) -> bytes:
    """The figure as "png" or "svg": the same bytes from the same numbers. options: of matplotlib's `savefig`."""
    import matplotlib as mpl

    data = io.BytesIO()
    metadata = {"Software": None} if file_format == "png" else {"Date": None, "Creator": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "windlass"}):
        figure.savefig(data, format=file_format, metadata=metadata, **options)
    return data.getvalue()


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element for a page: transparent, its ink the page's text colour, the same bytes every time."""
    svg = figure_bytes(figure, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Scales with the page: the view box stays, the fixed size goes.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def draw_inspection(result: Inspection) -> Figure:
    """Wavelengths before and after, and how much slower each pair turns; a row of panels per rotary group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.9 * len(result.groups) + 0.4), layout="constrained")
    rows = figure.subplots(len(result.groups), 2, squeeze=False)
    for (left, right), group in zip(rows, result.groups, strict=True):
        pairs = range(len(group.own.inv_freq))
        for label, spec, style in (("model's own", group.own, "o"), (group.rope_type, group.scaled, "s")):
            heights = [_drawn(wavelength(w)) for w in spec.inv_freq]
            colour = COLOURS["cut"] if spec is group.own else COLOURS["frozen"]
            left.plot(pairs, heights, style, label=label, color=colour, markersize=4 if style == "o" else 3)
        left.set_yscale("log")
        left.axhline(group.trained_len, color=COLOURS["none"], linewidth=1, linestyle="--", label="trained length")
        if result.length != group.trained_len:
            left.axhline(result.length, color=COLOURS["yarn"], linewidth=1, linestyle=":", label="this request")
        left.set_ylabel("tokens per turn")
        left.legend(fontsize=8, frameon=False)
        ratio = [_drawn(a / b if b else None) for a, b in zip(group.own.inv_freq, group.scaled.inv_freq, strict=True)]
        right.plot(pairs, ratio, "s-", color=COLOURS["frozen"], markersize=3, linewidth=1)
        right.set_ylabel("turns slower by this factor")
        for axes in (left, right):
            axes.set_xlabel("pair")
            axes.spines[["top", "right"]].set_visible(False)
        left.set_title(f"{group.name}: {group.rope_type} at {result.length:,} tokens", fontsize=10)
        right.set_title(f"attention factor {group.scaled.rotary_scale:.4g}", fontsize=10)
    figure.suptitle(literal(f"Rotary frequencies of {result.model}"), fontsize=11)
    return figure


def _drawn(value: float | None) -> float:
    """Not a number, which leaves a gap, for what matplotlib has no axis for."""
    return math.nan if value is None or value > HIGHEST else value


def draw_sweep(result: ScalingSweep, ink: str = INK) -> Figure:
    """Perplexity by position, one line per plotted curve, a mark at every multiple of the trained length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplots()
    middles = [(low + high) / 2 for low, high in result.buckets]
    seen: dict[str, int] = {}
    for curve in result.plotted():
        kind = curve.policy or curve.kind
        _plot(axes, middles, result.bucket_perplexity(curve), curve, 0.7 ** seen.get(kind, 0))
        seen[kind] = seen.get(kind, 0) + 1
    exact = result.exact
    if exact is not None and exact.points:
        axes.errorbar(
            [point.position for point in exact.points],
            [point.perplexity for point in exact.points],
            yerr=[
                [max(p.perplexity - p.low, 0.0) if p.low == p.low else 0.0 for p in exact.points],
                [max(p.high - p.perplexity, 0.0) if p.high == p.high else 0.0 for p in exact.points],
            ],
            fmt="D",
            color=COLOURS["recompute"],
            markerfacecolor="none",
            elinewidth=0.8,
            label=f"{exact.name}, recompute for the exact length (sampled)",
        )
    multiple = result.trained_len
    while multiple <= result.max_len:
        axes.axvline(multiple, color=ink, linewidth=0.8, alpha=0.35, linestyle=":")
        label = "trained length" if multiple == result.trained_len else f"{multiple // result.trained_len}×"
        axes.annotate(
            label,
            (multiple, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, -8),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=ink,
        )
        multiple *= 2
    axes.set_yscale("log")
    axes.set_xlim(0, result.max_len)
    _ticks(axes)
    axes.set_xlabel("position (tokens read)", color=ink)
    axes.set_ylabel("perplexity (log scale)", color=ink)
    axes.tick_params(colors=ink, which="both")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(ink)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3, labelcolor=ink)
    return figure


def _plot(axes: Axes, middles: list[float], heights: list[float], curve: Curve, shade: float) -> None:
    kind = curve.policy or curve.kind
    # Several of one kind are told apart by their shade.
    style: dict[str, Any] = {"color": COLOURS[str(kind)], "linewidth": 1.6, "label": curve.label, "alpha": shade}
    if kind in DASHES:
        style["dashes"] = DASHES[str(kind)]
    axes.plot(middles, heights, **style)


def _ticks(axes: Axes) -> None:
    """Plain numbers on the logarithmic axis, a few per decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
