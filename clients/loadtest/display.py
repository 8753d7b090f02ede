"""What a person sees of a load test: how far it is while it runs, and a table of its figures at the end."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

from windlass.clients.loadtest.results import RunResult
from windlass.clients.loadtest.runner import RunProgress
from windlass.clients.loadtest.sweep import SweepResult
from windlass.clients.terminal import print_status, stderr_is_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_LINE_SECONDS = 10.0
_MEASURES = (
    ("ttft_ms", "time to first token"),
    ("ttft_actual_ms", "  from the actual send"),
    ("tpot_ms", "time per output token"),
    ("itl_ms", "inter-token latency"),
    ("e2el_ms", "end-to-end latency"),
    ("schedule_lag_ms", "schedule lag"),
)
# Metrics worth a line, by what their names end in; every server has a prefix of its own.
_METRICS = (
    ("num_preemptions_total", "preemptions"),
    ("key_moves_total", "keys turned"),
    ("context_shifts_total", "context shifts"),
)


class ProgressDisplay:
    """The callback of a run: a bar on a terminal, else a line when a phase begins and every few seconds."""

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
            with contextlib.suppress(OSError):  # a terminal that is gone ends no measurement
                self._draw(snapshot, now)
        elif snapshot.phase != self._phase or now - self._last_line_at >= _LINE_SECONDS:
            self._last_line_at = now
            print_status(self._name + _progress_line(snapshot))
        self._phase = snapshot.phase

    def stop(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.stop()
            self._progress = None

    def _draw(self, snapshot: RunProgress, now: float) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            # Refreshed from here only: a thread of its own could interrupt the measurement at any time.
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


def warnings(run: RunResult) -> list[str]:
    """What a reader of the figures must know, a line each."""
    found = []
    if run.generator.get("limited"):
        reasons = "; ".join(run.generator.get("reasons", ()))
        found.append(f"the load generator, not the server, was the limit: {reasons}")
    if run.interrupted:
        found.append("the run was interrupted: the figures cover what came before")
    short = sum(r.asked_tokens is not None and r.output_tokens < r.asked_tokens for r in run.completed)
    if short:
        found.append(
            f"{short} answers were shorter than asked for: --ignore-eos makes them exact where the server takes it"
        )
    for kind, count in sorted(run.errors.items()):
        message = next((record.message for record in run.records if record.outcome == kind and record.message), None)
        found.append(f"{count} failed as {kind}" + (f", the first with: {message}" if message else ""))
    return found


def print_run(run: RunResult, console: Console) -> None:
    """The figures of a run, and its warnings."""
    from rich.table import Table

    summary = run.summary()
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in _facts(run, summary):
        facts.add_row(name, text)
    console.print(facts)
    figures = Table("ms", *(f"{name}" for name in ("mean", "p50", "p90", "p95", "p99")))
    for column in figures.columns[1:]:
        column.justify = "right"
    for name, title in _MEASURES:
        values = summary[name]
        figures.add_row(title, *("-" if value is None else f"{value:,.2f}" for value in values.values()))
    console.print(figures)
    for line in warnings(run):
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """The figures of the best run of a sweep, and the rate that was found."""
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in sweep.slo.items())
    best = [run for run in sweep.runs if run.offered_rate == sweep.highest_rate and not run.interrupted]
    if best:
        print_run(best[-1], console)
        text = f"{sweep.highest_rate:,.4g} requests per second is the highest rate found that keeps {limits}"
    else:
        if sweep.runs:
            print_run(sweep.runs[-1], console)
        text = f"no rate kept {limits}"
    ended = {"runs": "; the search ended at its most runs", "interrupted": "; it was interrupted"}
    ended["failed"] = "; it ended as the server no longer answered"
    ended["generator"] = "; it ended as the load generator had no file left for a connection: raise `ulimit -Hn`"
    if sweep.ended == "short":
        last = sweep.judgements[-1]
        ended["short"] = (
            f"; a longer run is needed to test {last.offered:,.4g}: give --duration {math.ceil(last.needed_s)} "
            "or more, or leave it out"
        )
    for judged in sweep.judgements:
        console.print(judged.line(), markup=False, highlight=False, soft_wrap=True)
    console.print(text + ended.get(sweep.ended, ""), markup=False, highlight=False, soft_wrap=True)


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
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in run.slo.items())
        facts.append(("goodput", f"{summary['goodput']:,.4g} requests per second within {limits}"))
    if summary["cached_tokens"] is not None and summary["input_tokens"]:
        cached = (
            f"{summary['cached_tokens']:,} prompt tokens ({summary['cached_tokens'] / summary['input_tokens']:.1%})"
        )
        reused = summary["reused_tokens"]
        facts.append(
            ("from the cache", cached + (f", {reused:,} of them from passages that stood elsewhere" if reused else ""))
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
