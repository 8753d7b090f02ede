"""Options of the command `serve`, and the load plan that they describe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.clients.terminal import CommandError

if TYPE_CHECKING:
    from windlass.clients.loadtest.load_plan import LoadPlan, Schedule, TraceEntry, WorkloadSpec
    from windlass.clients.loadtest.target import Target

DEFAULT_PROMPTS = 32


def _panel(title: str) -> Callable[..., Any]:
    """Constructor of options that are listed in a panel of the help text."""

    def option(name: str, help: str, **more: Any) -> Any:
        return typer.Option(name, help=help, rich_help_panel=title, **more)

    return option


_server, _load, _workload, _slo, _output = map(_panel, ("Server", "Load", "Workload", "Targets", "Output"))


@dataclass(slots=True, kw_only=True)
class TargetOptions:
    """The server to load."""

    url: Annotated[str, _server("--url", "URL of the server, such as http://127.0.0.1:8000, with or without /v1.")]
    model: Annotated[str | None, _server("--model", "Model name. Default: the first that the server lists.")] = None
    api_key: Annotated[
        str | None,
        _server("--api-key", "API key.", envvar=["WINDLASS_API_KEY", "OPENAI_API_KEY"], show_envvar=True),
    ] = None
    header: Annotated[
        list[str] | None,
        _server("--header", "Additional header of each request; repeatable.", metavar="NAME:VALUE"),
    ] = None
    endpoint: Annotated[str, _server("--endpoint", "Endpoint: completions or chat.")] = "completions"

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
            "--num-prompts",
            f"Number of requests, or of conversations with --turns. Default: {DEFAULT_PROMPTS}; unlimited with --duration; "
            "all of --trace.",
            min=1,
            show_default=False,
        ),
    ] = None
    duration: Annotated[float | None, _load("--duration", "Seconds after which no request is sent.")] = None
    concurrency: Annotated[
        int | None,
        _load(
            "--concurrency",
            "Number of clients that send their next request when the previous one has ended (default: 1); "
            "with a rate or a trace: maximum number of requests in flight (default: unlimited).",
            min=1,
            show_default=False,
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        _load("--request-rate", "Requests per second, independent of responses; inf: all at once."),
    ] = None
    arrival: Annotated[str, _load("--arrival", "Arrivals at that rate: poisson, gamma or constant.")] = "poisson"
    burstiness: Annotated[
        float | None,
        _load("--burstiness", "Burstiness of gamma arrivals: below 1 in bursts, 1 as poisson, above 1 more even."),
    ] = None
    ramp_to: Annotated[
        float | None,
        _load("--ramp-to", "Final rate: it changes linearly from --request-rate over the run."),
    ] = None
    trace: Annotated[
        Path | None, _load("--trace", "Replay a JSONL file of timestamps and requests.", metavar="FILE")
    ] = None
    trace_speed: Annotated[float, _load("--trace-speed", "Speed of the replay: 2 halves its time.")] = 1.0
    warmup: Annotated[int, _load("--warmup", "Number of requests before the measured part.", min=0)] = 0
    timeout: Annotated[float, _load("--timeout", "Timeout of a request, in seconds.")] = 600.0
    seed: Annotated[int, _load("--seed", "Random seed. Equal seeds give equal prompts at equal times.")] = 0

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
            "--input-len",
            "Prompt length in tokens: a number, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD.",
            metavar="LENGTH",
        ),
    ] = "128"
    output_len: Annotated[
        str, _workload("--output-len", "Response length in tokens, in the same form.", metavar="LENGTH")
    ] = "64"
    prefix_groups: Annotated[
        int,
        _workload("--prefix-groups", "Number of shared prefixes. Each prompt begins with one of them.", min=0),
    ] = 0
    prefix_len: Annotated[
        int, _workload("--prefix-len", "Tokens of a shared prefix, in addition to --input-len.", min=0)
    ] = 0
    documents: Annotated[
        int, _workload("--documents", "Number of documents. Each prompt holds one of them.", min=0)
    ] = 0
    document_len: Annotated[
        str,
        _workload("--document-len", "Tokens of a document, in the form of --input-len.", metavar="LENGTH"),
    ] = "0"
    documents_per_prompt: Annotated[
        str,
        _workload(
            "--documents-per-prompt",
            "Documents in each prompt, in random order: a number or a distribution.",
            metavar="COUNT",
        ),
    ] = "1"
    document_offset: Annotated[
        str,
        _workload(
            "--document-offset",
            "Random tokens before the documents, in the form of --input-len, to vary their positions.",
            metavar="LENGTH",
        ),
    ] = "0"
    turns: Annotated[
        int,
        _workload("--turns", "Messages of a conversation. Each request holds all previous ones.", min=1),
    ] = 1
    think_time: Annotated[float, _workload("--think-time", "Seconds between a response and the next message.")] = 0.0
    ladder: Annotated[
        bool,
        _workload("--ladder", "Prompt lengths from 1,024 tokens, doubling up to the server's limit."),
    ] = False
    rope_scaling: Annotated[
        list[str] | None,
        _workload(
            "--rope-scaling",
            "Rotary scaling that requests draw: JSON, the name of a profile or null, "
            "optionally with a weight, as in 3@null; repeatable.",
            metavar="[WEIGHT@]SCALING",
        ),
    ] = None
    disconnect_share: Annotated[
        float,
        _workload("--disconnect-share", "Share of the clients that disconnect early, from 0 to 1."),
    ] = 0.0
    disconnect_after: Annotated[
        int, _workload("--disconnect-after", "Number of chunks after which they disconnect.", min=1)
    ] = 1
    temperature: Annotated[
        float,
        _workload("--temperature", "Sampling temperature. 0: always the most likely token.", min=0.0),
    ] = 0.0
    ignore_eos: Annotated[
        bool | None,
        _workload(
            "--ignore-eos/--no-ignore-eos",
            "Request responses of exactly --output-len tokens. Default: where the server is known to support it.",
            show_default=False,
        ),
    ] = None
    usage: Annotated[
        bool, _workload("--usage/--no-usage", "Request token counts. Without them, chunks are counted.")
    ] = True
    extra_body: Annotated[
        str | None,
        _workload("--extra-body", "Additional fields of each request; null removes one.", metavar="JSON"),
    ] = None
    vocab_size: Annotated[
        int | None,
        _workload(
            "--vocab-size",
            "Vocabulary size of the model, for servers without /tokenize, to send token ids with exact prompt lengths.",
            min=8,
        ),
    ] = None
    text_prompts: Annotated[bool, _workload("--text-prompts", "Send text even where token ids are possible.")] = False

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
        _slo(
            "--slo",
            "Latency limit of a request, such as ttft:500 (ttft, tpot, itl, e2el; repeatable).",
            metavar="NAME:MS",
        ),
    ] = None
    sweep: Annotated[
        bool,
        _slo(
            "--sweep",
            "Find the highest rate that meets the SLOs: rates double from --request-rate (default: 1), then bisection.",
        ),
    ] = False
    sweep_share: Annotated[float, _slo("--sweep-share", "Share of the requests that must meet the SLOs.")] = 0.99
    sweep_runs: Annotated[int, _slo("--sweep-runs", "Maximum number of runs of a sweep.", min=1)] = 12
    sweep_seconds: Annotated[
        float,
        _slo("--sweep-seconds", "Minimum seconds of sending in each run of a sweep; longer where responses are slow."),
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

    as_json: Annotated[Path | None, _output("--json", "File of all figures and requests.", metavar="FILE")] = None
    csv: Annotated[Path | None, _output("--csv", "File with a row per request.", metavar="FILE")] = None
    html: Annotated[Path | None, _output("--html", "Report as one HTML page.", metavar="FILE")] = None
    save_text: Annotated[bool, _output("--save-text", "Store the text of each response in the JSON file.")] = False


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
