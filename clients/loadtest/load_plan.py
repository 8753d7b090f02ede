"""The plan of a load test: lengths, scalings, traces, schedules and the workload."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from windlass.clients.loadtest.results import SLO_MEASURES
from windlass.clients.loadtest.target import LoadTestError, Target

MAX_REQUESTS = 10_000_000  # more than one generator can send; beyond it a mistyped rate would exhaust the memory
_DISTRIBUTIONS = ("uniform", "normal", "lognormal")
_LENGTH_FORMS = "128, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD"
_SCALING_FORMS = '\'{"rope_type": "yarn", "factor": 4}\', "yarn 4", the name of a profile, or null'
_TRACE_ALIASES = {
    "input_length": "input_len",
    "input_tokens": "input_len",
    "output_length": "max_tokens",
    "output_len": "max_tokens",
    "output_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers.

    kind: "fixed" (a is the value), "uniform" (from a to b, inclusive), "normal" (mean a, standard deviation b) or
    "lognormal" (mean a and standard deviation b of the length itself, not of its logarithm).
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def fixed(cls, value: int) -> Lengths:
        return cls("fixed", value)

    @classmethod
    def parse(cls, text: str, name: str = "a length", minimum: int = 1) -> Lengths:
        """Parse "128", "uniform:100:200", "normal:500:100" or "lognormal:500:300". Raises LoadTestError with `name`."""
        kind, _, rest = text.strip().partition(":")
        try:
            if kind not in _DISTRIBUTIONS:
                kind, numbers = "fixed", [float(text)]
            else:
                numbers = [float(part) for part in rest.split(":")]
                if len(numbers) != 2:
                    raise ValueError
            if not all(map(math.isfinite, numbers)) or (kind in ("fixed", "uniform") and any(n % 1 for n in numbers)):
                raise ValueError
        except ValueError:
            raise LoadTestError(f"{name}: {text!r} is not a length: write {_LENGTH_FORMS}") from None
        if numbers[0] < minimum:
            raise LoadTestError(f"{name}: a length must be at least {minimum}, got {text}")
        if kind == "uniform" and numbers[1] < numbers[0]:
            raise LoadTestError(f"{name}: uniform:LOW:HIGH needs the lower length first, got {text}")
        if kind in ("normal", "lognormal") and (numbers[1] < 0 or numbers[0] <= 0):
            raise LoadTestError(f"{name}: {kind}:MEAN:SD needs a mean above 0 and a deviation from 0, got {text}")
        return cls(kind, *numbers)

    def sample(self, random: Random, minimum: int = 1, maximum: int | None = None) -> int:
        """One length, clamped to `minimum` and `maximum`."""
        if self.kind == "fixed":
            value = self.a
        elif self.kind == "uniform":
            value = random.randint(int(self.a), int(self.b))
        elif self.kind == "normal":
            value = random.gauss(self.a, self.b)
        else:
            # The parameters of the underlying normal: https://en.wikipedia.org/wiki/Log-normal_distribution
            spread = math.log1p((self.b / self.a) ** 2)
            value = random.lognormvariate(math.log(self.a) - spread / 2, math.sqrt(spread))
        length = max(minimum, round(value))
        return length if maximum is None else min(length, maximum)

    @property
    def minimum(self) -> int:
        """The smallest length that must fit the server. Longer ones are cut to fit."""
        return int(self.a) if self.kind in ("fixed", "uniform") else 1

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g}:{self.b:g}"


@dataclass(frozen=True, slots=True)
class WeightedScaling:
    """A rotary scaling that requests draw, with a relative weight.

    value: an object, the name of a profile, or None for the server's default.
    """

    value: Mapping[str, Any] | str | None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not _is_json_value(self.value):
            raise LoadTestError("a rotary scaling (--rope-scaling) contains NaN or infinity, which JSON does not allow")

    @classmethod
    def parse(cls, text: str) -> WeightedScaling:
        """Parse "JSON", "NAME", "KIND FACTOR" or "null", optionally after "WEIGHT@". Raises LoadTestError."""
        weight = 1.0
        if match := re.match(r"\s*([0-9.eE+-]+)@", text):
            try:
                weight = float(match[1])
            except ValueError:
                weight = math.nan
            if not (math.isfinite(weight) and weight > 0):
                raise LoadTestError(f"--rope-scaling {text}: a weight must be a number above 0, as in 3@null")
            text = text[match.end() :]
        text = text.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            # The name of a profile, or a short form, which the server reads.
            if re.fullmatch(r"[A-Za-z0-9][\w.-]*(\s+([0-9.]+|[a-z_]+=\S+))*", text):
                return cls(text, weight)
            raise LoadTestError(f"--rope-scaling is not valid JSON ({error}): write {_SCALING_FORMS}") from None
        if value is not None and not isinstance(value, dict):
            raise LoadTestError(f"--rope-scaling {text}: write {_SCALING_FORMS}")
        return cls(value, weight)

    def fields(self) -> dict[str, Any]:
        """Fields of a request; none for the server's default."""
        return {} if self.value is None else {"rope_scaling": self.value}

    @property
    def name(self) -> str:
        """A short name for labels."""
        if self.value is None:
            return "server's scaling"
        if isinstance(self.value, str):
            return self.value
        kind = self.value.get("rope_type", "scaling")
        factor = self.value.get("factor")
        return f"{kind} x{factor:g}" if isinstance(factor, int | float) else str(kind)


def _is_json_value(value: Any) -> bool:
    """Whether a value can be sent to a server and written into a report."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One recorded request.

    timestamp: in seconds from any origin; None in a trace without times. prompt: text or token ids; otherwise input_len:
    number of random tokens. max_tokens: tokens to generate. rope_scaling: sent where `has_scaling`.
    """

    line: int
    max_tokens: int
    timestamp: float | None = None
    input_len: int | None = None
    prompt: str | tuple[int, ...] | None = None
    rope_scaling: Any = None
    has_scaling: bool = False


def read_trace(path: Path) -> list[TraceEntry]:
    """The requests of a trace, sorted by time. Raises LoadTestError naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LoadTestError(f"cannot read the trace {path}: {reason}") from error
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line), number))
        except (ValueError, RecursionError) as error:
            what = f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
            raise LoadTestError(f"{path}, line {number}: {what}") from None
        timed, first = entries[-1].timestamp is not None, entries[0].timestamp is not None
        if timed != first:
            raise LoadTestError(
                f"{path}, line {number}: {'has a' if timed else 'has no'} timestamp unlike line {entries[0].line}: "
                "give one in all lines, or in none"
            )
    if not entries:
        raise LoadTestError(f"the trace {path} has no requests: write one JSON object per line")
    return sorted(entries, key=lambda entry: entry.timestamp or 0.0)


def _entry(data: Any, line: int) -> TraceEntry:
    if not isinstance(data, Mapping):
        raise ValueError('should be an object such as {"timestamp": 0.5, "input_len": 100, "max_tokens": 20}')
    found: dict[str, Any] = {}
    for name, value in data.items():
        known = _TRACE_ALIASES.get(name, name)
        if known not in _TRACE_FIELDS:
            raise ValueError(f"has an unknown field {name!r}: the fields are {', '.join(_TRACE_FIELDS)}")
        if known in found:
            raise ValueError(f"has {known} twice, also as {name!r}")
        found[known] = value
    if ("prompt" in found) == ("input_len" in found):
        raise ValueError("needs either a prompt or an input_len")
    if "max_tokens" not in found:
        raise ValueError("has no max_tokens")
    for name, (is_valid, what) in _TRACE_FIELDS.items():
        if name in found and not is_valid(found[name]):
            raise ValueError(f"{name} should be {what}")
    prompt = found.get("prompt")
    return TraceEntry(
        **{**found, "prompt": tuple(prompt) if isinstance(prompt, list) else prompt},
        line=line,
        has_scaling="rope_scaling" in found,
    )


def _is_count(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**31


def _is_timestamp(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e15


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_count(item, 0) for item in value)
    return isinstance(value, str) and bool(value)


# Fields of a line of a trace: check, and description for the error.
_TRACE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "timestamp": (_is_timestamp, "a number of seconds"),
    "input_len": (lambda value: _is_count(value, 1), "a whole number of tokens from 1"),
    "prompt": (_is_prompt, "text or a list of token ids, and not empty"),
    "max_tokens": (lambda value: _is_count(value, 1), "a whole number of tokens from 1"),
    "rope_scaling": (
        lambda value: value is None or (isinstance(value, dict | str) and _is_json_value(value)),
        "a JSON object, the name of a profile, or null",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The requests of a load test.

    input_len, output_len: tokens of a prompt (in a chat: of each message) and of a response. chat: use the chat endpoint.
    prefix_groups, prefix_len: every prompt begins with one of `prefix_groups` texts of `prefix_len` tokens.
    documents, document_len, documents_per_prompt, document_offset: every prompt holds `documents_per_prompt` of the
    `documents`, in random order, after `document_offset` random tokens and before `input_len` random tokens. The length of
    each document is drawn once. Documents that do not fit the server are left out, except for the first.
    turns, think_time: messages of a conversation, and seconds between a response and the next message. ladder: prompt lengths
    from 1,024 tokens, doubling up to the server's limit, in turn. scalings: rotary scalings that requests draw. trace:
    recorded requests instead of drawn ones. disconnect_share, disconnect_after: share of the clients that disconnect after
    that many chunks. temperature: None for the server's default. ignore_eos: request responses of exactly `output_len`
    tokens; None: where the server is known to support the field. usage: request token counts. extra_body: further fields
    of every request, which replace others; null removes a field.

    Raises LoadTestError for values that are out of range or exclude each other.
    """

    input_len: Lengths = field(default_factory=lambda: Lengths.fixed(128))
    output_len: Lengths = field(default_factory=lambda: Lengths.fixed(64))
    chat: bool = False
    prefix_groups: int = 0
    prefix_len: int = 0
    documents: int = 0
    document_len: Lengths = field(default_factory=lambda: Lengths.fixed(0))
    documents_per_prompt: Lengths = field(default_factory=lambda: Lengths.fixed(1))
    document_offset: Lengths = field(default_factory=lambda: Lengths.fixed(0))
    turns: int = 1
    think_time: float = 0.0
    ladder: bool = False
    scalings: Sequence[WeightedScaling] = ()
    trace: Sequence[TraceEntry] = ()
    disconnect_share: float = 0.0
    disconnect_after: int = 1
    temperature: float | None = 0.0
    ignore_eos: bool | None = None
    usage: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.prefix_groups) != bool(self.prefix_len):
            raise LoadTestError("shared prefixes need both a number of groups and a length: give both, or neither")
        if bool(self.documents) != bool(self.document_len.minimum):
            raise LoadTestError("documents need both a number and a length: give both, or neither")
        if self.documents_per_prompt != Lengths.fixed(1) and self.documents < self.documents_per_prompt.minimum:
            raise LoadTestError(
                f"prompts of {self.documents_per_prompt} documents need at least that many documents, got {self.documents}"
            )
        if not 0 <= self.disconnect_share <= 1:
            raise LoadTestError(
                f"the share of clients that disconnect must be in [0, 1], got {self.disconnect_share:g}"
            )
        if self.trace and (self.ladder or self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("a trace has its own lengths: omit prefixes, documents, turns and the ladder")
        if self.ladder and (self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("the ladder sets the lengths: omit prefixes, documents and turns")
        if not _is_json_value(self.temperature):
            raise LoadTestError(f"the temperature must be a number, got {self.temperature:g}")
        if not _is_json_value(self.extra_body):
            raise LoadTestError(
                "the additional fields of requests (--extra-body) contain NaN or infinity, which JSON does not allow"
            )
        minimums = {
            "prefix_groups": 0,
            "prefix_len": 0,
            "documents": 0,
            "turns": 1,
            "think_time": 0,
            "disconnect_after": 1,
        }
        for name, bound in minimums.items():
            if not (getattr(self, name) >= bound and math.isfinite(getattr(self, name))):
                raise LoadTestError(f"{name.replace('_', ' ')} must be at least {bound}, got {getattr(self, name):g}")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at a rate.

    rate: requests per second. burstiness: shape of the gamma distribution of the gaps, whose coefficient of variation is
    1/sqrt(burstiness): 1 is a Poisson process, below 1 arrivals come in bursts, above 1 they are more even; None: constant
    gaps. end_rate, over: the rate changes linearly to `end_rate` in the first `over` seconds, then stays constant.
    """

    rate: float
    burstiness: float | None = 1.0
    end_rate: float | None = None
    over: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.rate] if self.end_rate is None else [self.rate, self.end_rate]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or rates[-1] == 0:
            raise LoadTestError(f"a request rate must be above 0, got {rates[-1] if rates[-1] <= 0 else rates[0]:g}")
        if self.burstiness is not None and not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise LoadTestError(f"the burstiness must be above 0 (1 is Poisson), got {self.burstiness:g}")
        if self.end_rate is not None and not self.over > 0:
            raise LoadTestError("a ramp needs an end: give the run a duration or a number of requests")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        """Requests per second over these of its times; None where it is undefined."""
        return self.rate if self.end_rate is None else _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        """Intended times in seconds, endless, equal for equal seeds: a process of rate 1 with time rescaled to the given rate.

        A Poisson process remains one under such a change of time (Çınlar, Introduction to Stochastic Processes, 1975).
        """
        random = Random(f"{seed}/arrivals")
        passed = 0.0  # expected number of arrivals so far
        while True:
            yield self._time_of(passed)
            passed += 1.0 if self.burstiness is None else random.gammavariate(self.burstiness, 1 / self.burstiness)

    def _time_of(self, count: float) -> float:
        """Time at which the expected number of arrivals reaches `count`: the inverse of the integral of the rate."""
        if self.end_rate is None:
            return count / self.rate
        until_flat = (self.rate + self.end_rate) / 2 * self.over
        if count >= until_flat:
            return self.over + (count - until_flat) / self.end_rate
        slope = (self.end_rate - self.rate) / self.over
        # rate·t + slope·t²/2 = count, solved in a form without cancellation or division by a slope of 0.
        root = math.sqrt(max(0.0, self.rate**2 + 2 * slope * count))
        return 2 * count / (self.rate + root) if count > 0 else 0.0


def ramp(start: float, end: float, count: int | None, seconds: float | None, burstiness: float | None) -> Arrivals:
    """A rate that changes from `start` to `end` over a run of `seconds`, otherwise of `count` requests."""
    if seconds is None and count is not None and start + end > 0:
        seconds = 2 * count / (start + end)
    return Arrivals(start, burstiness, end, seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """Arrivals at given ascending times, shifted to begin at 0. A speed of 2 halves all gaps."""

    timestamps: Sequence[float]
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise LoadTestError(f"the speed of a trace must be above 0, got {self.speed:g}")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        return _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        """Intended times in seconds, ascending from 0."""
        return ((time - self.timestamps[0]) / self.speed for time in self.timestamps)


# Arrivals of an open loop, which do not wait for responses.
Schedule = Arrivals | Replay


def _mean_rate(times: Sequence[float]) -> float | None:
    span = times[-1] - times[0] if times else 0.0
    rate = (len(times) - 1) / span if span > 0 else math.inf
    return rate if math.isfinite(rate) else None


def intended_times(schedule: Schedule, seed: int, count: int | None, seconds: float | None) -> list[float]:
    """The times of a run: at most `count`, all before `seconds`. Raises LoadTestError for more than MAX_REQUESTS."""
    times = schedule.times(seed)
    if seconds is not None:
        times = itertools.takewhile(lambda time: time < seconds, times)
    found = list(itertools.islice(times, MAX_REQUESTS + 1 if count is None else min(count, MAX_REQUESTS + 1)))
    if len(found) > MAX_REQUESTS:
        raise LoadTestError(f"this schedule has more than {MAX_REQUESTS:,} requests: lower the rate or the duration")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One load test.

    schedule: arrivals of an open loop; None for a closed loop. concurrency: clients of a closed loop, each of which sends
    its next request when the previous one has ended; in an open loop the maximum number of requests in flight, None for no
    limit (requests that wait for others are late, and their TTFT from the intended send includes that). count: number of
    conversations (requests, if they have one turn). duration_s: no conversation begins later. At least one of the two is
    needed unless the workload is a trace. warmup: requests before the measured part. timeout_s: per request. ready_s: time
    to wait for a server that is loading. slo: limits in ms by measure (SLO_MEASURES). vocab_size, text_prompts: see
    `workload.find_vocabulary`. keep_text: record texts and token ids. settings: the options, for the report.

    Raises LoadTestError for values that are missing or out of range.
    """

    target: Target
    workload: WorkloadSpec
    schedule: Schedule | None = None
    concurrency: int | None = 1
    count: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    timeout_s: float = 600.0
    ready_s: float = 60.0
    seed: int = 0
    slo: Mapping[str, float] = field(default_factory=dict)
    vocab_size: int | None = None
    text_prompts: bool = False
    keep_text: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count is None and self.duration_s is None and not self.workload.trace:
            raise LoadTestError("a run needs an end: give a number of prompts or a duration")
        if self.schedule is None and self.concurrency is None:
            raise LoadTestError("a closed loop needs a concurrency: give one, or a request rate")
        for name, value, minimum in (
            ("the number of prompts", self.count, 1),
            ("the concurrency", self.concurrency, 1),
            ("the number of warm-up requests", self.warmup, 0),
        ):
            if value is not None and value < minimum:
                raise LoadTestError(f"{name} must be at least {minimum}, got {value}")
        for name, seconds in (("the duration", self.duration_s), ("the timeout", self.timeout_s)):
            if seconds is not None and not seconds > 0:
                raise LoadTestError(f"{name} must be above 0 seconds, got {seconds:g}")
        for measure, limit in self.slo.items():
            if measure not in SLO_MEASURES:
                raise LoadTestError(f"unknown measure {measure!r} of an SLO: use {', '.join(SLO_MEASURES)}")
            if not 0 < limit < math.inf:
                raise LoadTestError(f"the SLO for {measure} must be a number of ms above 0, got {limit:g}")
