"""Commands of the load tester: `serve`, `report` and `compare`, and the load plan that the options of `serve` describe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typer_injector import Depends, InjectingTyper

from windlass.clients._version import __version__
from windlass.clients.terminal import (
    CommandError,
    check_outputs,
    option,
    print_status,
    run_app,
    stop_on_signals,
    version_option,
)

if TYPE_CHECKING:
    from windlass.clients.loadtest.load_plan import LoadPlan, Schedule, TraceEntry, WorkloadSpec
    from windlass.clients.loadtest.results import Judgement, NamedRun, RunResult, SweepResult
    from windlass.clients.loadtest.target import Target

DEFAULT_PROMPTS = 32


def _panel(title: str) -> Callable[..., Any]:
    """`option` of options that are listed in a panel of the help text."""
    return partial(option, rich_help_panel=title)


_server, _load, _workload, _slo, _output = map(_panel, ("Server", "Load", "Workload", "Targets", "Output"))


@dataclass(slots=True, kw_only=True)
class TargetOptions:
    """The server to load."""

    url: Annotated[str, _server("URL of the server, such as http://127.0.0.1:8000, with or without /v1.")]
    model: Annotated[str | None, _server("Model name. Default: the first that the server lists.")] = None
    api_key: Annotated[
        str | None, _server("API key.", envvar=["WINDLASS_API_KEY", "OPENAI_API_KEY"], show_envvar=True)
    ] = None
    header: Annotated[
        list[str] | None, _server("Additional header of each request; repeatable.", metavar="NAME:VALUE")
    ] = None
    endpoint: Annotated[str, _server("Endpoint: completions or chat.")] = "completions"

    def to_target(self) -> Target:
        """The target. Raises LoadTestError or CommandError."""
        from windlass.clients.loadtest.target import Target

        headers = {}
        for text in self.header or []:
            name, colon, value = text.partition(":")
            if not colon or not name.strip():
                raise CommandError(f"--header {text!r}: write NAME:VALUE")
            headers[name.strip()] = value.strip()
        return Target(url=self.url, model=self.model, api_key=self.api_key, headers=headers)

    @property
    def chat(self) -> bool:
        if self.endpoint not in ("completions", "chat"):
            raise CommandError(f"--endpoint must be completions or chat, got {self.endpoint!r}")
        return self.endpoint == "chat"


@dataclass(slots=True, kw_only=True)
class ArrivalOptions:
    """Times of requests, and the end of the run."""

    num_prompts: Annotated[
        int | None,
        _load(
            f"Number of requests, or of conversations with --turns. Default: {DEFAULT_PROMPTS}; unlimited with --duration; "
            "all of --trace.",
            min=1,
            show_default=False,
        ),
    ] = None
    duration: Annotated[float | None, _load("Seconds after which no request is sent.")] = None
    concurrency: Annotated[
        int | None,
        _load(
            "Number of clients that send their next request when the previous one has ended (default: 1); "
            "with a rate or a trace: maximum number of requests in flight (default: unlimited).",
            min=1,
            show_default=False,
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        _load("Requests per second, independent of responses; inf: all at once."),
    ] = None
    arrival: Annotated[str, _load("Arrivals at that rate: poisson, gamma or constant.")] = "poisson"
    burstiness: Annotated[
        float | None, _load("Burstiness of gamma arrivals: below 1 in bursts, 1 as poisson, above 1 more even.")
    ] = None
    ramp_to: Annotated[float | None, _load("Final rate: it changes linearly from --request-rate over the run.")] = None
    trace: Annotated[Path | None, _load("Replay a JSONL file of timestamps and requests.", metavar="FILE")] = None
    trace_speed: Annotated[float, _load("Speed of the replay: 2 halves its time.")] = 1.0
    warmup: Annotated[int, _load("Number of requests before the measured part.", min=0)] = 0
    timeout: Annotated[float, _load("Timeout of a request, in seconds.")] = 600.0
    seed: Annotated[int, _load("Random seed. Equal seeds give equal prompts at equal times.")] = 0

    def gap_shape(self) -> float | None:
        """Burstiness of the arrivals, None for constant gaps. Raises CommandError."""
        if self.arrival not in ("poisson", "gamma", "constant"):
            raise CommandError(f"--arrival must be poisson, gamma or constant, got {self.arrival!r}")
        if self.arrival == "constant":
            if self.burstiness is not None:
                raise CommandError("--burstiness cannot be combined with constant arrivals: omit one of the two")
            return None
        if self.arrival == "gamma" and self.burstiness is None:
            raise CommandError("--arrival gamma needs --burstiness")
        return 1.0 if self.burstiness is None else self.burstiness

    def to_schedule(self, count: int | None, trace: list[TraceEntry]) -> Schedule | None:
        """The schedule, None for a closed loop. Raises LoadTestError or CommandError."""
        from windlass.clients.loadtest.load_plan import Arrivals, Replay, ramp

        shape = self.gap_shape()
        if trace and trace[0].timestamp is not None:
            if self.request_rate is not None:
                raise CommandError("the trace has timestamps: omit them or --request-rate")
            return Replay([entry.timestamp or 0.0 for entry in trace], self.trace_speed)
        if self.request_rate is None:
            for name, value in (("--ramp-to", self.ramp_to), ("--burstiness", self.burstiness)):
                if value is not None:
                    raise CommandError(f"{name} needs a --request-rate")
            return None
        if self.ramp_to is not None:
            return ramp(self.request_rate, self.ramp_to, count, self.duration, shape)
        if self.request_rate == math.inf:
            if count is None:
                raise CommandError("--request-rate inf needs --num-prompts")
            return Replay([0.0] * count)
        return Arrivals(self.request_rate, shape)


@dataclass(slots=True, kw_only=True)
class WorkloadOptions:
    """Contents of the requests."""

    input_len: Annotated[
        str,
        _workload(
            "Prompt length in tokens: a number, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD.",
            metavar="LENGTH",
        ),
    ] = "128"
    output_len: Annotated[str, _workload("Response length in tokens, in the same form.", metavar="LENGTH")] = "64"
    prefix_groups: Annotated[
        int, _workload("Number of shared prefixes. Each prompt begins with one of them.", min=0)
    ] = 0
    prefix_len: Annotated[int, _workload("Tokens of a shared prefix, in addition to --input-len.", min=0)] = 0
    documents: Annotated[int, _workload("Number of documents. Each prompt holds one of them.", min=0)] = 0
    document_len: Annotated[str, _workload("Tokens of a document, in the form of --input-len.", metavar="LENGTH")] = "0"
    documents_per_prompt: Annotated[
        str, _workload("Documents in each prompt, in random order: a number or a distribution.", metavar="COUNT")
    ] = "1"
    document_offset: Annotated[
        str,
        _workload(
            "Random tokens before the documents, in the form of --input-len, to vary their positions.", metavar="LENGTH"
        ),
    ] = "0"
    turns: Annotated[int, _workload("Messages of a conversation. Each request holds all previous ones.", min=1)] = 1
    think_time: Annotated[float, _workload("Seconds between a response and the next message.")] = 0.0
    ladder: Annotated[
        bool, _workload("Prompt lengths from 1,024 tokens, doubling up to the server's limit.", "--ladder")
    ] = False
    rope_scaling: Annotated[
        list[str] | None,
        _workload(
            "Rotary scaling that requests draw: JSON, the name of a profile or null, "
            "optionally with a weight, as in 3@null; repeatable.",
            metavar="[WEIGHT@]SCALING",
        ),
    ] = None
    disconnect_share: Annotated[float, _workload("Share of the clients that disconnect early, from 0 to 1.")] = 0.0
    disconnect_after: Annotated[int, _workload("Number of chunks after which they disconnect.", min=1)] = 1
    temperature: Annotated[float, _workload("Sampling temperature. 0: always the most likely token.", min=0.0)] = 0.0
    ignore_eos: Annotated[
        bool | None,
        _workload(
            "Request responses of exactly --output-len tokens. Default: where the server is known to support it.",
            "--ignore-eos/--no-ignore-eos",
            show_default=False,
        ),
    ] = None
    usage: Annotated[
        bool, _workload("Request token counts. Without them, chunks are counted.", "--usage/--no-usage")
    ] = True
    extra_body: Annotated[
        str | None, _workload("Additional fields of each request; null removes one.", metavar="JSON")
    ] = None
    vocab_size: Annotated[
        int | None,
        _workload(
            "Vocabulary size of the model, for servers without /tokenize, to send token ids with exact prompt lengths.",
            min=8,
        ),
    ] = None
    text_prompts: Annotated[bool, _workload("Send text even where token ids are possible.", "--text-prompts")] = False

    def to_spec(self, chat: bool, trace: list[TraceEntry]) -> WorkloadSpec:
        """The workload. Raises LoadTestError or CommandError."""
        from windlass.clients.loadtest.load_plan import Lengths, WeightedScaling, WorkloadSpec

        values: dict[str, Any] = {field.name: getattr(self, field.name, None) for field in fields(WorkloadSpec)}
        for name in ("input_len", "output_len", "documents_per_prompt", "document_len", "document_offset"):
            minimum = 0 if name in ("document_len", "document_offset") else 1
            values[name] = Lengths.parse(values[name], f"--{name.replace('_', '-')}", minimum)
        values |= {"scalings": [WeightedScaling.parse(text) for text in self.rope_scaling or []]}
        values |= {"chat": chat, "trace": trace, "extra_body": self._extra_body()}
        return WorkloadSpec(**values)

    def _extra_body(self) -> Mapping[str, Any]:
        try:
            value = json.loads(self.extra_body or "{}")
        except (ValueError, RecursionError) as error:
            raise CommandError(f"--extra-body is not valid JSON ({error}): write '{{\"top_p\": 0.9}}'") from None
        if not isinstance(value, dict):
            raise CommandError("--extra-body must be a JSON object: write '{\"top_p\": 0.9}'")
        return value


@dataclass(slots=True, kw_only=True)
class SloOptions:
    """Latency limits, and the search for the highest rate that meets them."""

    slo: Annotated[
        list[str] | None,
        _slo("Latency limit of a request, such as ttft:500 (ttft, tpot, itl, e2el; repeatable).", metavar="NAME:MS"),
    ] = None
    sweep: Annotated[
        bool,
        _slo(
            "Find the highest rate that meets the SLOs: rates double from --request-rate (default: 1), then bisection.",
            "--sweep",
        ),
    ] = False
    sweep_share: Annotated[float, _slo("Share of the requests that must meet the SLOs.")] = 0.99
    sweep_runs: Annotated[int, _slo("Maximum number of runs of a sweep.", min=1)] = 12
    sweep_seconds: Annotated[
        float, _slo("Minimum seconds of sending in each run of a sweep; longer where responses are slow.")
    ] = 5.0

    def limits(self) -> dict[str, float]:
        """Limits in milliseconds by measure. Raises CommandError."""
        found = {}
        for text in self.slo or []:
            name, _, value = text.replace("=", ":").partition(":")
            try:
                found[name.strip().lower()] = float(value)
            except ValueError:
                raise CommandError(f"--slo {text}: write NAME:MS, such as ttft:500") from None
        return found


@dataclass(slots=True, kw_only=True)
class OutputOptions:
    """Files of the results."""

    as_json: Annotated[Path | None, _output("File of all figures and requests.", "--json", metavar="FILE")] = None
    csv: Annotated[Path | None, _output("File with a row per request.", metavar="FILE")] = None
    html: Annotated[Path | None, _output("Report as one HTML page.", metavar="FILE")] = None
    save_text: Annotated[bool, _output("Store the text of each response in the JSON file.", "--save-text")] = False


def make_plan(
    target: TargetOptions, arrivals: ArrivalOptions, workload: WorkloadOptions, slo: SloOptions, output: OutputOptions
) -> LoadPlan:
    """The load that the options describe. Raises LoadTestError or CommandError naming the option that is wrong."""
    from windlass.clients.loadtest.load_plan import Arrivals, LoadPlan, read_trace

    if slo.sweep and (arrivals.trace is not None or arrivals.ramp_to is not None):
        raise CommandError("a sweep sets the rate: omit --trace and --ramp-to")
    trace = read_trace(arrivals.trace) if arrivals.trace is not None else []
    count = arrivals.num_prompts
    if trace:
        count = min(count or len(trace), len(trace))
    elif count is None and arrivals.duration is None:
        count = DEFAULT_PROMPTS
    if slo.sweep:
        first_rate = 1.0 if arrivals.request_rate is None else arrivals.request_rate
        schedule: Schedule | None = Arrivals(first_rate, arrivals.gap_shape())
    else:
        schedule = arrivals.to_schedule(count, trace)
    concurrency = 1 if schedule is None and arrivals.concurrency is None else arrivals.concurrency
    settings = asdict(arrivals) | asdict(workload) | {"model": target.model, "endpoint": target.endpoint}
    settings |= {"num_prompts": count, "concurrency": concurrency, "rope_scaling": workload.rope_scaling or []}
    for name, value in settings.items():
        # Checked even where the option has no effect, since the report shows every setting.
        if isinstance(value, float) and math.isnan(value):
            raise CommandError(f"--{name.replace('_', '-')} must be a number, got nan")
        if isinstance(value, Path) or value in (math.inf, -math.inf):
            settings[name] = str(value)
    return LoadPlan(
        target=target.to_target(),
        workload=workload.to_spec(target.chat, trace),
        schedule=schedule,
        concurrency=concurrency,
        count=count,
        duration_s=arrivals.duration,
        warmup=arrivals.warmup,
        timeout_s=arrivals.timeout,
        seed=arrivals.seed,
        slo=slo.limits(),
        vocab_size=workload.vocab_size,
        text_prompts=workload.text_prompts,
        keep_text=output.save_text,
        settings=settings,
    )


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
    from windlass.clients.loadtest.runner import SweepSpec, prepare, run_load, sweep_load
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
                start=plan.schedule.rate, share=slo.sweep_share, max_runs=slo.sweep_runs, min_seconds=slo.sweep_seconds
            )
            result = await sweep_load(plan, spec, workload, progress=display, stop=stop, on_run=on_run)
        else:
            result = await run_load(plan, progress=display, stop=stop, workload=workload)
    return result, signals[0] if signals else None


def _write(result: RunResult | SweepResult, writers: Sequence[tuple[str, Path, Callable[[Any, Path], None]]]) -> None:
    """Write every file, even where another fails. Raises CommandError naming those that failed."""
    failures = []
    for flag, path, write in writers:
        try:
            write(result, path)
        except OSError as error:  # the error of a full disk does not name the file
            failures.append(f"cannot write {flag} {path}: {error.strerror or error}")
        except ValueError as error:
            failures.append(f"cannot write {flag} {path}: {error}")
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
    html: Annotated[Path, option("The self-contained page to write.", metavar="FILE")],
    name: Annotated[
        list[str] | None,
        option("Name of a run, once per file, in the order of the files. Default: the name of the file."),
    ] = None,
    title: Annotated[str | None, option("Heading of the page.", show_default=False)] = None,
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
    confidence: Annotated[float, option("Confidence level of the intervals, such as 0.95.")] = 0.95,
    resamples: Annotated[int, option("Resamples of the bootstrap.", min=100)] = 2000,
    seed: Annotated[int, option("Seed of the bootstrap. Equal seeds give equal results.", min=0)] = 0,
    as_json: Annotated[bool, option("Write one JSON object and nothing else.", "--json")] = False,
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
