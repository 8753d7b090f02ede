"""Plots of a scaling inspection, a perplexity sweep and the retrieval tasks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from windlass.engine.rotary.frequencies import wavelength
from windlass.lab.perplexity_results import Curve, ScalingSweep
from windlass.lab.plotting import HIGHEST, INK, mark_position, new_figure, style_axes
from windlass.lab.retrieval_documents import CHOICES, KEY_TOKENS
from windlass.lab.retrieval_results import TaskSweep
from windlass.lab.scaling_inspection import Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Mid-tones, legible on white and on black. Keys are kinds of candidates, and policies.
KIND_COLOURS = {
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

KIND_DASHES = {"cut": (1, 1.5), "linear": (5, 2), "ntk": (5, 1.5, 1, 1.5), "rotate": (3, 1.2), "recompute": (7, 1.5)}


def draw_inspection(result: Inspection) -> Figure:
    """Wavelengths before and after scaling, and the ratio of frequencies; one row of panels per rotary group."""
    size = (10, 3.9 * len(result.groups) + 0.4)
    figure = new_figure(size, f"Rotary frequencies of {result.model}", fontsize=11)
    rows = figure.subplots(len(result.groups), 2, squeeze=False)
    for (left, right), group in zip(rows, result.groups, strict=True):
        pairs = range(len(group.own.inv_freq))
        for label, spec, style in (("model's own", group.own, "o"), (group.rope_type, group.scaled, "s")):
            heights = [_drawn(wavelength(w)) for w in spec.inv_freq]
            colour = KIND_COLOURS["cut"] if spec is group.own else KIND_COLOURS["frozen"]
            left.plot(pairs, heights, style, label=label, color=colour, markersize=4 if style == "o" else 3)
        left.set_yscale("log")
        left.axhline(group.trained_len, color=KIND_COLOURS["none"], linewidth=1, linestyle="--", label="trained length")
        if result.length != group.trained_len:
            left.axhline(result.length, color=KIND_COLOURS["yarn"], linewidth=1, linestyle=":", label="this request")
        left.legend(fontsize=8, frameon=False)
        ratio = [_drawn(a / b if b else None) for a, b in zip(group.own.inv_freq, group.scaled.inv_freq, strict=True)]
        right.plot(pairs, ratio, "s-", color=KIND_COLOURS["frozen"], markersize=3, linewidth=1)
        title = f"{group.name}: {group.rope_type} at {result.length:,} tokens"
        style_axes(left, x="pair", y="tokens per turn", title=title)
        factor = f"attention factor {group.scaled.rotary_scale:.4g}"
        style_axes(right, x="pair", y="turns slower by this factor", title=factor)
    return figure


def _drawn(value: float | None) -> float:
    """NaN, which leaves a gap, for values that matplotlib cannot plot."""
    return math.nan if value is None or value > HIGHEST else value


def draw_sweep(result: ScalingSweep, ink: str = INK) -> Figure:
    """Perplexity by position: one line per plotted curve, and marks at the trained length times powers of two."""
    figure = new_figure((10, 6.2))
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
            color=KIND_COLOURS["recompute"],
            markerfacecolor="none",
            elinewidth=0.8,
            label=f"{exact.name}, recompute for the exact length (sampled)",
        )
    multiple = result.trained_len
    while multiple <= result.max_len:
        label = "trained length" if multiple == result.trained_len else f"{multiple // result.trained_len}×"
        mark_position(axes, multiple, label, ink, linewidth=0.8, alpha=0.35, linestyle=":")
        multiple *= 2
    axes.set_yscale("log")
    axes.set_xlim(0, result.max_len)
    _ticks(axes)
    style_axes(axes, x="position (tokens read)", y="perplexity (log scale)", ink=ink)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3, labelcolor=ink)
    return figure


def _plot(axes: Axes, middles: list[float], heights: list[float], curve: Curve, shade: float) -> None:
    kind = curve.policy or curve.kind
    # Several curves of one kind differ in opacity.
    style: dict[str, Any] = {"color": KIND_COLOURS[str(kind)], "linewidth": 1.6, "label": curve.label, "alpha": shade}
    if kind in KIND_DASHES:
        style["dashes"] = KIND_DASHES[str(kind)]
    axes.plot(middles, heights, **style)


def _ticks(axes: Axes) -> None:
    """Plain numbers on the logarithmic axis, a few per decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_tasks(result: TaskSweep, ink: str = INK) -> Figure:
    """One panel per task, two per row; key tokens by perplexity."""
    rows = -(-len(result.tasks) // 2)
    figure = new_figure((10, 3.3 * rows + 1.1))
    panels = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes in panels[len(result.tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(panels, result.tasks, strict=False):
        _panel(axes, result, task, ink)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=3, labelcolor=ink)
    return figure


def _panel(axes: Axes, result: TaskSweep, task: str, ink: str) -> None:
    places = range(len(result.lengths))  # lengths usually double, so they are spaced evenly
    keys = task == KEY_TOKENS
    for number, candidate in enumerate(result.candidates):
        heights = [
            result.key_perplexity(candidate.name, length)
            if keys
            else 100 * result.share(candidate.name, length, task, "chosen").value
            for length in result.lengths
        ]
        style = {"dashes": KIND_DASHES[candidate.kind]} if candidate.kind in KIND_DASHES else {}
        # A small horizontal offset separates equal values.
        offsets = [place + 0.012 * (number - len(result.candidates) / 2) for place in places]
        colour = KIND_COLOURS[candidate.kind]
        axes.plot(offsets, heights, "o-", color=colour, markersize=3, linewidth=1.3, label=candidate.name, **style)  # type: ignore[arg-type]
    if keys:
        axes.set_yscale("log")
    else:
        axes.axhline(100 / CHOICES, color=ink, linewidth=0.8, alpha=0.35, linestyle=":")
        axes.set_ylim(-3, 103)
    axes.set_xticks(list(places), [f"{length:,}" for length in result.lengths])
    label = "perplexity (log scale)" if keys else "right answers chosen, %"
    style_axes(axes, x="tokens", y=label, title=task, ink=ink)
