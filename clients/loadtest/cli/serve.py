"""The command `serve`: options in, a load test run, tables and files out. The test itself is `windlass.clients.loadtest`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer_injector import Depends

from windlass.clients.loadtest.cli.options import (
    ArrivalOptions,
    OutputOptions,
    SloOptions,
    TargetOptions,
    WorkloadOptions,
    first_rate,
    make_plan,
)
from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.clients.terminal.outputs import check_outputs
from windlass.clients.terminal.signals import stopped_by_signals

if TYPE_CHECKING:
    from windlass.clients.loadtest.judgement import Judgement
    from windlass.clients.loadtest.load_plan import LoadPlan
    from windlass.clients.loadtest.results import RunResult
    from windlass.clients.loadtest.sweep import SweepResult


def bench_serve(
    target: Annotated[TargetOptions, Depends(TargetOptions)],
    arrivals: Annotated[ArrivalOptions, Depends(ArrivalOptions)],
    workload: Annotated[WorkloadOptions, Depends(WorkloadOptions)],
    slo: Annotated[SloOptions, Depends(SloOptions)],
    output: Annotated[OutputOptions, Depends(OutputOptions)],
) -> int:
    """Put load on a running server, any that speaks OpenAI's API, and measure what its clients see."""
    from windlass.clients.loadtest.errors import LoadTestError
    from windlass.clients.loadtest.generator_health import MeasuredLoop

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
    from windlass.clients.loadtest.runner import prepare, run_load, sweep_load
    from windlass.clients.loadtest.schedule import Arrivals
    from windlass.clients.loadtest.sweep import SweepSpec
    from windlass.clients.loadtest.target import Control

    async with Control(plan.target) as control:
        server, workload = await prepare(plan, control)
    stop = asyncio.Event()
    signals: list[signal.Signals] = []
    display = ProgressDisplay()
    with stopped_by_signals(stop, signals), contextlib.ExitStack() as ending:
        ending.callback(display.stop)
        if not slo.sweep:
            result: Any = await run_load(plan, progress=display, stop=stop, workload=workload, server=server)
        else:
            shape = arrivals.gap_shape()
            spec = SweepSpec(
                start=first_rate(arrivals),
                share=slo.sweep_share,
                most_runs=slo.sweep_runs,
                least_seconds=slo.sweep_seconds,
            )

            def told(judged: Judgement, run: RunResult) -> None:
                display.stop()
                say(f"{judged.line()}, {run.summary()['output_tokens_per_second']:,.0f} tokens/s")

            result = await sweep_load(
                plan,
                spec,
                lambda rate: Arrivals(rate, shape),
                progress=display,
                stop=stop,
                workload=workload,
                server=server,
                told=told,
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
    from windlass.clients.loadtest.export import write_csv, write_sweep
    from windlass.clients.loadtest.results import write_json
    from windlass.clients.loadtest.sweep import SweepResult

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
