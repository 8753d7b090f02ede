"""The commands `report` and `compare`: what is made of load tests that have run. Reads files only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from windlass.clients.terminal.errors import CommandError

if TYPE_CHECKING:
    from windlass.clients.loadtest.compare import Comparison, Line
    from windlass.clients.loadtest.files import Measured, NamedRun

_BETWEEN = "\0"  # between the files of both sides: no file has such a name


def report(
    files: Annotated[list[Path], typer.Argument(metavar="JSON...", help="What `serve --json` wrote: runs or sweeps.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The page to write; it needs no other file.")],
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="What to call a run, once per file in their order. Default: the file's name."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's heading.", show_default=False)] = None,
) -> None:
    """Make one HTML page of one run, of a sweep, or of several runs side by side."""
    from windlass.clients.loadtest.files import unique
    from windlass.clients.loadtest.report import write_html

    if name and len(name) != len(files):
        raise CommandError(
            f"--name was given {len(name)} times for {len(files)} files: give it once per file or not at all"
        )
    names = unique(name or [path.stem for path in files])
    measured = [_named(_read(path), text, alone=len(files) == 1) for path, text in zip(files, names, strict=True)]
    heading = title or (f"Load test: {names[0]}" if len(files) == 1 else "Load tests")
    try:
        write_html(
            measured[0] if len(files) == 1 else [run for each in measured for run in each.runs], html, title=heading
        )
    except OSError as error:
        raise CommandError(f"cannot write {html}: {error.strerror or error}") from None
    print(f"wrote {html}")


def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="A.json... -- B.json...",
            help="The runs to compare with, and behind -- those that may be better or worse. Two files need no --.",
        ),
    ],
    confidence: Annotated[float, typer.Option("--confidence", help="Of every interval, such as 0.95.")] = 0.95,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap: the same gives the same.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")] = False,
) -> None:
    """Say of every measure whether runs B did better or worse than runs A, with the interval of the difference.

    A verdict takes two runs or more of each, taken in turns; three are better. With one run of each the numbers are shown.
    """
    from windlass.clients.loadtest.compare import compare as compare_runs

    if not 0.5 <= confidence < 1:
        raise CommandError("--confidence must be at least 0.5 and below 1")
    sides = _sides(files)
    runs = [[_single(path).result for path in side] for side in sides]
    try:
        result = compare_runs(runs[0], runs[1], confidence=confidence, resamples=resamples, seed=seed)
    except ValueError as error:
        raise CommandError(f"{error}: compare a1.json a2.json a3.json -- b1.json b2.json b3.json") from None
    if as_json:
        print(json.dumps({**result.to_dict(), "files": [list(map(str, side)) for side in sides]}, allow_nan=False))
    else:
        _print(result, sides)


class SidesCommand(TyperCommand):
    """Keeps the first -- among the arguments, which click would take for the end of the options and drop."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            args[args.index("--")] = _BETWEEN
        return super().parse_args(ctx, args)


def _sides(files: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The files of both sides. Raises CommandError."""
    place = files.index(_BETWEEN) if _BETWEEN in files else 1
    first, second = files[:place], [name for name in files[place:] if name != _BETWEEN]
    if not first or not second or (_BETWEEN not in files and len(files) > 2):
        raise CommandError(
            f"{len(files)} files do not say which to compare with which: write A.json B.json, or several runs of each "
            "with -- between, such as a1.json a2.json a3.json -- b1.json b2.json b3.json"
        )
    return [Path(name) for name in first], [Path(name) for name in second]


def _read(path: Path) -> Measured:
    from windlass.clients.loadtest.files import read_file

    try:
        return read_file(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None


def _single(path: Path) -> NamedRun:
    measured = _read(path)
    if measured.sweep:
        raise CommandError(
            f"{path} holds a sweep of {len(measured.runs)} runs: compare single runs, or show the sweep with "
            "the command report"
        )
    return measured.runs[0]


def _named(measured: Measured, name: str, alone: bool) -> Measured:
    """The same under its name on the page. Sweeps beside others have it before their rates and a line of their own."""
    if not measured.sweep:
        return dataclasses.replace(measured, runs=(dataclasses.replace(measured.runs[0], name=name),))
    if alone:
        return measured
    runs = [dataclasses.replace(run, name=f"{name}, {run.name}", series=name) for run in measured.runs]
    return dataclasses.replace(measured, runs=tuple(runs))


def _print(result: Comparison, sides: Sequence[Sequence[Path]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(width=120)
    for letter, side in zip("AB", sides, strict=True):
        console.print(f"{letter}: {escape(', '.join(map(str, side)))}", highlight=False)
    for caution in result.cautions:
        console.print(f"note: {escape(caution)}", style="yellow", highlight=False)
    if result.paired:
        console.print(
            "Both runs sent prompts of the same lengths in the same order: latencies are compared request by request."
        )
    if result.differing:
        console.print("note: the runs differ in these settings:", style="yellow")
    for name, (old, new) in result.differing.items():
        console.print(f"  {escape(name)}: {escape(old)} → {escape(new)}", highlight=False)
    covers = "over runs" if result.intervals_over == "runs" else "within the runs"
    interval = f"B − A, {result.confidence:.0%} {covers}"
    table = Table("measure", "", "A", "B", "change", interval, "B is", box=box.SIMPLE_HEAD)
    for column in table.columns[2:6]:
        column.justify = "right"
    colours = {"better": "green", "worse": "red"}
    previous = ""
    for line in result.lines:
        verdict = f"[{colours[line.verdict]}]{line.verdict}[/]" if line.verdict in colours else line.verdict
        name = f"{line.measure}, {line.unit}" if line.unit else line.measure
        statistic = "" if line.statistic == "per second" else line.statistic
        table.add_row(name if line.measure != previous else "", statistic, *_cells(line), verdict)
        previous = line.measure
    console.print(table)
    if result.intervals_over == "runs":
        console.print(
            f"A and B are means over {result.runs[0]} and {result.runs[1]} runs. About {1 - result.confidence:.0%} of the "
            "measures that do not differ will seem to.",
            highlight=False,
        )
    else:
        console.print(
            "One run of each cannot tell one server from another: the intervals hold chance within these runs, not what "
            "changes from run to run of the same server. Run each three times in turns, with seeds of their own, and give "
            "all files: windlass bench compare a1.json a2.json a3.json -- b1.json b2.json b3.json",
            highlight=False,
        )


def _cells(line: Line) -> list[str]:
    """Both values, the change, and the interval of the difference; the unit stands beside the measure."""
    share = line.statistic == "share"

    def text(value: float | None, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{value:{sign}.2%}" if share else f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"

    change = "" if line.change is None or share else f"{line.change:+.1%}"
    interval = "" if line.interval is None else " to ".join(text(end, "+") for end in line.interval)
    return [text(line.first), text(line.second), change, interval]
