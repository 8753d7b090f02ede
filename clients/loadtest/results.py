"""Results of load tests: records, summaries, and their files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Fit:
    """A line y = intercept + slope · x and the standard error of its slope, in the units of what was fitted."""

    intercept: float
    slope: float
    error: float


def linear_fit(clusters: Sequence[Sequence[tuple[float, float]]]) -> Fit | None:
    """Least squares through all points (x, y); None without two different x or with fewer than three clusters.

    The error takes a cluster (a request) as one observation, however many points it has (Liang and Zeger, "Longitudinal
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
    pulls = [math.fsum((x - mean_x) * (y - mean_y - slope * (x - mean_x)) for x, y in cluster) for cluster in clusters]
    error = math.sqrt(len(clusters) / (len(clusters) - 1) * math.fsum(pull**2 for pull in pulls)) / spread
    return Fit(mean_y - slope * mean_x, slope, error)


FORMAT = "windlass-bench/1"

PERCENTILES = (50, 90, 95, 99)

_LATER_TURN = re.compile(r"turn (?!1\b)\d")

# Requests that this side ended, or could not send: neither completed nor failed.
ABANDONED = frozenset({"disconnected", "interrupted", "unsent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as it went.

    outcome: "completed", the kind of failure (a key of the report's `errors`), or one of ABANDONED; message: its detail.
    intended: when the schedule wanted it sent; sent: when it was. chunks: arrival of each chunk that carried tokens;
    ended: when the stream closed or failed. output_tokens: what the server's usage says, else the chunks; asked_tokens:
    how many were asked for. cached_tokens: of the prompt, found in a cache; reused_tokens: those of them from passages
    that stood elsewhere in other prompts; None where the server tells no such count. label: which part of a mixed
    workload, such as the name of a rotary scaling or a turn of a chat. text, token_ids: of the answer, None unless they
    were to be kept.
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
        """Whether it ended properly: a finish reason, `[DONE]`, no error."""
        return self.outcome == "completed"

    @property
    def ttft_ms(self) -> float | None:
        """First token from the intended send, so that waiting for a late generator counts."""
        return (self.chunks[0] - self.intended) * 1000 if self.chunks else None

    @property
    def ttft_actual_ms(self) -> float | None:
        """First token from the actual send."""
        return (self.chunks[0] - self.sent) * 1000 if self.chunks and self.sent is not None else None

    @property
    def e2el_ms(self) -> float | None:
        """The whole request from the intended send."""
        return (self.ended - self.intended) * 1000 if self.ended is not None else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (latency - TTFT) / (tokens - 1), to the last token."""
        if self.output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1] - self.chunks[0]) * 1000 / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """The gaps between its chunks: what inter-token latency pools over all requests."""
        return [(b - a) * 1000 for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def cached_share(self) -> float | None:
        """How much of the prompt was found in a cache."""
        return _ratio(self.cached_tokens, self.input_tokens)

    @property
    def reused_share(self) -> float | None:
        """How much of the prompt was taken from passages that stood elsewhere; a part of `cached_share`."""
        return _ratio(self.reused_tokens, self.input_tokens)

    @property
    def scheduled(self) -> bool:
        """Whether the schedule says when it is sent, and not, as with later turns of a conversation, an earlier answer."""
        return _LATER_TURN.match(self.label or "") is None

    @property
    def lag_ms(self) -> float | None:
        """How much later than intended it was sent."""
        return None if self.sent is None else (self.sent - self.intended) * 1000


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
        """Percentiles by linear interpolation between order statistics, as numpy's default has it."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return cls()
        return cls(
            mean=math.fsum(known) / len(known), **{f"p{percent}": percentile(known, percent) for percent in PERCENTILES}
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of an ascending, non-empty sequence, linear between order statistics."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One measured run.

    records: all requests that were begun or failed to begin. duration_s: from the first intended send to the last end.
    offered_rate: requests per second the schedule asked for, None in a closed loop. settings: what was asked for.
    server: what the server says of itself. server_metrics: changes of its counters and last gauges. slo: limits in ms
    by measure (ttft, tpot, itl, e2el), empty for none. generator: how the load generator itself fared, with `limited`
    true where it, not the server, was the limit. interrupted: it was cut short and holds what came before.
    """

    records: tuple[RequestRecord, ...]
    duration_s: float
    offered_rate: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    slo: Mapping[str, float] = field(default_factory=dict)
    generator: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    started_at: str | None = None  # ISO 8601

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.completed]

    @property
    def errors(self) -> dict[str, int]:
        """Failures by kind."""
        return self._count(lambda outcome: outcome not in ABANDONED)

    @property
    def abandoned(self) -> dict[str, int]:
        """Requests that this side ended or could not send, by kind."""
        return self._count(lambda outcome: outcome in ABANDONED)

    @property
    def pace(self) -> Fit | None:
        """The line through when requests ended over when they were to be sent, the gaps between sends made even; None for
        fewer than three.

        Its slope is 1 where answers end as far apart as requests were meant to come, 3 where a second of them takes three.
        """
        served = sorted((r for r in self.records if r.scheduled and _is_served(r)), key=lambda r: r.intended)
        sends = linear_fit([[(float(position), r.intended)] for position, r in enumerate(served)])
        if sends is None or sends.slope <= 0:
            return None
        return linear_fit([[(position * sends.slope, r.ended or 0.0)] for position, r in enumerate(served)])

    @property
    def achieved_rate(self) -> float | None:
        """Requests per second that the server kept up with: the offered rate less what failed, by the slope of `pace`.

        None in a closed loop, and where there is no such line.
        """
        scheduled = [record for record in self.records if record.scheduled]
        served = sum(map(_is_served, scheduled))
        if self.offered_rate is None or not scheduled or (served and self.pace is None):
            return None
        slope = self.pace.slope if self.pace is not None else 1.0
        return self.offered_rate * served / len(scheduled) / max(1.0, slope)

    def _count(self, wanted: Callable[[str], bool]) -> dict[str, int]:
        return dict(Counter(r.outcome for r in self.records if not r.completed and wanted(r.outcome)))

    def meets_slo(self, record: RequestRecord) -> bool:
        """Whether a request completed inside every limit of `slo`; its own p99 of gaps stands for itl."""
        if not record.completed:
            return False
        measured = {
            "ttft": record.ttft_ms,
            "tpot": record.tpot_ms,
            "itl": Summary.of(record.gaps_ms).p99,
            "e2el": record.e2el_ms,
        }
        return all(value is None or value <= self.slo[name] for name, value in measured.items() if name in self.slo)

    def summary(self) -> dict[str, Any]:
        """The figures of the run as plain data: the top level of its JSON."""
        done, errors = self.completed, self.errors
        per_second = 1 / self.duration_s if self.duration_s > 0 else 0.0
        output_tokens = sum(record.output_tokens for record in done)
        return {
            "completed": len(done),
            "failed": sum(errors.values()),
            "errors": errors,
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
            "ttft_ms": asdict(Summary.of(record.ttft_ms for record in done)),
            "ttft_actual_ms": asdict(Summary.of(record.ttft_actual_ms for record in done)),
            "tpot_ms": asdict(Summary.of(record.tpot_ms for record in done)),
            "itl_ms": asdict(Summary.of(gap for record in done for gap in record.gaps_ms)),
            "e2el_ms": asdict(Summary.of(record.e2el_ms for record in done)),
            "schedule_lag_ms": asdict(Summary.of(record.lag_ms for record in self.records)),
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the run, requests included."""
        rest = ("settings", "server", "server_metrics", "slo", "generator", "interrupted", "started_at")
        return {
            "format": FORMAT,
            **self.summary(),
            **{name: getattr(self, name) for name in rest},
            "requests": [asdict(record) for record in self.records],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunResult:
        """The run behind such an object. Raises ValueError naming what is not as it should be."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(f"not the JSON of a load test (its `format` should be {FORMAT!r})")
        try:
            records = tuple(_record(entry) for entry in data["requests"])
            names = set(cls.__slots__) - {"records"}
            return cls(records=records, **{name: data[name] for name in names if name in data})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the JSON of this load test cannot be read: {error}") from error


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum of what is known, None where nothing is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _is_served(record: RequestRecord) -> bool:
    """Whether the server did all it was asked for: of clients that left, as much as they wanted."""
    return record.ended is not None and (record.completed or record.outcome == "disconnected")


def _record(entry: Mapping[str, Any]) -> RequestRecord:
    lists = {name: tuple(entry[name]) for name in ("chunks", "token_ids") if entry.get(name) is not None}
    return RequestRecord(**{**entry, **lists})


def write_json(result: RunResult, path: Path) -> None:
    """Write the run's JSON object to `path`, a line per request. Raises OSError."""
    path.write_text(to_json(result) + "\n", encoding="utf-8")


def to_json(result: RunResult) -> str:
    """The JSON object of the run as text, a line per request."""
    rest = result.to_dict()
    requests = [json.dumps(entry, allow_nan=False) for entry in rest.pop("requests")]
    head = json.dumps(rest, indent=1, allow_nan=False).removesuffix("\n}")
    return head + ',\n "requests": [\n' + ",\n".join(requests) + "\n ]\n}"


def read_json(path: Path) -> RunResult:
    """Read a run back. Raises OSError, or ValueError saying what is wrong with the file."""
    return RunResult.from_dict(json.loads(path.read_text(encoding="utf-8")))


SWEEP_FORMAT = "windlass-bench-sweep/2"

_OLD_SWEEP_FORMAT = "windlass-bench-sweep/1"  # its highest rate was one whose answers were in time, kept up with or not

_Number = int | float

_MAX_NUMBER = 2**63  # whole numbers in a file have no bound, and beyond that of a float arithmetic fails


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run and what a reader calls it. series: runs of one series share a line in charts; by default each has its own."""

    name: str
    result: RunResult
    series: str | None = None

    @property
    def line(self) -> str:
        """The series it belongs to."""
        return self.name if self.series is None else self.series


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """The contents of one file. sweep: whether it is one; highest_rate: the highest rate in requests per second that
    met `slo` (limits in ms by measure), None where none did or none was searched for."""

    runs: tuple[NamedRun, ...]
    sweep: bool = False
    slo: Mapping[str, float] = field(default_factory=dict)
    highest_rate: float | None = None


def read_file(path: Path) -> ResultFile:
    """A run, named after the file, or a sweep, its runs named after their rates.

    Raises OSError, or ValueError whose one line says what is wrong, without the file's name.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not a JSON file: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON file: {error}") from None
    if isinstance(data, Mapping) and data.get("format") in (SWEEP_FORMAT, _OLD_SWEEP_FORMAT):
        return _read_sweep(data)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(
            f"not the JSON of a load test: its `format` should be {FORMAT!r}, or {SWEEP_FORMAT!r} for a sweep"
        )
    result = read_run(data)
    return ResultFile(runs=(NamedRun(name=path.stem, result=result),), slo=result.slo)


def read_run(data: Mapping[str, Any]) -> RunResult:
    """RunResult.from_dict, and a look at every type, so that arithmetic on it cannot fail. Raises ValueError."""
    result = RunResult.from_dict(data)
    _check_run(result)
    return result


def _read_sweep(data: Mapping[str, Any]) -> ResultFile:
    runs = data.get("runs")
    if not isinstance(runs, Sequence) or isinstance(runs, str) or not runs:
        raise ValueError("this sweep holds no `runs`")
    highest = data.get("highest_rate") if data["format"] == SWEEP_FORMAT else None
    slo = data.get("slo") or {}
    if not _is_number(highest, optional=True):
        raise ValueError("the sweep's `highest_rate` is not a number")
    _check_numbers("slo", slo)
    results = [read_run(run) for run in runs]
    names = unique_names(_rate_name(result, index) for index, result in enumerate(results, 1))
    return ResultFile(
        runs=tuple(NamedRun(name=name, result=result) for name, result in zip(names, results, strict=True)),
        sweep=True,
        slo=slo,
        highest_rate=highest,
    )


def _rate_name(result: RunResult, index: int) -> str:
    return f"run {index}" if result.offered_rate is None else f"{result.offered_rate:.4g} req/s"


def unique_names(names: Iterable[str]) -> list[str]:
    """The names, those that repeat with a number behind them."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in found:
            candidate, number = f"{name} ({number})", number + 1
        found.append(candidate)
    return found


def _check_run(run: RunResult) -> None:
    if not _is_number(run.duration_s) or run.duration_s < 0:
        raise ValueError("the run's `duration_s` is not a length of time")
    if not _is_number(run.offered_rate, optional=True):
        raise ValueError("the run's `offered_rate` is not a number")
    for name in ("settings", "server", "generator"):
        if not isinstance(getattr(run, name), Mapping):
            raise ValueError(f"the run's `{name}` is not an object")
    _check_numbers("slo", run.slo)
    _check_numbers("server_metrics", run.server_metrics)
    for position, record in enumerate(run.records):
        fault = _invalid_field(record)
        if fault:
            raise ValueError(f"request {position} of the run has a wrong `{fault}`")


def _invalid_field(record: RequestRecord) -> str | None:
    """The first field that is not what it should be."""
    if not _is_number(record.intended):
        return "intended"
    for name in ("sent", "ended"):
        if not _is_number(getattr(record, name), optional=True):
            return name
    if not all(map(_is_number, record.chunks)):
        return "chunks"
    if any(later < earlier for earlier, later in zip(record.chunks, record.chunks[1:], strict=False)):
        return "chunks"
    for name in ("index", "input_tokens", "output_tokens"):
        if not _is_count(getattr(record, name)):
            return name
    for name in ("cached_tokens", "reused_tokens", "asked_tokens"):
        if not (getattr(record, name) is None or _is_count(getattr(record, name))):
            return name
    for name in ("message", "label"):
        if not isinstance(getattr(record, name), str | None):
            return name
    return None if isinstance(record.outcome, str) else "outcome"


def _check_numbers(name: str, values: object) -> None:
    if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
        raise ValueError(f"the run's `{name}` is not an object of numbers")


def _is_number(value: object, *, optional: bool = False) -> bool:
    if value is None:
        return optional
    if isinstance(value, bool) or not isinstance(value, _Number):
        return False
    return abs(value) < _MAX_NUMBER if isinstance(value, int) else math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER
