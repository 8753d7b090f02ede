"""The plot of a run over tasks: a panel a task, the share of right choices by length, a line a candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.server.cli.rope.pictures import COLOURS, DASHES, INK
from windlass.server.cli.rope.tasks.kinds import CHOICES, KEY_TOKENS
from windlass.server.cli.rope.tasks.results import TaskSweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_tasks(result: TaskSweep, ink: str = INK) -> Figure:
    """Panels side by side, two to a row; key tokens, where they were asked for, by perplexity."""
    from matplotlib.figure import Figure

    rows = -(-len(result.tasks) // 2)
    figure = Figure(figsize=(10, 3.3 * rows + 1.1), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes in panels[len(result.tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(panels, result.tasks, strict=False):
        _panel(axes, result, task, ink)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=3, labelcolor=ink)
    return figure


def _panel(axes: Axes, result: TaskSweep, task: str, ink: str) -> None:
    places = range(len(result.lengths))  # lengths double, mostly: even steps
    keys = task == KEY_TOKENS
    for number, candidate in enumerate(result.candidates):
        heights = [
            result.key_perplexity(candidate.name, length)
            if keys
            else 100 * result.share(candidate.name, length, task, "chosen").value
            for length in result.lengths
        ]
        style = {"dashes": DASHES[candidate.kind]} if candidate.kind in DASHES else {}
        # Equal heights are told apart by a small step to the side.
        aside = [place + 0.012 * (number - len(result.candidates) / 2) for place in places]
        colour = COLOURS[candidate.kind]
        axes.plot(aside, heights, "o-", color=colour, markersize=3, linewidth=1.3, label=candidate.name, **style)  # type: ignore[arg-type]
    if keys:
        axes.set_yscale("log")
        axes.set_ylabel("perplexity (log scale)", color=ink)
    else:
        axes.axhline(100 / CHOICES, color=ink, linewidth=0.8, alpha=0.35, linestyle=":")
        axes.set_ylim(-3, 103)
        axes.set_ylabel("right answers chosen, %", color=ink)
    axes.set_title(task, fontsize=10, color=ink)
    axes.set_xticks(list(places), [f"{length:,}" for length in result.lengths])
    axes.set_xlabel("tokens", color=ink)
    axes.tick_params(colors=ink, which="both")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(ink)
