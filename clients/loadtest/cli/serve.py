"""The command `serve`: options in, a load test run, tables and files out. The test itself is `windlass.clients.loadtest`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
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
    _show(result)
    _write(result, output, write_html)
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
    with _stopped_by_signals(stop, signals), contextlib.ExitStack() as ending:
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


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event, received: list[signal.Signals]) -> Iterator[None]:
    """The first ctrl-C or SIGTERM ends the run with a report of what there is; a second one ends the program."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGINT, signal.SIGTERM)
    before = signal.getsignal(signal.SIGINT)

    def restore() -> None:
        for number in handled:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, before)

    def receive(number: signal.Signals) -> None:
        received.append(number)
        stop.set()
        restore()

    for number in handled:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        restore()


def _raise_file_limit() -> None:
    """A connection takes a file; the usual soft limit of 1,024 would end a large load with errors of its own."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))


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
    """Write the files asked for. Raises CommandError."""
    from windlass.clients.loadtest.export import write_csv, write_sweep
    from windlass.clients.loadtest.results import write_json
    from windlass.clients.loadtest.sweep import SweepResult

    try:
        if output.as_json is not None:
            if isinstance(result, SweepResult):
                write_sweep(result, output.as_json)
            else:
                write_json(result, output.as_json)
        if output.csv is not None:
            write_csv(result, output.csv)
        if output.html is not None and write_html is not None:
            write_html(result, output.html)
    except OSError as error:
        raise CommandError(f"cannot write {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"cannot write the report: {error}") from error
