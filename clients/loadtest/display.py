"""Terminal output of a load test: progress while it runs, and a table of its figures at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clients.loadtest.results import MEASURES, RunResult, SweepResult
from windlass.clients.terminal import print_status, stderr_is_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from windlass.clients.loadtest.compare import Comparison, Line
    from windlass.clients.loadtest.runner import RunProgress

_LINE_SECONDS = 10.0
# Server metrics with a line of their own, by the end of their names, as every server has its own prefix.
_METRICS = (
    ("num_preemptions_total", "preemptions"),
    ("key_moves_total", "keys rotated again"),
    ("context_shifts_total", "context shifts"),
)


class ProgressDisplay:
    """Progress callback of a run: a bar on a terminal, otherwise a line when a phase begins and every ten seconds."""

    def __init__(self, terminal: bool | None = None, name: str = "") -> None:
        self._terminal = stderr_is_terminal() if terminal is None else terminal
        self._name = f"{name}: " if name else ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_at = float("-inf")
        self._phase = ""
        self._chunks = (time.monotonic(), 0)

    def __call__(self, snapshot: RunProgress) -> None:
        now = time.monotonic()
        if self._terminal:
            with contextlib.suppress(OSError):  # losing the terminal must not end the measurement
                self._draw(snapshot, now)
        elif snapshot.phase != self._phase or now - self._last_line_at >= _LINE_SECONDS:
            self._last_line_at = now
            print_status(self._name + _progress_line(snapshot))
        self._phase = snapshot.phase

    def stop(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _draw(self, snapshot: RunProgress, now: float) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            # Refreshed here only, since a refresh thread would disturb the measurement.
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=Console(stderr=True, force_terminal=True),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._progress.add_task("", total=snapshot.total)
            self._progress.start()
        assert self._task is not None
        text = self._name + _progress_line(snapshot)
        if snapshot.chunks is not None:
            since, chunks = self._chunks
            speed = (snapshot.chunks - chunks) / (now - since) if now > since else 0.0
            self._chunks = (now, snapshot.chunks)
            if snapshot.phase == "running":
                text += f", {max(0.0, speed):,.0f} chunks/s"
        self._progress.update(self._task, description=text, completed=snapshot.ended, total=snapshot.total)
        self._progress.refresh()


def _progress_line(snapshot: RunProgress) -> str:
    if snapshot.phase != "running":
        return f"{snapshot.phase} ..."
    total = "" if snapshot.total is None else f"/{snapshot.total}"
    failed = f", {snapshot.failed} failed" if snapshot.failed else ""
    return f"{snapshot.ended}{total} ended, {snapshot.running} running{failed}"


def print_run(run: RunResult, console: Console) -> None:
    """Print the figures of a run and its warnings."""
    from rich.table import Table

    summary = run.summary()
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in _facts(run, summary):
        facts.add_row(name, text)
    console.print(facts)
    figures = Table("ms", *(f"{name}" for name in ("mean", "p50", "p90", "p95", "p99")))
    for column in figures.columns[1:]:
        column.justify = "right"
    titles = {f"{name}_ms": measure.title for name, measure in MEASURES.items()} | {"schedule_lag_ms": "schedule lag"}
    for name, title in titles.items():
        figures.add_row(title, *("-" if value is None else f"{value:,.2f}" for value in summary[name].values()))
    console.print(figures)
    for line in (*run.warnings(), *_first_errors(run)):
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _first_errors(run: RunResult) -> Iterable[str]:
    """The first message of each kind of failure."""
    for kind in sorted(run.errors):
        message = next((record.message for record in run.records if record.outcome == kind and record.message), None)
        if message:
            yield f"the first {kind}: {message}"


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """Print the figures of the best run of a sweep, and the highest rate."""
    limits = _limits(sweep.slo)
    best = [run for run in sweep.runs if run.offered_rate == sweep.highest_rate and not run.interrupted]
    if best:
        print_run(best[-1], console)
        text = f"{sweep.highest_rate:,.4g} requests per second is the highest rate found that meets {limits}"
    else:
        if sweep.runs:
            print_run(sweep.runs[-1], console)
        text = f"no rate met {limits}"
    endings = {
        "runs": "; the search ended at its maximum number of runs",
        "interrupted": "; it was interrupted",
        "failed": "; it ended because the server stopped responding",
        "generator": "; it ended because the load generator had no file left for a connection: raise `ulimit -Hn`",
    }
    if sweep.ended == "short":
        last = sweep.judgements[-1]
        endings["short"] = (
            f"; a longer run is needed to test {last.offered:,.4g}: give --duration {math.ceil(last.needed_s)} "
            "or more, or omit it"
        )
    for judgement in sweep.judgements:
        console.print(judgement.line(), markup=False, highlight=False, soft_wrap=True)
    console.print(text + endings.get(sweep.ended, ""), markup=False, highlight=False, soft_wrap=True)


def _limits(slo: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {limit:g} ms" for name, limit in slo.items())


def _facts(run: RunResult, summary: dict[str, Any]) -> list[tuple[str, str]]:
    abandoned = "".join(f", {count} {kind}" for kind, count in sorted(run.abandoned.items()))
    achieved = "" if run.achieved_rate is None else f", achieved {run.achieved_rate:,.4g}"
    rate = "" if run.offered_rate is None else f" (offered {run.offered_rate:,.4g}{achieved})"
    facts = [
        ("requests", f"{summary['completed']} completed, {summary['failed']} failed{abandoned}"),
        ("duration", f"{summary['duration_s']:,.2f} s"),
        ("request rate", f"{summary['request_rate']:,.4g} per second{rate}"),
        ("tokens", f"{summary['input_tokens']:,} in, {summary['output_tokens']:,} out"),
        ("output", f"{summary['output_tokens_per_second']:,.1f} tokens per second"),
    ]
    if summary["goodput"] is not None:
        facts.append(("goodput", f"{summary['goodput']:,.4g} requests per second within {_limits(run.slo)}"))
    if summary["cached_tokens"] is not None and summary["input_tokens"]:
        cached = (
            f"{summary['cached_tokens']:,} prompt tokens ({summary['cached_tokens'] / summary['input_tokens']:.1%})"
        )
        reused = summary["reused_tokens"]
        facts.append(
            ("from the cache", cached + (f", {reused:,} of them from passages at other positions" if reused else ""))
        )
    for ending, title in _METRICS:
        found = [value for name, value in run.server_metrics.items() if name.endswith(ending)]
        if any(found):
            facts.append((title, f"{sum(found):,.0f}"))
    generator = run.generator
    if generator:
        lag = generator["loop_lag_ms"]["p99"]
        facts.append(("generator", f"{generator['cpu_share']:.0%} of a core, timers {lag:.1f} ms late at p99"))
    return facts


def print_comparison(result: Comparison, sides: Sequence[Sequence[Path]]) -> None:
    """Print a comparison of the files of both sides."""
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
    scope = "over runs" if result.intervals_over == "runs" else "within the runs"
    interval = f"B − A, {result.confidence:.0%} {scope}"
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
            "With one run of each there is no verdict: the intervals reflect chance within these runs, not differences from "
            "run to run of the same server. Run each three times, alternating, with different seeds, and give all files: "
            "windlass bench compare a1.json a2.json a3.json -- b1.json b2.json b3.json",
            highlight=False,
        )


def _cells(line: Line) -> list[str]:
    """Both values, the change, and the interval of the difference, without the unit."""
    share = line.statistic == "share"

    def text(value: float | None, sign: str = "") -> str:
        if value is None:
            return "–"
        return f"{value:{sign}.2%}" if share else f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"

    change = "" if line.change is None or share else f"{line.change:+.1%}"
    interval = "" if line.interval is None else " to ".join(text(end, "+") for end in line.interval)
    return [text(line.first), text(line.second), change, interval]
