"""A load test as a plan: lengths, scalings, traces, schedules and the workload."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from windlass.clients.loadtest.target import LoadTestError, Target


def is_json_value(value: Any) -> bool:
    """Whether a value can be sent to a server and written into a report."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


_DISTRIBUTIONS = {"uniform": ("LOW", "HIGH"), "normal": ("MEAN", "SD"), "lognormal": ("MEAN", "SD")}

_SPELLINGS = "128, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers.

    kind: "fixed" (a is the value), "uniform" (from a to b, both included), "normal" (mean a, standard deviation b) or
    "lognormal" (a and b are the mean and the standard deviation of the length itself, not of its logarithm).
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def fixed(cls, value: int) -> Lengths:
        """Always `value`."""
        return cls("fixed", value)

    @classmethod
    def parse(cls, text: str, name: str = "a length", minimum: int = 1) -> Lengths:
        """From "128", "uniform:100:200", "normal:500:100" or "lognormal:500:300". Raises LoadTestError naming `name`."""
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
            raise LoadTestError(f"{name}: {text!r} is no length: write {_SPELLINGS}") from None
        if numbers[0] < minimum:
            raise LoadTestError(f"{name}: lengths begin at {minimum}, got {text}")
        if kind == "uniform" and numbers[1] < numbers[0]:
            raise LoadTestError(f"{name}: uniform:LOW:HIGH wants the lower length first, got {text}")
        if kind in ("normal", "lognormal") and (numbers[1] < 0 or numbers[0] <= 0):
            raise LoadTestError(f"{name}: {kind}:MEAN:SD wants a mean above 0 and no negative deviation, got {text}")
        return cls(kind, *numbers)

    def sample(self, random: Random, minimum: int = 1, maximum: int | None = None) -> int:
        """One length, between `minimum` and `maximum`: what the distribution puts outside is moved to the bound."""
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
        """The smallest value it must be able to give: what has to fit in any case."""
        return int(self.a) if self.kind in ("fixed", "uniform") else 1

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g}:{self.b:g}"


_EXAMPLE = '\'{"rope_type": "yarn", "factor": 4}\', the name of a profile, or null'


@dataclass(frozen=True, slots=True)
class WeightedScaling:
    """value: an object, the name of a profile, or None for the server's own. weight: how often, against the others."""

    value: Mapping[str, Any] | str | None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not is_json_value(self.value):
            raise LoadTestError("a rotary scaling (--rope-scaling) holds NaN or infinity, which no JSON has")

    @classmethod
    def parse(cls, text: str) -> WeightedScaling:
        """From "JSON", "NAME" or "null", each also as "WEIGHT@…". Raises LoadTestError."""
        weight = 1.0
        if match := re.match(r"\s*([0-9.eE+-]+)@", text):
            try:
                weight = float(match[1])
            except ValueError:
                weight = math.nan
            if not (math.isfinite(weight) and weight > 0):
                raise LoadTestError(f"--rope-scaling {text}: a weight is a number above 0, as in 3@null")
            text = text[match.end() :]
        text = text.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
                return cls(text, weight)
            raise LoadTestError(f"--rope-scaling is not valid JSON ({error}): write {_EXAMPLE}") from None
        if value is not None and not isinstance(value, dict):
            raise LoadTestError(f"--rope-scaling {text}: write {_EXAMPLE}")
        return cls(value, weight)

    def fields(self) -> dict[str, Any]:
        """The fields of a request; no field asks for the server's own scaling."""
        return {} if self.value is None else {"rope_scaling": self.value}

    @property
    def name(self) -> str:
        """Short, for labels."""
        if self.value is None:
            return "server's scaling"
        if isinstance(self.value, str):
            return self.value
        kind = self.value.get("rope_type", "scaling")
        factor = self.value.get("factor")
        return f"{kind} x{factor:g}" if isinstance(factor, int | float) else str(kind)


_ALIASES = {
    "input_length": "input_len",
    "input_tokens": "input_len",
    "output_length": "max_tokens",
    "output_len": "max_tokens",
    "output_tokens": "max_tokens",
}

_FIELDS = ("timestamp", "input_len", "prompt", "max_tokens", "rope_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One recorded request.

    timestamp: seconds, on any clock that all lines share; None in a trace without times. Either `prompt` (text, or token
    ids) or `input_len` (tokens, drawn at random). max_tokens: tokens to generate. rope_scaling: sent where `has_scaling`.
    """

    line: int
    max_tokens: int
    timestamp: float | None = None
    input_len: int | None = None
    prompt: str | tuple[int, ...] | None = None
    rope_scaling: Any = None
    has_scaling: bool = False


def read_trace(path: Path) -> list[TraceEntry]:
    """The requests of a trace, by time. Raises LoadTestError naming the file and the line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"cannot read the trace {path}: {error}") from error
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
                f"all lines need one, or none"
            )
    if not entries:
        raise LoadTestError(f"the trace {path} holds no requests: write one JSON object a line")
    return sorted(entries, key=lambda entry: entry.timestamp or 0.0)


def _entry(data: Any, line: int) -> TraceEntry:
    if not isinstance(data, Mapping):
        raise ValueError('should be an object such as {"timestamp": 0.5, "input_len": 100, "max_tokens": 20}')
    found: dict[str, Any] = {}
    for name, value in data.items():
        known = _ALIASES.get(name, name)
        if known not in _FIELDS:
            raise ValueError(f"does not know the field {name!r}: the fields are {', '.join(_FIELDS)}")
        if known in found:
            raise ValueError(f"gives {known} twice, as {name!r} too")
        found[known] = value
    if ("prompt" in found) == ("input_len" in found):
        raise ValueError("wants either a prompt or an input_len")
    if "max_tokens" not in found:
        raise ValueError("has no max_tokens")
    for name, (fits, what) in _CHECKS.items():
        if name in found and not fits(found[name]):
            raise ValueError(f"{name} should be {what}")
    prompt = found.get("prompt")
    return TraceEntry(
        **{**found, "prompt": tuple(prompt) if isinstance(prompt, list) else prompt},
        line=line,
        has_scaling="rope_scaling" in found,
    )


def _whole(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**31


def _is_timestamp(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e15


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_whole(item, 0) for item in value)
    return isinstance(value, str) and bool(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "timestamp": (_is_timestamp, "seconds, as a number"),
    "input_len": (lambda value: _whole(value, 1), "a whole number of tokens from 1"),
    "max_tokens": (lambda value: _whole(value, 1), "a whole number of tokens from 1"),
    "prompt": (_is_prompt, "text or a list of token ids, and not empty"),
    "rope_scaling": (
        lambda value: value is None or (isinstance(value, dict | str) and is_json_value(value)),
        "an object of JSON, the name of a profile, or null",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What to ask.

    input_len, output_len: tokens of a prompt (of one turn's own message in a chat) and of an answer. chat: use the chat
    endpoint. prefix_groups, prefix_len: every prompt begins with one of so many texts of so many tokens.
    documents, document_len, document_offset: every prompt holds `documents_per_prompt` of so many documents, each of a length
    of its own, in an order of its own, after `document_offset` fresh tokens and before `input_len` fresh ones. Documents that
    no longer fit the server are left out, but for the first. turns, think_s: messages of one conversation, and the seconds
    between an answer and the next message. ladder: lengths from 1,024 tokens, doubling, to the server's limit, in turn.
    scalings: rotary scalings that requests draw from. trace: recorded requests instead of drawn lengths.
    disconnect_share, disconnect_after: the share of clients that go away after so many chunks.
    temperature: None to leave it to the server. ignore_eos: ask for answers of exactly `output_len` tokens;
    None where the server is known to take the field.
    extra_body: further fields of every request, which win over ours; null takes a field out.
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
    think_s: float = 0.0
    ladder: bool = False
    scalings: Sequence[WeightedScaling] = ()
    trace: Sequence[TraceEntry] = ()
    disconnect_share: float = 0.0
    disconnect_after: int = 1
    temperature: float | None = 0.0
    ignore_eos: bool | None = None
    include_usage: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.prefix_groups) != bool(self.prefix_len):
            raise LoadTestError("shared prefixes want both a number of groups and a length: give both, or neither")
        if bool(self.documents) != bool(self.document_len.minimum):
            raise LoadTestError("documents want both a number and a length: give both, or neither")
        if self.documents_per_prompt != Lengths.fixed(1) and self.documents < self.documents_per_prompt.minimum:
            raise LoadTestError(
                f"prompts of {self.documents_per_prompt} documents want as many to choose from: there are {self.documents}"
            )
        if not 0 <= self.disconnect_share <= 1:
            raise LoadTestError(
                f"the share of clients that go away lies between 0 and 1, got {self.disconnect_share:g}"
            )
        if self.trace and (self.ladder or self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("a trace brings its own lengths: leave prefixes, documents, turns and the ladder out")
        if self.ladder and (self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("the ladder sets the lengths itself: leave prefixes, documents and turns out")
        if not is_json_value(self.temperature):
            raise LoadTestError(f"the temperature must be a number, got {self.temperature:g}")
        if not is_json_value(self.extra_body):
            raise LoadTestError("the further fields of requests (--extra-body) hold NaN or infinity, which no JSON has")
        minimum = {"prefix_groups": 0, "prefix_len": 0, "documents": 0, "turns": 1, "think_s": 0}
        minimum |= {"disconnect_after": 1}
        for name, bound in minimum.items():
            if not (getattr(self, name) >= bound and math.isfinite(getattr(self, name))):
                raise LoadTestError(f"{name.replace('_', ' ')} must be at least {bound}, got {getattr(self, name):g}")


MAX_REQUESTS = 10_000_000  # more than one generator can send; beyond it a mistyped rate would fill the memory


class Schedule(Protocol):
    """An open loop: arrivals that do not wait for answers."""

    def offered_rate(self, times: Sequence[float]) -> float | None:
        """Requests per second that it asks for by these times of its own; None where there is no such number."""

    def times(self, seed: int) -> Iterator[float]:
        """Intended times, ascending from 0; the same ones for the same seed. Endless unless the schedule itself ends."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at a rate.

    rate: requests per second. burstiness: the shape of the gamma distribution that gaps are drawn from, whose
    coefficient of variation is 1/sqrt(burstiness): 1 is a Poisson process, below 1 comes in bursts, above 1 is more
    even; None: constant gaps. end_rate, over: the rate changes linearly to `end_rate` in the first `over` seconds and
    stays there.
    """

    rate: float
    burstiness: float | None = 1.0
    end_rate: float | None = None
    over: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.rate] if self.end_rate is None else [self.rate, self.end_rate]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or rates[-1] == 0:
            raise LoadTestError(
                f"a request rate must be more than 0, got {rates[-1] if rates[-1] <= 0 else rates[0]:g}"
            )
        if self.burstiness is not None and not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise LoadTestError(f"the burstiness must be more than 0 (1 is Poisson), got {self.burstiness:g}")
        if self.end_rate is not None and not self.over > 0:
            raise LoadTestError("a ramp needs a time to run over: give the run a duration or a number of requests")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        return self.rate if self.end_rate is None else _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        """Arrivals of a process of rate 1, their times stretched so that the rate becomes the wanted one.

        A Poisson process stays one under such a change of time (Çınlar, Introduction to Stochastic Processes, 1975).
        """
        random = Random(f"{seed}/arrivals")
        passed = 0.0  # arrivals expected until now
        while True:
            yield self._time_of(passed)
            passed += 1.0 if self.burstiness is None else random.gammavariate(self.burstiness, 1 / self.burstiness)

    def _time_of(self, count: float) -> float:
        """When the expected number of arrivals reaches `count`: the inverse of the integral of the rate."""
        if self.end_rate is None:
            return count / self.rate
        until_flat = (self.rate + self.end_rate) / 2 * self.over
        if count >= until_flat:
            return self.over + (count - until_flat) / self.end_rate
        slope = (self.end_rate - self.rate) / self.over
        # rate·t + slope·t²/2 = count, solved in the form that neither cancels nor divides by a slope of 0.
        root = math.sqrt(max(0.0, self.rate**2 + 2 * slope * count))
        return 2 * count / (self.rate + root) if count > 0 else 0.0


def ramp(start: float, end: float, count: int | None, seconds: float | None, burstiness: float | None) -> Arrivals:
    """A rate that goes from `start` to `end` over the whole run, bounded by `seconds` or by `count` requests."""
    if seconds is None and count is not None and start + end > 0:
        seconds = 2 * count / (start + end)
    return Arrivals(start, burstiness, end, seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """Given times, ascending; `speed` 2 replays them in half the time. Its first request is sent at 0."""

    timestamps: Sequence[float]
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise LoadTestError(f"the speed of a trace must be more than 0, got {self.speed:g}")

    def offered_rate(self, times: Sequence[float]) -> float | None:
        return _mean_rate(times)

    def times(self, seed: int) -> Iterator[float]:
        return ((time - self.timestamps[0]) / self.speed for time in self.timestamps)


def _mean_rate(times: Sequence[float]) -> float | None:
    span = times[-1] - times[0] if times else 0.0
    rate = (len(times) - 1) / span if span > 0 else math.inf
    return rate if math.isfinite(rate) else None


def intended_times(schedule: Schedule, seed: int, count: int | None, seconds: float | None) -> list[float]:
    """All times of a bounded run: at most `count` of them, none at `seconds` or later. Raises LoadTestError for too many."""
    times = schedule.times(seed)
    if seconds is not None:
        times = itertools.takewhile(lambda time: time < seconds, times)
    found = list(itertools.islice(times, MAX_REQUESTS + 1 if count is None else min(count, MAX_REQUESTS + 1)))
    if len(found) > MAX_REQUESTS:
        raise LoadTestError(f"this schedule holds more than {MAX_REQUESTS:,} requests: lower the rate or the duration")
    return found


SLO_MEASURES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One load test.

    schedule: arrivals of an open loop; None for a closed loop. concurrency: clients of a closed loop, each of which
    sends its next request when its last has ended; in an open loop the most requests in flight, None for no bound (a
    request that waits for others is late, and its TTFT from the intended send says so). count: conversations (requests,
    where they have one turn); duration_s: none begins later. At least one of the two, or a workload that ends. warmup:
    requests before the measured part. timeout_s: for each request. slo: limits in ms by measure (ttft, tpot, itl, e2el).
    vocab_size, text_prompts: see vocabulary.py. keep_text: record texts and token ids. settings: what
    was asked for, as the report shows it.

    Raises LoadTestError for bounds that make no run.
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
                raise LoadTestError(f"{name} must be more than 0 seconds, got {seconds:g}")
        for measure, limit in self.slo.items():
            if measure not in SLO_MEASURES:
                raise LoadTestError(f"no SLO can be set for {measure!r}: there are {', '.join(SLO_MEASURES)}")
            if not 0 < limit < math.inf:
                raise LoadTestError(f"the SLO for {measure} must be a number of ms above 0, got {limit:g}")
