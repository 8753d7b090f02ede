"""Pictures of reports: bars per program, curves over context length. Needs matplotlib.

Backgrounds are transparent and every line and letter is a grey or a colour that is legible on white and on near-black.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report import three_digits

if TYPE_CHECKING:
    from harness.contestants import Row
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808080"  # contrast of about 4 to 1 on white and 5 to 1 on black
BOUND = "#d9534f"
COLOURS = {"Windlass": "#2a9d8f", "OpenVINO GenAI": "#5b7fd1", "ik_llama.cpp": "#c98a3b", "llama.cpp": "#b0567f"}
OTHER = "#9b72b0"
_PANELS = ("decode-1", "decode-8", "prompt-512", "prompt-2048")


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    return figure


def style(axes: Axes) -> None:
    """Transparent, grey ink, no box."""
    axes.patch.set_alpha(0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)
    axes.grid(color=INK, alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)


def draw_programs(report: dict[str, Any], rows: abc.Mapping[str, Row]) -> Figure:
    """A panel for each row but those of 32 streams and long contexts: a bar per program, whiskers to minimum and maximum."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for result in report["results"]:
        by_row.setdefault(result["row"], []).append(result)
    shown = [name for name in by_row if name in _PANELS] or list(by_row)
    columns = min(2, len(shown))
    figure = new_figure(4.2 * columns, 1.9 * -(-len(shown) // columns) + 0.3)
    grid = figure.subplots(-(-len(shown) // columns), columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for name, axes in zip(shown, grid.flat, strict=False):
        results = by_row[name]
        longest = max(result["max"] for result in results)
        for at, result in enumerate(results):
            median, low, high = result["median"], result["min"], result["max"]
            axes.barh(at, median, height=0.66, color=COLOURS.get(result["program"], OTHER))
            axes.errorbar(median, at, xerr=[[median - low], [high - median]], color=INK, capsize=3, linewidth=1)
            axes.annotate(
                three_digits(median),
                (high, at),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=8,
            )
        axes.set_yticks(range(len(results)), [result["program"] for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)  # the first on top
        axes.set_xlim(0, longest * 1.2)
        axes.set_title(f"{rows[name].title}, tokens/s", fontsize=9)
        style(axes)
        axes.grid(axis="y", visible=False)
    caption = (
        f"{report['model']['file']}  |  {report['machine']['cpu']}, {report['threads']} threads  |  {report['date']}"
    )
    figure.suptitle(caption, color=INK, fontsize=8)
    return figure


def draw_context_cost(report: dict[str, Any]) -> Figure:
    """Milliseconds per token over cached tokens, one colour per cache dtype, dashed the same at the read bandwidth."""
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    colours = dict(zip(report["curves"], [*COLOURS.values(), OTHER], strict=False))
    for name, points in report["curves"].items():
        depth = [point["depth"] for point in points]
        middle = [point["milliseconds"]["median"] for point in points]
        low = [m - p["milliseconds"]["min"] for m, p in zip(middle, points, strict=True)]
        high = [p["milliseconds"]["max"] - m for m, p in zip(middle, points, strict=True)]
        axes.errorbar(
            depth, middle, yerr=[low, high], color=colours[name], marker="o", markersize=3, capsize=2, label=name
        )
        bound = [point["bound_milliseconds"] for point in points]
        axes.plot(
            depth, bound, color=colours[name], linestyle="--", linewidth=1, label=f"bound: bytes / bandwidth, {name}"
        )
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("milliseconds per decoded token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Decode cost over context, {report['model']}", fontsize=9)
    style(axes)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    read = report["rates"]["read_gb_s"]["median"]
    about = f"{report['date']}  |  {report['machine']['cpu']}, {report['threads']} threads  |  read {read:.1f} GB/s"
    figure.suptitle(about, color=INK, fontsize=8)
    return figure


def save(draw: abc.Callable[[], Figure], path: Path) -> None:
    """Raises ImportError without matplotlib."""
    draw().savefig(path, dpi=130)
