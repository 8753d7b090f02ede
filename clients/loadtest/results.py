"""Results of load tests: records, summaries, sweeps, and their files."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from windlass.clients._parse import loads, parse

FORMAT = "windlass-bench/1"
SWEEP_FORMAT = "windlass-bench-sweep/2"
# Its highest rate was one whose responses were in time; whether the server achieved that rate was not checked.
_OLD_SWEEP_FORMAT = "windlass-bench-sweep/1"

PERCENTILES = (50, 90, 95, 99)

# Outcomes of requests that the load generator itself ended or could not send: neither completed nor failed.
ABANDONED = frozenset({"disconnected", "interrupted", "unsent"})


class Measure(NamedTuple):
    """A latency, as the table of `serve` and the page of a report show it."""

    title: str
    label: str
    unit: str = "ms"


MEASURES = {
    "ttft": Measure("time to first token", "TTFT, from the intended send"),
    "ttft_actual": Measure("  from the actual send", "TTFT, from the actual send"),
    "tpot": Measure("time per output token", "TPOT", "ms per token"),
    "itl": Measure("inter-token latency", "ITL", "ms per chunk"),
    "e2el": Measure("end-to-end latency", "E2EL"),
}
SLO_MEASURES = ("ttft", "tpot", "itl", "e2el")

_CSV_FIELDS = (
    *("index", "label", "outcome", "message", "intended", "sent", "ended", "input_tokens", "output_tokens"),
    *("asked_tokens", "cached_tokens", "reused_tokens", "finish_reason", "request_id"),
)
_CSV_MEASURES = ("ttft_ms", "ttft_actual_ms", "tpot_ms", "e2el_ms", "lag_ms")
COLUMNS = ("run", "rate", *_CSV_FIELDS, "chunks", *_CSV_MEASURES, "itl_mean_ms", "itl_p99_ms")
_COUNTS = ("index", "input_tokens", "output_tokens", "cached_tokens", "reused_tokens", "asked_tokens")
_MAX_COUNT = 2**63  # JSON integers are unbounded, and arithmetic with floats fails beyond their range
_LATER_TURN = re.compile(r"turn (?!1\b)\d")

T = TypeVar("T")

Verdict = Literal["met", "missed", "behind", "short"]


@dataclass(frozen=True, slots=True)
class Fit:
    """A line y = intercept + slope · x and the standard error of its slope, in the units of the fitted points."""

    intercept: float
    slope: float
    error: float


def linear_fit(clusters: Sequence[Sequence[tuple[float, float]]]) -> Fit | None:
    """Least squares through all points (x, y); None without two different x or with fewer than three clusters.

    The error counts a cluster (a request) as one observation, however many points it has (Liang and Zeger, "Longitudinal
    data analysis using generalized linear models", 1986; with the factor n / (n - 1) for n clusters).
    """
    clusters = [cluster for cluster in clusters if cluster]
    count = sum(map(len, clusters))
    if len(clusters) < 3:
        return None
    mean_x = math.fsum(x for cluster in clusters for x, _ in cluster) / count
    mean_y = math.fsum(y for cluster in clusters for _, y in cluster) / count
    spread = math.fsum((x - mean_x) ** 2 for cluster in clusters for x, _ in cluster)
    if spread <= 0:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for cluster in clusters for x, y in cluster) / spread
    scores = [math.fsum((x - mean_x) * (y - mean_y - slope * (x - mean_x)) for x, y in cluster) for cluster in clusters]
    error = math.sqrt(len(clusters) / (len(clusters) - 1) * math.fsum(score**2 for score in scores)) / spread
    return Fit(mean_y - slope * mean_x, slope, error)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of an ascending, non-empty sequence, linear between order statistics (numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and percentiles of one measure; all None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Summary:
        known = sorted(value for value in values if value is not None)
        if not known:
            return cls()
        return cls(
            mean=math.fsum(known) / len(known), **{f"p{percent}": percentile(known, percent) for percent in PERCENTILES}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One measured request. Times are seconds since the start of the run.

    intended: the scheduled send; sent: the actual one. chunks: arrival of each chunk that carried tokens; ended: when the
    stream closed or failed. output_tokens: from the server's usage, otherwise the number of chunks; asked_tokens: the
    requested number. cached_tokens: prompt tokens found in a cache; reused_tokens: those of them from passages at other
    positions; None where the server reports no such count. outcome: "completed", the kind of failure (a key of the
    report's `errors`), or one of ABANDONED; message: its detail. label: the part of a mixed workload, such as the name of
    a rotary scaling or a turn of a chat. text, token_ids: the response, None unless it is recorded.
    """

    index: int
    intended: float
    sent: float | None = None
    chunks: tuple[float, ...] = ()
    ended: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reused_tokens: int | None = None
    outcome: str = "completed"
    message: str | None = None
    label: str | None = None
    request_id: str | None = None
    asked_tokens: int | None = None
    finish_reason: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def completed(self) -> bool:
        """Whether the stream ended with a finish reason and `[DONE]`, without an error."""
        return self.outcome == "completed"

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from the intended send, so that a late generator counts."""
        return (self.chunks[0] - self.intended) * 1000 if self.chunks else None

    @property
    def ttft_actual_ms(self) -> float | None:
        """Time to first token from the actual send."""
        return (self.chunks[0] - self.sent) * 1000 if self.chunks and self.sent is not None else None

    @property
    def e2el_ms(self) -> float | None:
        """End-to-end latency from the intended send."""
        return (self.ended - self.intended) * 1000 if self.ended is not None else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (last chunk - first chunk) / (tokens - 1)."""
        if self.output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1] - self.chunks[0]) * 1000 / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Gaps between successive chunks. Inter-token latency pools those of all requests."""
        return [(b - a) * 1000 for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def lag_ms(self) -> float | None:
        """Delay of the actual send after the intended one."""
        return None if self.sent is None else (self.sent - self.intended) * 1000

    @property
    def tokens_per_chunk(self) -> float:
        """Output tokens per chunk; 1 where the server did not report any."""
        return self.output_tokens / len(self.chunks) if self.chunks and self.output_tokens else 1.0

    def prompt_share(self, tokens: int | None) -> float | None:
        """A part of the prompt, such as `cached_tokens`, divided by the prompt; None where one of them is unknown."""
        return None if tokens is None or not self.input_tokens else tokens / self.input_tokens

    @property
    def scheduled(self) -> bool:
        """Whether the schedule sets its send. Later turns of a conversation wait for the previous response instead."""
        return _LATER_TURN.match(self.label or "") is None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the record, with lists instead of tuples."""
        data = asdict(self)
        return data | {name: list(data[name]) for name in ("chunks", "token_ids") if data[name] is not None}

    def values(self, measure: str) -> list[float]:
        """Its values of one of MEASURES in ms: the gaps for `itl`, otherwise one value or none."""
        if measure == "itl":
            return self.gaps_ms
        value: float | None = getattr(self, f"{measure}_ms")
        return [] if value is None else [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One measured run.

    records: all requests that were sent or could not be sent. duration_s: from the first intended send to the last end.
    offered_rate: scheduled requests per second, None in a closed loop. settings: the options of the run. server: the
    server's description of itself. server_metrics: changes of its counters and last values of its gauges. slo: limits in
    ms by measure (SLO_MEASURES), empty for none. generator: load and lag of the load generator; `limited` is true where
    it, not the server, was the limit. interrupted: the run was stopped early. started_at: ISO 8601.
    """

    records: tuple[RequestRecord, ...]
    duration_s: float
    offered_rate: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    server_metrics: dict[str, float] = field(default_factory=dict)
    slo: dict[str, float] = field(default_factory=dict)
    generator: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    started_at: str | None = None

    @property
    def start(self) -> float:
        """The first intended send, from which `duration_s` counts."""
        return min((record.intended for record in self.records), default=0.0)

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.completed]

    @property
    def errors(self) -> dict[str, int]:
        """Number of failures by kind."""
        return self._count(lambda outcome: outcome not in ABANDONED)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def abandoned(self) -> dict[str, int]:
        """Number of requests that the load generator ended or could not send, by kind."""
        return self._count(lambda outcome: outcome in ABANDONED)

    def _count(self, counts: Callable[[str], bool]) -> dict[str, int]:
        return dict(Counter(r.outcome for r in self.records if not r.completed and counts(r.outcome)))

    @property
    def pace(self) -> Fit | None:
        """The line through the ends of requests over their intended sends, taken at even intervals; None for fewer than three.

        Its slope is 1 where responses end as far apart as requests were scheduled, and 3 where the server needs three
        seconds for the requests of one.
        """
        served = sorted((r for r in self.records if r.scheduled and _is_served(r)), key=lambda r: r.intended)
        sends = linear_fit([[(float(position), r.intended)] for position, r in enumerate(served)])
        if sends is None or sends.slope <= 0:
            return None
        return linear_fit([[(position * sends.slope, r.ended or 0.0)] for position, r in enumerate(served)])

    @property
    def achieved_rate(self) -> float | None:
        """The rate that the server kept up with, in requests per second: the offered rate less failures, by `pace.slope`.

        None in a closed loop, and where there is no such line.
        """
        scheduled = [record for record in self.records if record.scheduled]
        served = sum(map(_is_served, scheduled))
        if self.offered_rate is None or not scheduled or (served and self.pace is None):
            return None
        slope = self.pace.slope if self.pace is not None else 1.0
        return self.offered_rate * served / len(scheduled) / max(1.0, slope)

    def meets_slo(self, record: RequestRecord) -> bool:
        """Whether a request completed within every limit of `slo`; for `itl` the 99th percentile of its gaps counts."""
        limits = [(record.values(name), self.slo[name]) for name in SLO_MEASURES if name in self.slo]
        return record.completed and all(
            not values or percentile(sorted(values), 99) <= limit for values, limit in limits
        )

    @property
    def attainment(self) -> float:
        """Share of the requests within every SLO. Failed requests are not; abandoned ones do not count."""
        counted = len(self.completed) + self.failed
        return sum(map(self.meets_slo, self.completed)) / counted if counted else 0.0

    def values(self, measure: str) -> list[float]:
        """All values of one of MEASURES over the completed requests, in ms."""
        return [value for record in self.completed for value in record.values(measure)]

    def warnings(self) -> list[str]:
        """Facts to know before relying on the figures: a clause each."""
        found = []
        if self.interrupted:
            found.append(
                "the run was interrupted: the figures cover the time until then, and the last requests may be missing"
            )
        if self.generator.get("limited"):
            reasons = self.generator.get("reasons")
            why = f" ({'; '.join(map(str, reasons))})" if isinstance(reasons, list | tuple) and reasons else ""
            found.append(
                f"the load generator, not the server, was the limit{why}: the server may do better than these figures"
            )
        if self.failed:
            kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(self.errors.items(), key=lambda e: -e[1]))
            found.append(
                f"{self.failed:,} of {len(self.records):,} requests failed ({kinds}): latencies count completed requests "
                "only, so they may be better than what clients experienced"
            )
        short = sum(r.asked_tokens is not None and r.output_tokens < r.asked_tokens for r in self.completed)
        if short:
            found.append(
                f"{short:,} responses were shorter than requested: --ignore-eos makes lengths exact where the server "
                "accepts it"
            )
        return found

    def summary(self) -> dict[str, Any]:
        """The figures of the run as plain data: the top level of its JSON object."""
        done = self.completed
        per_second = 1 / self.duration_s if self.duration_s > 0 else 0.0
        output_tokens = sum(record.output_tokens for record in done)
        return {
            "completed": len(done),
            "failed": self.failed,
            "errors": self.errors,
            "abandoned": self.abandoned,
            "duration_s": self.duration_s,
            "input_tokens": sum(record.input_tokens for record in done),
            "cached_tokens": _total(record.cached_tokens for record in done),
            "reused_tokens": _total(record.reused_tokens for record in done),
            "output_tokens": output_tokens,
            "output_tokens_per_second": output_tokens * per_second,
            "request_rate": len(done) * per_second,
            "offered_rate": self.offered_rate,
            "achieved_rate": self.achieved_rate,
            "goodput": sum(map(self.meets_slo, done)) * per_second if self.slo else None,
            **{f"{measure}_ms": asdict(Summary.of(self.values(measure))) for measure in MEASURES},
            "schedule_lag_ms": asdict(Summary.of(record.lag_ms for record in self.records)),
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the run, requests included."""
        rest = ("settings", "server", "server_metrics", "slo", "generator", "interrupted", "started_at")
        return {
            "format": FORMAT,
            **self.summary(),
            **{name: getattr(self, name) for name in rest},
            "requests": [record.to_dict() for record in self.records],
        }

    @classmethod
    def from_dict(cls, data: Any) -> RunResult:
        """The run of an object that `to_dict` made. Raises ValueError naming the field that is wrong."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(
                f"not the JSON of a load test: its `format` should be {FORMAT!r}, or {SWEEP_FORMAT!r} for a sweep"
            )
        requests = data.get("requests")
        if not isinstance(requests, list):
            raise ValueError("this load test cannot be read: `requests` should be a list")
        run = _parse_checked(cls, {**data, "records": []}, "this load test")
        for name, values in (("slo", run.slo.values()), ("server_metrics", run.server_metrics.values())):
            _check_finite(name, values)
        _check_finite("offered_rate", [run.offered_rate])
        if not 0 <= run.duration_s < math.inf:
            raise ValueError(f"`duration_s` should be a number of seconds from 0, got {run.duration_s:g}")
        records = [_read_record(entry, f"request {position} of the run") for position, entry in enumerate(requests)]
        return replace(run, records=tuple(records))


def _is_served(record: RequestRecord) -> bool:
    """Whether the server did everything it was asked for, also for clients that disconnected as planned."""
    return record.ended is not None and (record.completed or record.outcome == "disconnected")


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum of the known counts, None where none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _parse_checked(cls: type[T], data: Any, what: str) -> T:
    try:
        return parse(cls, data)
    except ValueError as error:
        raise ValueError(f"{what} cannot be read: {str(error).removeprefix(f'{cls.__name__}.')}") from None


def _read_record(entry: Any, what: str) -> RequestRecord:
    record = _parse_checked(RequestRecord, entry, what)
    if unknown := set(entry) - set(RequestRecord.__slots__):
        raise ValueError(f"{what} cannot be read: unknown field `{min(unknown)}`")
    try:
        for name in ("intended", "sent", "ended"):
            _check_finite(name, [getattr(record, name)])
        _check_finite("chunks", record.chunks)
        if any(later < earlier for earlier, later in zip(record.chunks, record.chunks[1:], strict=False)):
            raise ValueError("`chunks` should be ascending")
        for name in _COUNTS:
            if not 0 <= (getattr(record, name) or 0) < _MAX_COUNT:
                raise ValueError(f"`{name}` should be a number from 0 to below 2**63")
    except ValueError as error:
        raise ValueError(f"{what} cannot be read: {error}") from None
    return record


def _check_finite(name: str, values: Iterable[float | None]) -> None:
    if not all(value is None or math.isfinite(value) for value in values):
        raise ValueError(f"`{name}` should hold finite numbers only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a server handled an offered rate.

    offered, achieved: requests per second; achieved is None where it is unknown. attainment: share of the requests within
    every SLO. sending_s: how long requests were sent; needed_s: how long they must be, by the rate and the latency of the
    responses. verdict: "met"; "missed": too few requests within the SLOs; "behind": the server did not keep up with the
    rate; "short": neither showed, in a run too short to show it; None: the run was interrupted, or the load generator
    could not send all requests.
    """

    offered: float
    achieved: float | None
    attainment: float
    sending_s: float
    needed_s: float
    verdict: Verdict | None

    def line(self) -> str:
        """One line of text: "64 requests per second: 20.9 achieved, the server falls behind"."""
        texts = {
            None: "no verdict",
            "met": "meets the SLOs",
            "missed": f"misses the SLOs ({self.attainment:.1%} of the requests within them)",
            "behind": "the server falls behind",
            "short": f"{self.sending_s:.1f} s of sending are too short for these latencies, {self.needed_s:.0f} s are needed",
        }
        achieved = "" if self.achieved is None else f"{self.achieved:,.4g} achieved, "
        return f"{self.offered:,.4g} requests per second: {achieved}{texts[self.verdict]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The result of a search for the highest request rate.

    runs: in the order in which they were made, each with its judgement. highest_rate: the highest rate that met the SLOs,
    None for none. ended: "found"; "runs": the number of runs was reached; "short": a run could not last as long as its
    rate needs; "interrupted"; "generator": the load generator could not send a rate; "failed": the server stopped
    responding.
    """

    runs: tuple[RunResult, ...]
    judgements: tuple[Judgement, ...] = ()
    highest_rate: float | None = None
    slo: dict[str, float] = field(default_factory=dict)
    share: float = 0.99
    ended: str = "found"

    @property
    def interrupted(self) -> bool:
        return self.ended == "interrupted"

    def summary(self) -> dict[str, Any]:
        """The JSON object of the sweep without its runs."""
        return {
            "format": SWEEP_FORMAT,
            "slo": self.slo,
            "share": self.share,
            "highest_rate": self.highest_rate,
            "ended": self.ended,
            "rates": [asdict(judgement) for judgement in self.judgements],
        }

    def to_dict(self) -> dict[str, Any]:
        return {**self.summary(), "runs": [run.to_dict() for run in self.runs]}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run under a name. Runs of one `series` share a line in charts; by default each run has its own."""

    name: str
    result: RunResult
    series: str | None = None

    @property
    def line(self) -> str:
        """The name of its line in charts."""
        return self.name if self.series is None else self.series


def write_json(result: RunResult | SweepResult, path: Path) -> None:
    """Write the JSON object of a run or a sweep, with a line per request. Raises OSError."""
    path.write_text(_to_json(result) + "\n", encoding="utf-8")


def _to_json(result: RunResult | SweepResult) -> str:
    if isinstance(result, SweepResult):
        head, name, entries = result.summary(), "runs", [_to_json(run) for run in result.runs]
    else:
        head, name = result.to_dict(), "requests"
        entries = [json.dumps(entry, allow_nan=False) for entry in head.pop("requests")]
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{text},\n "{name}": [\n' + ",\n".join(entries) + "\n ]\n}"


def write_csv(result: RunResult | SweepResult, path: Path) -> None:
    """Write a row per request under COLUMNS: times in seconds of their run, measures in ms, empty where unknown.

    run: 0, or the number of the run in its sweep. Raises OSError.
    """
    runs = result.runs if isinstance(result, SweepResult) else (result,)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number, run in enumerate(runs):
            writer.writerows([number, run.offered_rate, *_csv_cells(record)] for record in run.records)


def _csv_cells(record: RequestRecord) -> list[object]:
    fields, measures = ([getattr(record, name) for name in names] for names in (_CSV_FIELDS, _CSV_MEASURES))
    gaps = Summary.of(record.gaps_ms)
    return [*fields, len(record.chunks), *measures, gaps.mean, gaps.p99]


def read_json(path: Path) -> RunResult:
    """Read the file of a run. Raises OSError, or ValueError naming the field that is wrong."""
    return RunResult.from_dict(loads(path.read_text(encoding="utf-8")))


def read_file(path: Path) -> RunResult | SweepResult:
    """Read a run, or a sweep without its judgements.

    Raises OSError, or ValueError with one line that does not name the file.
    """
    try:
        data = loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not a JSON file: it is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"not a JSON file: {error}") from None
    if not isinstance(data, Mapping) or data.get("format") not in (SWEEP_FORMAT, _OLD_SWEEP_FORMAT):
        return RunResult.from_dict(data)
    runs = data.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ValueError("this sweep has no `runs`")
    sweep = _parse_checked(SweepResult, {**data, "runs": []}, "this sweep")
    _check_finite("slo", sweep.slo.values())
    _check_finite("highest_rate", [sweep.highest_rate])
    highest_rate = sweep.highest_rate if data["format"] == SWEEP_FORMAT else None
    return replace(sweep, runs=tuple(map(RunResult.from_dict, runs)), highest_rate=highest_rate)


def name_runs(runs: Iterable[RunResult | NamedRun]) -> tuple[NamedRun, ...]:
    """Give every run a unique name: its own, otherwise its rate or its number."""
    given = list(runs)
    names = []
    for number, run in enumerate(given, 1):
        if isinstance(run, NamedRun):
            names.append(run.name)
        elif run.offered_rate is not None:
            names.append(f"{run.offered_rate:.4g} req/s")
        else:
            names.append("run" if len(given) == 1 else f"run {number}")
    return tuple(
        replace(run, name=name) if isinstance(run, NamedRun) else NamedRun(name=name, result=run)
        for run, name in zip(given, unique_names(names), strict=True)
    )


def unique_names(names: Iterable[str]) -> list[str]:
    """The names; repeated ones get a number appended."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in found:
            candidate, number = f"{name} ({number})", number + 1
        found.append(candidate)
    return found
