"""Commands of the load tester: `serve`, `report` and `compare`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typer_injector import Depends, InjectingTyper

from windlass.clients._version import __version__
from windlass.clients.loadtest.options import (
    ArrivalOptions,
    OutputOptions,
    SloOptions,
    TargetOptions,
    WorkloadOptions,
    initial_rate,
    make_plan,
)
from windlass.clients.terminal import (
    CommandError,
    check_outputs,
    print_status,
    run_app,
    stop_on_signals,
    version_option,
)

if TYPE_CHECKING:
    from windlass.clients.loadtest.compare import Comparison, Line
    from windlass.clients.loadtest.load_plan import LoadPlan
    from windlass.clients.loadtest.results import NamedRun, ResultFile, RunResult
    from windlass.clients.loadtest.sweep import Judgement, SweepResult


def bench_serve(
    target: Annotated[TargetOptions, Depends(TargetOptions)],
    arrivals: Annotated[ArrivalOptions, Depends(ArrivalOptions)],
    workload: Annotated[WorkloadOptions, Depends(WorkloadOptions)],
    slo: Annotated[SloOptions, Depends(SloOptions)],
    output: Annotated[OutputOptions, Depends(OutputOptions)],
) -> int:
    """Put load on a running server, any that speaks OpenAI's API, and measure what its clients see."""
    from windlass.clients.loadtest.runner import MeasuredLoop
    from windlass.clients.loadtest.target import LoadTestError

    files = {"--json": output.as_json, "--csv": output.csv, "--html": output.html}
    check_outputs(files, {"--trace": arrivals.trace} if arrivals.trace is not None else None)
    write_html = _html_writer() if output.html is not None else None
    try:
        plan = make_plan(target, arrivals, workload, slo, output)
        _raise_file_limit()
        with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
            result, stopped_by = runner.run(_run(plan, arrivals, slo))
    except LoadTestError as error:
        raise CommandError(str(error)) from error
    try:
        _write(result, output, write_html)  # first: nobody may be left to read the table
    finally:
        _show(result)
    return 0 if stopped_by is None else 128 + stopped_by


async def _run(
    plan: LoadPlan, arrivals: ArrivalOptions, slo: SloOptions
) -> tuple[RunResult | SweepResult, signal.Signals | None]:
    """The result, and the signal that cut it short."""
    from windlass.clients.loadtest.display import ProgressDisplay
    from windlass.clients.loadtest.load_plan import Arrivals
    from windlass.clients.loadtest.runner import prepare, run_load, sweep_load
    from windlass.clients.loadtest.sweep import SweepSpec
    from windlass.clients.loadtest.target import ControlClient

    async with ControlClient(plan.target) as control:
        server, workload = await prepare(plan, control)
    stop = asyncio.Event()
    signals: list[signal.Signals] = []
    display = ProgressDisplay()
    with stop_on_signals(stop, signals), contextlib.ExitStack() as ending:
        ending.callback(display.stop)
        if not slo.sweep:
            result: Any = await run_load(plan, progress=display, stop=stop, workload=workload, server=server)
        else:
            shape = arrivals.gap_shape()
            spec = SweepSpec(
                start=initial_rate(arrivals),
                share=slo.sweep_share,
                max_runs=slo.sweep_runs,
                min_seconds=slo.sweep_seconds,
            )

            def on_run(judged: Judgement, run: RunResult) -> None:
                display.stop()
                print_status(f"{judged.line()}, {run.summary()['output_tokens_per_second']:,.0f} tokens/s")

            result = await sweep_load(
                plan,
                spec,
                lambda rate: Arrivals(rate, shape),
                progress=display,
                stop=stop,
                workload=workload,
                server=server,
                on_run=on_run,
            )
    return result, signals[0] if signals else None


def _raise_file_limit() -> None:
    """A connection takes a file; the usual soft limit of 1,024 would end a large load with errors of its own."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    # A hard limit of infinity is more than some systems take: macOS takes 10,240.
    for wanted in (hard, 10_240, 4_096, 2_048):
        more = soft != endless and (wanted == endless or wanted > soft)
        if more and (hard == endless or wanted <= hard):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


def _html_writer() -> Callable[[Any, Path], None]:
    try:
        from windlass.clients.loadtest.report import write_html
    except ImportError as error:
        raise CommandError(f"--html is not available here ({error}): leave it out") from error
    writer: Callable[[Any, Path], None] = write_html
    return writer


def _show(result: RunResult | SweepResult) -> None:
    from rich.console import Console

    from windlass.clients.loadtest.display import print_run, print_sweep
    from windlass.clients.loadtest.sweep import SweepResult

    console = Console()
    if isinstance(result, SweepResult):
        print_sweep(result, console)
    else:
        print_run(result, console)
    sys.stdout.flush()


def _write(
    result: RunResult | SweepResult, output: OutputOptions, write_html: Callable[[Any, Path], None] | None
) -> None:
    """Write the files asked for, each whatever becomes of the others. Raises CommandError naming those that failed."""

    from windlass.clients.loadtest.results import write_json
    from windlass.clients.loadtest.sweep import SweepResult, write_csv, write_sweep

    def write_as_json(result: RunResult | SweepResult, path: Path) -> None:
        if isinstance(result, SweepResult):
            write_sweep(result, path)
        else:
            write_json(result, path)

    failures = []
    for option, path, write in (
        ("--json", output.as_json, write_as_json),
        ("--csv", output.csv, write_csv),
        ("--html", output.html, write_html),
    ):
        if path is None or write is None:
            continue
        try:
            write(result, path)
        except OSError as error:  # a full disk names no file
            failures.append(f"cannot write {option} {path}: {error.strerror or error}")
        except ValueError as error:
            failures.append(f"cannot write {option} {path}: {error}")
    if failures:
        raise CommandError("; ".join(failures))


_SIDE_SEPARATOR = "\0"  # between the files of both sides: no file has such a name


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
    from windlass.clients.loadtest.report import write_html
    from windlass.clients.loadtest.results import unique_names

    if name and len(name) != len(files):
        raise CommandError(
            f"--name was given {len(name)} times for {len(files)} files: give it once per file or not at all"
        )
    names = unique_names(name or [path.stem for path in files])
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
            args[args.index("--")] = _SIDE_SEPARATOR
        return super().parse_args(ctx, args)


def _sides(files: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The files of both sides. Raises CommandError."""
    place = files.index(_SIDE_SEPARATOR) if _SIDE_SEPARATOR in files else 1
    first, second = files[:place], [name for name in files[place:] if name != _SIDE_SEPARATOR]
    if not first or not second or (_SIDE_SEPARATOR not in files and len(files) > 2):
        raise CommandError(
            f"{len(files)} files do not say which to compare with which: write A.json B.json, or several runs of each "
            "with -- between, such as a1.json a2.json a3.json -- b1.json b2.json b3.json"
        )
    return [Path(name) for name in first], [Path(name) for name in second]


def _read(path: Path) -> ResultFile:
    from windlass.clients.loadtest.results import read_file

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


def _named(measured: ResultFile, name: str, alone: bool) -> ResultFile:
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


_PROGRAM = "windlass-bench"


def add_commands(app: InjectingTyper) -> None:
    """Give an app the commands serve, report and compare."""
    app.command("serve")(bench_serve)
    app.command("report")(report)
    app.command("compare", cls=SidesCommand)(compare)


app = InjectingTyper(
    name=_PROGRAM,
    help="Load tests of servers that speak OpenAI's API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; errors are one line on standard error."""
    return run_app(app, _PROGRAM, arguments)


add_commands(app)


@app.callback()
def program(version: Annotated[bool, version_option(f"{_PROGRAM} {__version__}")] = False) -> None:
    """The options before a command."""


def main() -> None:
    """Run the command of the process's arguments, and end it."""
    sys.exit(run())


if __name__ == "__main__":
    main()
