"""Figures as a person reads them: lines of at most 80 columns, with colours on a terminal. Knows no server and no metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.server.cli.top.figures import QUANTILES, Figures

MOST_SCALINGS = 8
_NAME = 24  # columns of a scaling's name
_BAR = 20
_GOOD = "ready"


def rows(figures: Figures) -> list[tuple[str, str]]:
    """The figures as labelled lines, all but the scalings."""
    found = [
        ("engine", f"{figures.state}{_engine(figures)}"),
        (
            "requests",
            f"{_count(figures.running)} running, {_count(figures.waiting)} waiting; "
            f"{_rate(figures.finished_rate)}/s answered, {_rate(figures.failed_rate)}/s failed",
        ),
        ("tokens/s", f"{_rate(figures.prompt_rate)} in, {_rate(figures.generated_rate)} out"),
        ("cache", _cache(figures)),
        ("prefix hits", "-" if figures.prefix_hits is None else f"{figures.prefix_hits:.0%} of prompt tokens"),
    ]
    for label, latency in (
        ("first token", figures.first_token),
        ("next token", figures.between_tokens),
        ("loop lag", figures.loop_lag),
    ):
        found.append((label, _latency(latency)))
    return found


def plain(figures: Figures, url: str) -> str:
    """All of them as text, for files and pipes."""
    lines = [f"{url}, the last {figures.seconds:.1f} s"]
    lines += [f"  {label:<12} {text}" for label, text in rows(figures)]
    for scaling in figures.scalings:
        lines.append(
            f"  scaling {scaling.name}: {_count(scaling.running)} running, {_rate(scaling.prompt_rate)} tokens/s in, "
            f"{_rate(scaling.generated_rate)} out"
        )
    return "\n".join(lines)


def screen(figures: Figures | None, url: str, trouble: str = "") -> RenderableType:
    """What a terminal shows. figures: None before there are any. trouble: why there are no newer ones."""
    head = Text(f"windlass top  {url}", style="bold", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head]
    if trouble:
        parts.append(Text(trouble, style="bold red", no_wrap=True, overflow="ellipsis"))
    if figures is None:
        parts.append(Text("" if trouble else "asking ..."))
    else:
        parts += [_table(figures), *_scalings(figures)]
    parts.append(Text("q leaves", style="dim"))
    return Group(*parts)


def _table(figures: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, text in rows(figures):
        style = ("green" if figures.state == _GOOD else "bold red") if label == "engine" else ""
        table.add_row(label, Text(text, style=style))
        if label == "cache" and figures.cache_usage is not None:
            filled = round(max(0.0, min(1.0, figures.cache_usage)) * _BAR)
            table.add_row("", Text("#" * filled + "." * (_BAR - filled)))
    return table


def _scalings(figures: Figures) -> Sequence[RenderableType]:
    if not figures.scalings:
        return ()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("scaling", no_wrap=True, overflow="ellipsis", max_width=_NAME)
    for name in ("running", "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    busiest = sorted(figures.scalings, key=lambda each: (-each.running, -each.generated_rate, each.name))
    for scaling in busiest[:MOST_SCALINGS]:
        table.add_row(scaling.name, _count(scaling.running), _rate(scaling.prompt_rate), _rate(scaling.generated_rate))
    more = len(busiest) - MOST_SCALINGS
    return (Text(""), table, Text(f"and {more} more" if more > 0 else "", style="dim"))


def _engine(figures: Figures) -> str:
    told = []
    if figures.restarts:
        told.append(f"{_count(figures.restarts)} restart{'s' if figures.restarts > 1 else ''}")
    if figures.preempted:
        told.append(f"{_count(figures.preempted)} preempted")
    return "".join(f", {text}" for text in told)


def _cache(figures: Figures) -> str:
    if figures.cache_usage is None:
        return "-"
    if not figures.blocks or figures.blocks_used is None:
        return f"{figures.cache_usage:.0%} in use"
    blocks = f"{_count(figures.blocks_used)} of {_count(figures.blocks)} blocks in use"
    return f"{blocks}, {figures.cache_usage:.0%} of the fullest kind"


def _latency(values: tuple[float, ...] | None) -> str:
    if values is None:
        return "-"
    return ", ".join(f"p{share * 100:.0f} {_seconds(value)}" for share, value in zip(QUANTILES, values, strict=True))


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _count(value: float | None) -> str:
    """12,345 as it is, 98,765,432 as 98.8M: a line has a bound."""
    if value is None:
        return "-"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return f"{value:,.1f}" if value is not None and value < 100 else _count(value)
