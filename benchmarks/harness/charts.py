"""Draws reports: bars per measure with their bound, curves over context length. Measures nothing; needs matplotlib.

Backgrounds are transparent and every line and letter is a grey or a colour that is legible on white and on near-black.
"""

from __future__ import annotations

import re
from collections import abc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report import newest_results, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808080"  # contrast of about 4 to 1 on white and 5 to 1 on black
BOUND = "#d9534f"
COLOURS = {"Windlass": "#2a9d8f", "OpenVINO": "#5b7fd1", "llama.cpp": "#c98a3b", "vLLM": "#b0567f"}
OTHER = "#9b72b0"


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


def legend(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)


def caption(run: dict[str, Any]) -> str:
    """Machine, date and what bounds it, on one line."""
    rates = run["rates"]
    return (
        f"{run['date']}  |  {run['machine']['cpu']}, {run['threads']} threads  |  "
        f"read {rates['read_gb_s']['median']:.1f} GB/s, float32 products {rates['fp32_gflop_s']['median']:.0f} Gflop/s"
    )


BAR = 0.3  # inches of a bar and its gap


def draw_bars(report: dict[str, Any]) -> Figure:
    """One panel per measure, as high as it has bars: medians, whiskers to minimum and maximum, red at the memory's bound."""
    pairs = newest_results(report)
    if not pairs:
        raise ValueError("the report holds no results")
    by_measure: dict[str, list[dict[str, Any]]] = {}
    for _, result in pairs:
        by_measure.setdefault(result["measure"], []).append(result)
    # Panels with similar numbers of bars share a row; then they are sorted by name, with numbers in numerical order.
    panels = sorted(by_measure.items(), key=lambda item: (-len(item[1]), _natural(item[0])))
    columns = min(2, len(panels))
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    heights = [0.75 + BAR * max(len(results) for _, results in row) for row in rows]
    figure = new_figure(5.6 * columns, sum(heights) + 0.5)
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for row, all_axes in zip(rows, grid, strict=True):
        most = max(len(results) for _, results in row)
        for axes, (measure, results) in zip(all_axes, row, strict=False):
            _draw_measure(axes, measure, results, most)
        for axes in all_axes[len(row) :]:
            axes.set_visible(False)
    dates = sorted({run["date"] for run, _ in pairs})
    newest = max((run for run, _ in pairs), key=lambda run: run["date"])
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}, rates of the last"
    figure.suptitle(caption(newest | {"date": span}), color=INK, fontsize=9)
    return figure


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d[\d,]*)", name)
    return [(int(part.replace(",", "")), "") if part[:1].isdigit() else (0, part) for part in parts]


def _draw_measure(axes: Axes, measure: str, results: list[dict[str, Any]], rows: int) -> None:
    longest = max(max(result["max"], result.get("bound") or 0) for result in results)
    for row, result in enumerate(results):
        median, low, high = result["median"], result["min"], result["max"]
        bound = result.get("bound")
        axes.barh(row, median, height=0.62, color=COLOURS.get(result["program"], OTHER))
        axes.errorbar(median, row, xerr=[[median - low], [high - median]], color=INK, capsize=3, linewidth=1)
        if bound:
            axes.plot([bound, bound], [row - 0.42, row + 0.42], color=BOUND, linewidth=2)
        axes.annotate(
            three_digits(median),
            (bound if bound and high < bound < high + 0.16 * longest else high, row),  # next to the mark
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=8,
        )
    # A long name takes two lines, or it would reach the edge of the picture.
    axes.set_yticks(range(len(results)), [result["contestant"].replace(", ", ",\n", 1) for result in results])
    axes.set_ylim(rows - 0.4, -0.6)  # the same bar height in every panel, first on top
    axes.set_xlim(0, longest * 1.16 or 1)
    unit = results[0]["unit"]
    bounded = any(result.get("bound") for result in results)
    axes.set_title(f"{measure}, {unit}" + (" (red: what memory allows)" if bounded else ""), fontsize=9)
    style(axes)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(visible=False, axis="y")


def draw_context_cost(report: dict[str, Any]) -> Figure:
    """Milliseconds per token over cached tokens, one colour per cache dtype, dashed the same at the read bandwidth."""
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    colours = dict(
        zip(report["curves"], (COLOURS["Windlass"], COLOURS["OpenVINO"], COLOURS["llama.cpp"], OTHER), strict=False)
    )
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
    axes.set_title(f"Decode cost over context, {report['model']} shape, {report['weights']} weights", fontsize=9)
    style(axes)
    legend(axes)
    figure.suptitle(caption(report), color=INK, fontsize=8)
    return figure


def draw_streams(run: dict[str, Any]) -> Figure:
    """Tokens per second of all streams together over how many there are, a line for each contestant; dashed for Windlass what
    the memory allows."""
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    by_contestant: dict[str, list[dict[str, Any]]] = {}
    for result in run["results"]:
        if result.get("kind") == "decode":
            by_contestant.setdefault(result["contestant"], []).append(result)
    markers = dict.fromkeys(COLOURS, 0)
    for name, results in by_contestant.items():
        points = sorted(results, key=lambda result: result["streams"])
        program = points[0]["program"]
        streams, middle = [p["streams"] for p in points], [p["median"] for p in points]
        whiskers = [[p["median"] - p["min"] for p in points], [p["max"] - p["median"] for p in points]]
        colour, style_of = COLOURS.get(program, OTHER), ("-", "-.", ":", (0, (5, 1)))[markers.get(program, 0) % 4]
        markers[program] = markers.get(program, 0) + 1
        axes.errorbar(
            streams,
            middle,
            yerr=whiskers,
            color=colour,
            linestyle=style_of,
            marker="o",
            markersize=3,
            capsize=2,
            label=name,
        )
        bounds = [(p["streams"], p["bound"]) for p in points if program == "Windlass" and p.get("bound")]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), color=BOUND, linestyle="--", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(count) for count in streams])
    axes.set_ylim(0, 1.15 * max(result["max"] for results in by_contestant.values() for result in results))
    axes.set_xlabel("streams")
    axes.set_ylabel("tokens per second, all streams")
    axes.set_title("Decoding by streams (red: what memory allows Windlass)", fontsize=9)
    style(axes)
    legend(axes)
    figure.suptitle(caption(run), color=INK, fontsize=8)
    return figure


def save(draw: abc.Callable[[], Figure], path: Path) -> None:
    """Raises ImportError without matplotlib."""
    draw().savefig(path, dpi=130)
