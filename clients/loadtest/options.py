"""Options of the command `serve`, and the load that they describe."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.clients.terminal import CommandError

if TYPE_CHECKING:
    from windlass.clients.loadtest.load_plan import LoadPlan, Schedule, TraceEntry, WorkloadSpec
    from windlass.clients.loadtest.target import Target


DEFAULT_PROMPTS = 32

_SERVER_PANEL = "Server"

_LOAD_PANEL = "Load"

_WORKLOAD_PANEL = "Workload"

_SLO_PANEL = "Targets"

_OUTPUT_PANEL = "Output"


def _option(name: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


@dataclass(slots=True, kw_only=True)
class TargetOptions:
    """Which server."""

    url: Annotated[
        str, _option("--url", _SERVER_PANEL, "Its address, such as http://127.0.0.1:8000, with or without /v1.")
    ]
    model: Annotated[str | None, _option("--model", _SERVER_PANEL, "A model it serves. Default: its first.")] = None
    api_key: Annotated[
        str | None,
        _option(
            "--api-key", _SERVER_PANEL, "Its key.", envvar=["WINDLASS_API_KEY", "OPENAI_API_KEY"], show_envvar=True
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        _option("--header", _SERVER_PANEL, "A further header of each request; repeatable.", metavar="NAME:VALUE"),
    ] = None
    endpoint: Annotated[str, _option("--endpoint", _SERVER_PANEL, "completions or chat.")] = "completions"

    def to_target(self) -> Target:
        """Raises LoadTestError or CommandError."""
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
    """When requests are sent, and when the run ends."""

    num_prompts: Annotated[
        int | None,
        _option(
            "--num-prompts",
            _LOAD_PANEL,
            f"Requests to send, conversations with --turns. Default: {DEFAULT_PROMPTS}, "
            "or no bound with --duration, or the whole --trace.",
            min=1,
            show_default=False,
        ),
    ] = None
    duration: Annotated[float | None, _option("--duration", _LOAD_PANEL, "Seconds after which no request begins.")] = (
        None
    )
    concurrency: Annotated[
        int | None,
        _option(
            "--concurrency",
            _LOAD_PANEL,
            "Clients that send their next request when the last has ended (default: 1); "
            "with a rate or a trace: the most requests in flight (default: no bound).",
            min=1,
            show_default=False,
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        _option("--request-rate", _LOAD_PANEL, "Requests per second that do not wait for answers; inf: all at once."),
    ] = None
    arrival: Annotated[
        str, _option("--arrival", _LOAD_PANEL, "How they come at that rate: poisson, gamma or constant.")
    ] = "poisson"
    burstiness: Annotated[
        float | None,
        _option("--burstiness", _LOAD_PANEL, "For gamma: below 1 in bursts, 1 as poisson, above 1 more evenly."),
    ] = None
    ramp_to: Annotated[
        float | None,
        _option("--ramp-to", _LOAD_PANEL, "The rate changes evenly from --request-rate to this one over the run."),
    ] = None
    trace: Annotated[
        Path | None, _option("--trace", _LOAD_PANEL, "Replay a JSONL file of timestamps and requests.", metavar="FILE")
    ] = None
    trace_speed: Annotated[float, _option("--trace-speed", _LOAD_PANEL, "2 replays it in half the time.")] = 1.0
    warmup: Annotated[int, _option("--warmup", _LOAD_PANEL, "Requests before the measured part.", min=0)] = 0
    timeout: Annotated[float, _option("--timeout", _LOAD_PANEL, "Seconds after which a request counts as failed.")] = (
        600.0
    )
    seed: Annotated[int, _option("--seed", _LOAD_PANEL, "The same seed gives the same prompts at the same times.")] = 0

    def gap_shape(self) -> float | None:
        """The burstiness of arrivals, None for constant gaps. Raises CommandError."""
        if self.arrival not in ("poisson", "gamma", "constant"):
            raise CommandError(f"--arrival must be poisson, gamma or constant, got {self.arrival!r}")
        if self.arrival == "constant":
            if self.burstiness is not None:
                raise CommandError("--burstiness does not go with constant arrivals: leave one of the two out")
            return None
        if self.arrival == "gamma" and self.burstiness is None:
            raise CommandError("--arrival gamma needs --burstiness")
        return 1.0 if self.burstiness is None else self.burstiness

    def to_schedule(self, count: int | None, trace: list[TraceEntry]) -> Schedule | None:
        """None for a closed loop. Raises LoadTestError or CommandError."""
        from windlass.clients.loadtest.load_plan import Arrivals, Replay, ramp

        shape = self.gap_shape()
        timed = bool(trace) and trace[0].timestamp is not None
        if timed:
            if self.request_rate is not None:
                raise CommandError("the trace has times of its own: leave --request-rate out, or the timestamps")
            return Replay([entry.timestamp or 0.0 for entry in trace], self.trace_speed)
        if self.request_rate is None:
            for name, value in (("--ramp-to", self.ramp_to), ("--burstiness", self.burstiness)):
                if value is not None:
                    raise CommandError(f"{name} needs a --request-rate")
            return None
        if self.ramp_to is not None:
            return ramp(self.request_rate, self.ramp_to, count, self.duration, shape)
        if self.request_rate == float("inf"):
            if count is None:
                raise CommandError("--request-rate inf needs --num-prompts")
            return Replay([0.0] * count)
        return Arrivals(self.request_rate, shape)


@dataclass(slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked."""

    input_len: Annotated[
        str,
        _option(
            "--input-len",
            _WORKLOAD_PANEL,
            "Tokens of a prompt: a number, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD.",
            metavar="LENGTH",
        ),
    ] = "128"
    output_len: Annotated[
        str, _option("--output-len", _WORKLOAD_PANEL, "Tokens of an answer, in the same way.", metavar="LENGTH")
    ] = "64"
    prefix_groups: Annotated[
        int,
        _option("--prefix-groups", _WORKLOAD_PANEL, "Prompts begin with one of so many texts they share ...", min=0),
    ] = 0
    prefix_len: Annotated[
        int, _option("--prefix-len", _WORKLOAD_PANEL, "... of so many tokens, before --input-len.", min=0)
    ] = 0
    documents: Annotated[
        int, _option("--documents", _WORKLOAD_PANEL, "Prompts hold one of so many documents ...", min=0)
    ] = 0
    document_len: Annotated[
        str,
        _option("--document-len", _WORKLOAD_PANEL, "... of so many tokens, a length as above ...", metavar="LENGTH"),
    ] = "0"
    documents_per_prompt: Annotated[
        str,
        _option(
            "--documents-per-prompt",
            _WORKLOAD_PANEL,
            "... or several of them, in another order each time ...",
            metavar="COUNT",
        ),
    ] = "1"
    document_offset: Annotated[
        str,
        _option(
            "--document-offset",
            _WORKLOAD_PANEL,
            "... after so many other tokens, a length as above, so that they come at different positions.",
            metavar="LENGTH",
        ),
    ] = "0"
    turns: Annotated[
        int, _option("--turns", _WORKLOAD_PANEL, "Messages of a conversation; each holds all that came before.", min=1)
    ] = 1
    think_time: Annotated[
        float, _option("--think-time", _WORKLOAD_PANEL, "Seconds between an answer and the next turn.")
    ] = 0.0
    ladder: Annotated[
        bool,
        _option("--ladder", _WORKLOAD_PANEL, "Prompts of 1,024 tokens, twice that, and so on to the server's limit."),
    ] = False
    rope_scaling: Annotated[
        list[str] | None,
        _option(
            "--rope-scaling",
            _WORKLOAD_PANEL,
            "A rotary scaling that requests draw from: JSON, a profile's name or null, "
            "with a weight as in 3@null; repeatable.",
            metavar="[WEIGHT@]SCALING",
        ),
    ] = None
    disconnect_share: Annotated[
        float, _option("--disconnect-share", _WORKLOAD_PANEL, "Share of clients that go away in the middle, 0 to 1.")
    ] = 0.0
    disconnect_after: Annotated[
        int, _option("--disconnect-after", _WORKLOAD_PANEL, "Chunks after which they do.", min=1)
    ] = 1
    temperature: Annotated[
        float, _option("--temperature", _WORKLOAD_PANEL, "0: always the most likely token.", min=0.0)
    ] = 0.0
    ignore_eos: Annotated[
        bool | None,
        _option(
            "--ignore-eos/--no-ignore-eos",
            _WORKLOAD_PANEL,
            "Ask for answers of exactly --output-len tokens. Default: where the server is known to take that field.",
            show_default=False,
        ),
    ] = None
    usage: Annotated[
        bool, _option("--usage/--no-usage", _WORKLOAD_PANEL, "Ask for token counts; without, chunks are counted.")
    ] = True
    extra_body: Annotated[
        str | None,
        _option("--extra-body", _WORKLOAD_PANEL, "Further fields of each request; null takes one out.", metavar="JSON"),
    ] = None
    vocab_size: Annotated[
        int | None,
        _option(
            "--vocab-size",
            _WORKLOAD_PANEL,
            "Tokens the model knows, where the server has no /tokenize: prompts are then "
            "token ids all the same, and their lengths exact.",
            min=8,
        ),
    ] = None
    text_prompts: Annotated[bool, _option("--text-prompts", _WORKLOAD_PANEL, "Send text even where ids would do.")] = (
        False
    )

    def to_spec(self, chat: bool, trace: list[TraceEntry]) -> WorkloadSpec:
        """Raises LoadTestError or CommandError."""
        from windlass.clients.loadtest.load_plan import Lengths, WeightedScaling, WorkloadSpec

        return WorkloadSpec(
            input_len=Lengths.parse(self.input_len, "--input-len"),
            output_len=Lengths.parse(self.output_len, "--output-len"),
            chat=chat,
            prefix_groups=self.prefix_groups,
            prefix_len=self.prefix_len,
            documents=self.documents,
            document_len=Lengths.parse(self.document_len, "--document-len", minimum=0),
            documents_per_prompt=Lengths.parse(self.documents_per_prompt, "--documents-per-prompt"),
            document_offset=Lengths.parse(self.document_offset, "--document-offset", minimum=0),
            turns=self.turns,
            think_s=self.think_time,
            ladder=self.ladder,
            scalings=[WeightedScaling.parse(text) for text in self.rope_scaling or []],
            trace=trace,
            disconnect_share=self.disconnect_share,
            disconnect_after=self.disconnect_after,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            include_usage=self.usage,
            extra_body=self._extra_body(),
        )

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
    """What is good enough, and the search for the highest rate that is."""

    slo: Annotated[
        list[str] | None,
        _option(
            "--slo",
            _SLO_PANEL,
            "The most a request may take, such as ttft:500 (ttft, tpot, itl, e2el; repeatable).",
            metavar="NAME:MS",
        ),
    ] = None
    sweep: Annotated[
        bool,
        _option(
            "--sweep",
            _SLO_PANEL,
            "Find the highest rate that meets the SLOs: runs at rates that double from "
            "--request-rate (default: 1), then bisection.",
        ),
    ] = False
    sweep_share: Annotated[
        float, _option("--sweep-share", _SLO_PANEL, "Share of the requests that must meet them.")
    ] = 0.99
    sweep_runs: Annotated[int, _option("--sweep-runs", _SLO_PANEL, "Most runs of a sweep.", min=1)] = 12
    sweep_seconds: Annotated[
        float,
        _option(
            "--sweep-seconds",
            _SLO_PANEL,
            "That each run of a sweep sends for, at least; longer where answers are slow.",
        ),
    ] = 5.0

    def limits(self) -> dict[str, float]:
        """Milliseconds by measure. Raises CommandError."""
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
    """Where the results go."""

    as_json: Annotated[Path | None, _option("--json", _OUTPUT_PANEL, "Every figure and request.", metavar="FILE")] = (
        None
    )
    csv: Annotated[Path | None, _option("--csv", _OUTPUT_PANEL, "A row per request.", metavar="FILE")] = None
    html: Annotated[Path | None, _option("--html", _OUTPUT_PANEL, "The report as one page.", metavar="FILE")] = None
    save_text: Annotated[bool, _option("--save-text", _OUTPUT_PANEL, "Keep the text of each answer in the JSON.")] = (
        False
    )


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return str(value) if isinstance(value, Path) or value in (math.inf, -math.inf) else value


def initial_rate(arrivals: ArrivalOptions) -> float:
    """Where a sweep begins."""
    return 1.0 if arrivals.request_rate is None else arrivals.request_rate


def make_plan(
    target: TargetOptions, arrivals: ArrivalOptions, workload: WorkloadOptions, slo: SloOptions, output: OutputOptions
) -> LoadPlan:
    """The load that the options describe. Raises LoadTestError or CommandError, one line that names the option."""
    from dataclasses import asdict

    from windlass.clients.loadtest.load_plan import Arrivals, LoadPlan, read_trace

    if slo.sweep and (arrivals.trace is not None or arrivals.ramp_to is not None):
        raise CommandError("a sweep sets the rate itself: leave --trace and --ramp-to out")
    trace = read_trace(arrivals.trace) if arrivals.trace is not None else []
    count = arrivals.num_prompts
    if trace:
        count = min(count or len(trace), len(trace))
    elif count is None and arrivals.duration is None:
        count = DEFAULT_PROMPTS
    if slo.sweep:
        schedule: Schedule | None = Arrivals(initial_rate(arrivals), arrivals.gap_shape())
    else:
        schedule = arrivals.to_schedule(count, trace)
    concurrency = 1 if schedule is None and arrivals.concurrency is None else arrivals.concurrency
    settings = asdict(arrivals) | asdict(workload) | {"model": target.model, "endpoint": target.endpoint}
    for name, value in settings.items():
        # Also where nothing reads it: the report shows every setting.
        if isinstance(value, float) and math.isnan(value):
            raise CommandError(f"--{name.replace('_', '-')} must be a number, got nan")
    settings |= {"num_prompts": count, "concurrency": concurrency, "rope_scaling": workload.rope_scaling or []}
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
        settings={name: _plain(value) for name, value in settings.items()},
    )
