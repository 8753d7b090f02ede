"""Commands of the load tester: `serve`, `report` and `compare`."""

from __future__ import annotations

import asyncio
import contextlib
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
    from windlass.clients.loadtest.load_plan import LoadPlan
    from windlass.clients.loadtest.results import Judgement, NamedRun, RunResult, SweepResult

_PROGRAM = "windlass-bench"
_SIDE_SEPARATOR = "\0"  # between the files of both sides, since no file has this name

app = InjectingTyper(
    name=_PROGRAM,
    help="Load tests of OpenAI-compatible servers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def program(version: Annotated[bool, version_option(f"{_PROGRAM} {__version__}")] = False) -> None:
    """Options before a command."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Errors are one line on standard error."""
    return run_app(app, _PROGRAM, arguments)


def add_commands(app: InjectingTyper) -> None:
    """Add the commands serve, report and compare to an app."""
    app.command("serve")(serve)
    app.command("report")(report)
    app.command("compare", cls=SidesCommand)(compare)


def serve(
    target: Annotated[TargetOptions, Depends(TargetOptions)],
    arrivals: Annotated[ArrivalOptions, Depends(ArrivalOptions)],
    workload: Annotated[WorkloadOptions, Depends(WorkloadOptions)],
    slo: Annotated[SloOptions, Depends(SloOptions)],
    output: Annotated[OutputOptions, Depends(OutputOptions)],
) -> int:
    """Send load to a running OpenAI-compatible server, and measure latencies and throughput as clients see them."""
    from windlass.clients.loadtest.runner import MeasuredLoop
    from windlass.clients.loadtest.target import LoadTestError

    files = {"--json": output.as_json, "--csv": output.csv, "--html": output.html}
    check_outputs(files, {"--trace": arrivals.trace} if arrivals.trace is not None else None)
    writers = _writers(output)
    try:
        plan = make_plan(target, arrivals, workload, slo, output)
        _raise_file_limit()
        with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
            result, stopped_by = runner.run(_run(plan, slo))
    except LoadTestError as error:
        raise CommandError(str(error)) from error
    try:
        _write(result, writers)  # before the table, which may fail where standard output is closed
    finally:
        _show(result)
    return 0 if stopped_by is None else 128 + stopped_by


def _writers(output: OutputOptions) -> list[tuple[str, Path, Callable[[Any, Path], None]]]:
    """(option, file, function) of each requested file. Raises CommandError where the page needs a missing package."""
    from windlass.clients.loadtest.results import write_csv, write_json

    found: list[tuple[str, Path | None, Callable[[Any, Path], None]]] = [
        ("--json", output.as_json, write_json),
        ("--csv", output.csv, write_csv),
    ]
    if output.html is not None:
        try:
            from windlass.clients.loadtest.report import write_html
        except ImportError as error:
            raise CommandError(f"--html is not available here ({error}): omit it") from error
        found.append(("--html", output.html, write_html))
    return [(option, path, write) for option, path, write in found if path is not None]


def _raise_file_limit() -> None:
    """Raise the soft limit of open files. Its usual value of 1,024 would make connections of a large load fail."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # Some systems accept less than an unlimited hard limit: macOS accepts 10,240.
    for wanted in (hard, 10_240, 4_096, 2_048):
        raises = soft != unlimited and (wanted == unlimited or wanted > soft)
        if raises and (hard == unlimited or wanted <= hard):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


async def _run(plan: LoadPlan, slo: SloOptions) -> tuple[RunResult | SweepResult, signal.Signals | None]:
    """The result, and the signal that interrupted it."""
    from windlass.clients.loadtest.display import ProgressDisplay
    from windlass.clients.loadtest.load_plan import Arrivals
    from windlass.clients.loadtest.runner import prepare, run_load, sweep_load
    from windlass.clients.loadtest.sweep import SweepSpec
    from windlass.clients.loadtest.target import ControlClient

    async with ControlClient(plan.target) as control:
        workload = await prepare(plan, control)
    stop = asyncio.Event()
    signals: list[signal.Signals] = []
    display = ProgressDisplay()

    def on_run(judgement: Judgement, run: RunResult) -> None:
        display.stop()
        print_status(f"{judgement.line()}, {run.summary()['output_tokens_per_second']:,.0f} tokens/s")

    with stop_on_signals(stop, signals), contextlib.ExitStack() as ending:
        ending.callback(display.stop)
        result: RunResult | SweepResult
        if slo.sweep:
            assert isinstance(plan.schedule, Arrivals)
            spec = SweepSpec(
                start=plan.schedule.rate,
                share=slo.sweep_share,
                max_runs=slo.sweep_runs,
                min_seconds=slo.sweep_seconds,
            )
            result = await sweep_load(plan, spec, workload, progress=display, stop=stop, on_run=on_run)
        else:
            result = await run_load(plan, progress=display, stop=stop, workload=workload)
    return result, signals[0] if signals else None


def _write(result: RunResult | SweepResult, writers: Sequence[tuple[str, Path, Callable[[Any, Path], None]]]) -> None:
    """Write every file, even where another fails. Raises CommandError naming those that failed."""
    failures = []
    for option, path, write in writers:
        try:
            write(result, path)
        except OSError as error:  # the error of a full disk does not name the file
            failures.append(f"cannot write {option} {path}: {error.strerror or error}")
        except ValueError as error:
            failures.append(f"cannot write {option} {path}: {error}")
    if failures:
        raise CommandError("; ".join(failures))


def _show(result: RunResult | SweepResult) -> None:
    from rich.console import Console

    from windlass.clients.loadtest.display import print_run, print_sweep
    from windlass.clients.loadtest.results import SweepResult

    console = Console()
    if isinstance(result, SweepResult):
        print_sweep(result, console)
    else:
        print_run(result, console)
    sys.stdout.flush()


def report(
    files: Annotated[list[Path], typer.Argument(metavar="JSON...", help="Files of `serve --json`: runs or sweeps.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The self-contained page to write.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Name of a run, once per file, in the order of the files. Default: the name of the file."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Heading of the page.", show_default=False)] = None,
) -> None:
    """Write one HTML page of a run, of a sweep, or of several runs to compare."""
    from windlass.clients.loadtest.report import write_html
    from windlass.clients.loadtest.results import SweepResult, unique_names

    if name and len(name) != len(files):
        raise CommandError(
            f"--name was given {len(name)} times for {len(files)} files: give it once per file or omit it"
        )
    names = unique_names(name or [path.stem for path in files])
    contents = [_read(path) for path in files]
    heading = title or (f"Load test: {names[0]}" if len(files) == 1 else "Load tests")
    results: SweepResult | list[NamedRun]
    if len(files) == 1 and isinstance(contents[0], SweepResult):
        results = contents[0]
    else:
        results = [run for content, text in zip(contents, names, strict=True) for run in _named(content, text)]
    try:
        write_html(results, html, title=heading)
    except OSError as error:
        raise CommandError(f"cannot write {html}: {error.strerror or error}") from None
    print(f"wrote {html}")


def _named(content: RunResult | SweepResult, name: str) -> list[NamedRun]:
    """The runs of a file under its name on the page. A sweep is a series with this name before each rate."""
    from windlass.clients.loadtest.results import NamedRun, RunResult, name_runs

    if isinstance(content, RunResult):
        return [NamedRun(name=name, result=content)]
    runs = name_runs(content.runs)
    return [NamedRun(name=f"{name}, {run.name}", result=run.result, series=name) for run in runs]


def _read(path: Path) -> RunResult | SweepResult:
    from windlass.clients.loadtest.results import read_file

    try:
        return read_file(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None


def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="A.json... -- B.json...",
            help="Baseline runs, and after -- the runs that may be better or worse. Two files need no --.",
        ),
    ],
    confidence: Annotated[
        float, typer.Option("--confidence", help="Confidence level of the intervals, such as 0.95.")
    ] = 0.95,
    resamples: Annotated[int, typer.Option("--resamples", min=100, help="Resamples of the bootstrap.")] = 2000,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the bootstrap. Equal seeds give equal results.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")] = False,
) -> None:
    """Compare runs B with runs A: for each measure the difference, its confidence interval and a verdict.

    A verdict needs two or more runs of each side, alternating; three are better. With one run of each, no verdict is given.
    """
    from windlass.clients.loadtest.compare import compare as compare_runs
    from windlass.clients.loadtest.display import print_comparison

    if not 0.5 <= confidence < 1:
        raise CommandError(f"--confidence must be at least 0.5 and below 1, got {confidence:g}")
    sides = _sides(files)
    runs = [[_single(path) for path in side] for side in sides]
    try:
        result = compare_runs(runs[0], runs[1], confidence=confidence, resamples=resamples, seed=seed)
    except ValueError as error:
        raise CommandError(f"{error}: compare a1.json a2.json a3.json -- b1.json b2.json b3.json") from None
    if as_json:
        print(json.dumps({**result.to_dict(), "files": [list(map(str, side)) for side in sides]}, allow_nan=False))
    else:
        print_comparison(result, sides)


class SidesCommand(TyperCommand):
    """A command that keeps the first -- as an argument. click would drop it as the end of the options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            args[args.index("--")] = _SIDE_SEPARATOR
        return super().parse_args(ctx, args)


def _sides(files: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The files of both sides. Raises CommandError."""
    position = files.index(_SIDE_SEPARATOR) if _SIDE_SEPARATOR in files else 1
    first, second = files[:position], [name for name in files[position:] if name != _SIDE_SEPARATOR]
    if not first or not second or (_SIDE_SEPARATOR not in files and len(files) > 2):
        raise CommandError(
            f"{len(files)} files are ambiguous: write A.json B.json, or several runs of each "
            "with -- between, such as a1.json a2.json a3.json -- b1.json b2.json b3.json"
        )
    return [Path(name) for name in first], [Path(name) for name in second]


def _single(path: Path) -> RunResult:
    from windlass.clients.loadtest.results import SweepResult

    content = _read(path)
    if isinstance(content, SweepResult):
        raise CommandError(
            f"{path} contains a sweep of {len(content.runs)} runs: compare single runs, or show the sweep with "
            "`windlass bench report`"
        )
    return content


add_commands(app)

if __name__ == "__main__":
    sys.exit(run())
