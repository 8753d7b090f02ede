"""`windlass top`: live metrics of a running server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from windlass.clients import APIError, APIStatusError, Client, RateLimitError, RetryPolicy, ServerError
from windlass.clients.terminal import CommandError, discard_output, is_output_closed, print_status
from windlass.clients.types import Metrics
from windlass.engine.errors import with_place
from windlass.server.cli.parameters import with_key_hint

_PREFIX = "windlass_"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """Metrics of a server at one moment. at: seconds on the monotonic clock. state: as in its /health."""

    at: float
    state: str
    metrics: Metrics

    @property
    def is_windlass(self) -> bool:
        """Whether the metrics have Windlass's names."""
        return self.metrics.value(_PREFIX + "engine_up") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One rotary scaling: its running requests, and tokens per second of their prompts and answers."""

    name: str
    running: int
    prompt_rate: float
    generated_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalStats:
    """Statistics of an interval of `seconds`; rates are per second. None: not reported by the server.

    prefix_hits: share of the queried prompt tokens that were cached. Latencies: seconds at each of QUANTILES, None without
    observations in the interval.
    """

    seconds: float
    state: str
    running: int | None
    waiting: int | None
    prompt_rate: float | None
    generated_rate: float | None
    finished_rate: float
    failed_rate: float
    blocks: int | None
    blocks_used: int | None
    cache_usage: float | None
    prefix_hits: float | None
    first_token: tuple[float, ...] | None
    between_tokens: tuple[float, ...] | None
    loop_lag: tuple[float, ...] | None
    restarts: int
    preempted: float
    scalings: tuple[Scaling, ...]


def interval_stats(before: MetricsSnapshot, after: MetricsSnapshot) -> IntervalStats:
    """Statistics between two snapshots of one server."""
    seconds = max(after.at - before.at, 1e-9)
    first, last = before.metrics, after.metrics

    def counter_growth(name: str, **labels: str) -> float | None:
        """The sum over engines, each of which may have restarted."""
        found = [s for s in last.samples if s.name == _PREFIX + name and s.labels.items() >= labels.items()]
        growths = [_growth(first.value(s.name, **s.labels), s.value) or 0.0 for s in found]
        return sum(growths) if found else None

    def rate(name: str, **labels: str) -> float | None:
        growth = counter_growth(name, **labels)
        return None if growth is None else growth / seconds

    def gauge(name: str) -> int | None:
        value = last.value(_PREFIX + name)
        return None if value is None else round(value)

    looked_up = counter_growth("prefix_cache_queries_total")
    return IntervalStats(
        seconds=seconds,
        state=after.state,
        running=gauge("num_requests_running"),
        waiting=gauge("num_requests_waiting"),
        prompt_rate=rate("prompt_tokens_total"),
        generated_rate=rate("generation_tokens_total"),
        finished_rate=rate("request_success_total") or 0.0,
        failed_rate=rate("request_errors_total") or 0.0,
        blocks=gauge("kv_blocks"),
        blocks_used=gauge("kv_blocks_used"),
        cache_usage=max((s.value for s in last.samples if s.name == _PREFIX + "kv_cache_usage_perc"), default=None),
        prefix_hits=(counter_growth("prefix_cache_hits_total") or 0.0) / looked_up if looked_up else None,
        first_token=_quantiles(first, last, "time_to_first_token_seconds"),
        between_tokens=_quantiles(first, last, "inter_token_latency_seconds"),
        loop_lag=_quantiles(first, last, "event_loop_lag_seconds"),
        restarts=gauge("engine_restarts_total") or 0,
        preempted=counter_growth("num_preemptions_total") or 0.0,
        scalings=tuple(
            Scaling(
                name=name,
                running=round(last.value(_PREFIX + "scaling_requests_running", scaling=name) or 0),
                prompt_rate=rate("scaling_tokens_total", scaling=name, kind="prompt") or 0.0,
                generated_rate=rate("scaling_tokens_total", scaling=name, kind="generated") or 0.0,
            )
            for name in _labels(last, "scaling_requests_running", "scaling")
        ),
    )


def _growth(before: float | None, after: float | None) -> float | None:
    """Growth of a counter. A smaller value means that the process restarted and counts from 0."""
    if after is None:
        return None
    return after - before if before is not None and after >= before else after


def _labels(metrics: Metrics, name: str, label: str) -> list[str]:
    found = (sample.labels.get(label) for sample in metrics.samples if sample.name == _PREFIX + name)
    return sorted({value for value in found if value is not None})


def _quantiles(before: Metrics, after: Metrics, name: str) -> tuple[float, ...] | None:
    earlier, later = _buckets(before, name), _buckets(after, name)
    if any(later[bound] < earlier.get(bound, 0.0) for bound in later):
        earlier = {}
    bounds = sorted(later)
    counts = [later[bound] - earlier.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    return tuple(quantile(share, bounds, counts) for share in QUANTILES)


def _buckets(metrics: Metrics, name: str) -> Mapping[float, float]:
    wanted = f"{_PREFIX}{name}_bucket"
    return {float(sample.labels["le"]): sample.value for sample in metrics.samples if sample.name == wanted}


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float:
    """A quantile as in Prometheus' histogram_quantile: linear inside a bucket; beyond the last finite bound, that bound.

    bounds: ascending, the last one infinite. counts: cumulative, the last one above 0.
    """
    wanted = share * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= wanted)
    if math.isinf(bounds[index]):
        return bounds[index - 1] if index else math.nan
    low = bounds[index - 1] if index else 0.0
    under = counts[index - 1] if index else 0.0
    inside = counts[index] - under
    return low + (bounds[index] - low) * (wanted - under) / inside if inside else bounds[index]


# The sequence of an arrow or function key, which begins like the Escape key.
_SEQUENCE = re.compile(r"\x1b(?:O.|\[[0-?]*[ -/]*[@-~])")


class Keys:
    """Keys typed on the standard input while `typed_keys` lasts."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def wait(self, wanted: str, seconds: float) -> bool:
        """Whether one of these characters was typed within the given seconds. Other characters are ignored."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._on:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed:  # the terminal is gone
                    return True
                if any(character in wanted for character in _SEQUENCE.sub("", typed.decode("utf-8", "replace"))):
                    return True
        return False


@contextlib.contextmanager
def typed_keys() -> Iterator[Keys]:
    """Read keys as they are typed, without echo, and restore the terminal afterwards. Without a terminal there are no keys."""
    try:
        import termios
        import tty
    except ImportError:  # not on Windows
        yield Keys(False)
        return
    if not sys.stdin.isatty():
        yield Keys(False)
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield Keys(True)
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(number, termios.TCSADRAIN, before)


MAX_SCALINGS = 8
_NAME = 24  # columns of a scaling's name
_BAR = 20
_GOOD = "ready"


def rows(stats: IntervalStats) -> list[tuple[str, str]]:
    """Labels and texts of all statistics except the scalings."""
    return [
        ("engine", f"{stats.state}{_engine(stats)}"),
        (
            "requests",
            f"{_count(stats.running)} running, {_count(stats.waiting)} waiting; "
            f"{_rate(stats.finished_rate)}/s answered, {_rate(stats.failed_rate)}/s failed",
        ),
        ("tokens/s", f"{_rate(stats.prompt_rate)} in, {_rate(stats.generated_rate)} out"),
        ("cache", _cache(stats)),
        ("prefix hits", "-" if stats.prefix_hits is None else f"{stats.prefix_hits:.0%} of prompt tokens"),
        ("first token", _latency(stats.first_token)),
        ("next token", _latency(stats.between_tokens)),
        ("loop lag", _latency(stats.loop_lag)),
    ]


def plain(stats: IntervalStats, url: str) -> str:
    """All statistics as text, for files and pipes."""
    lines = [f"{url}, the last {stats.seconds:.1f} s"]
    lines += [f"  {label:<12} {text}" for label, text in rows(stats)]
    for scaling in stats.scalings:
        lines.append(
            f"  scaling {scaling.name}: {_count(scaling.running)} running, {_rate(scaling.prompt_rate)} tokens/s in, "
            f"{_rate(scaling.generated_rate)} out"
        )
    return "\n".join(lines)


def screen(stats: IntervalStats | None, url: str, problem: str = "") -> RenderableType:
    """The terminal's content. stats: None before the first ones. problem: why there are no newer ones."""
    head = Text(f"windlass top  {url}", style="bold", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head]
    if problem:
        parts.append(Text(problem, style="bold red", no_wrap=True, overflow="ellipsis"))
    if stats is None:
        parts.append(Text("" if problem else "waiting ..."))
    else:
        parts += [_table(stats), *_scalings(stats)]
    parts.append(Text("q quits", style="dim"))
    return Group(*parts)


def _table(stats: IntervalStats) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, text in rows(stats):
        style = ("green" if stats.state == _GOOD else "bold red") if label == "engine" else ""
        table.add_row(label, Text(text, style=style))
        if label == "cache" and stats.cache_usage is not None:
            filled = round(max(0.0, min(1.0, stats.cache_usage)) * _BAR)
            table.add_row("", Text("#" * filled + "." * (_BAR - filled)))
    return table


def _scalings(stats: IntervalStats) -> Sequence[RenderableType]:
    if not stats.scalings:
        return ()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("scaling", no_wrap=True, overflow="ellipsis", max_width=_NAME)
    for name in ("running", "in/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    busiest = sorted(stats.scalings, key=lambda each: (-each.running, -each.generated_rate, each.name))
    for scaling in busiest[:MAX_SCALINGS]:
        table.add_row(scaling.name, _count(scaling.running), _rate(scaling.prompt_rate), _rate(scaling.generated_rate))
    more = len(busiest) - MAX_SCALINGS
    return (Text(""), table, Text(f"and {more} more" if more > 0 else "", style="dim"))


def _engine(stats: IntervalStats) -> str:
    parts = []
    if stats.restarts:
        parts.append(f"{_count(stats.restarts)} restart{'s' if stats.restarts > 1 else ''}")
    if stats.preempted:
        parts.append(f"{_count(stats.preempted)} preempted")
    return "".join(f", {text}" for text in parts)


def _cache(stats: IntervalStats) -> str:
    if stats.cache_usage is None:
        return "-"
    if not stats.blocks or stats.blocks_used is None:
        return f"{stats.cache_usage:.0%} in use"
    blocks = f"{_count(stats.blocks_used)} of {_count(stats.blocks)} blocks in use"
    return f"{blocks}, {stats.cache_usage:.0%} of the fullest KV group"


def _latency(values: tuple[float, ...] | None) -> str:
    if values is None:
        return "-"
    return ", ".join(f"p{share * 100:.0f} {_seconds(value)}" for share, value in zip(QUANTILES, values, strict=True))


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _count(value: float | None) -> str:
    """A count of limited width: 12,345, or 98.8M for 98,765,432."""
    if value is None:
        return "-"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return f"{value:,.1f}" if value is not None and value < 100 else _count(value)


TIMEOUT_SECONDS = 5.0  # of each request


class NotWindlassError(ValueError):
    """The metrics do not have Windlass's names."""


class MetricsWatcher:
    """Repeated snapshots of one server. The constructor takes the first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = self._take_snapshot()

    def next(self) -> IntervalStats:
        """Statistics since the last successful snapshot. Raises APIError."""
        before, self._before = self._before, self._take_snapshot()
        return interval_stats(before, self._before)

    def _take_snapshot(self) -> MetricsSnapshot:
        state = self._client.ready().status or "unknown"
        snapshot = MetricsSnapshot(at=time.monotonic(), state=state, metrics=self._client.metrics())
        if not snapshot.is_windlass:
            raise NotWindlassError(
                "its metrics have other names: use a Windlass server that was not started with --metrics-names vllm"
            )
        return snapshot


def watch(url: str, api_key: str | None, interval: float, *, once: bool, as_json: bool) -> int:
    """Show statistics until the user quits, or for one interval. Returns the exit code. Raises CommandError, one line."""
    try:
        with Client(url, api_key=api_key, timeout=TIMEOUT_SECONDS, retry=RetryPolicy(max_retries=0)) as client:
            watched = MetricsWatcher(client)
            if once or as_json or not sys.stdout.isatty():
                _write(watched, client.base_url, interval, once=once, as_json=as_json)
            else:
                _show(watched, client.base_url, interval)
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        if not is_output_closed(error):
            raise
        discard_output()
        return 0
    except APIError as error:
        raise CommandError(with_place(url, _describe_error(error))) from error
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    return 0


def _write(watched: MetricsWatcher, url: str, interval: float, *, once: bool, as_json: bool) -> None:
    """Print intervals as plain text. An unreachable server is reported once and queried again, unless `once` is set."""
    silent = False
    while True:
        time.sleep(interval)
        try:
            found = watched.next()
        except APIError as error:
            if once or not _is_temporary(error):
                raise
            if not silent:
                print_status(f"{with_place(url, _describe_error(error))} (retrying)")
            silent = True
            continue
        silent = False
        print(json.dumps(_object(found)) if as_json else plain(found, url), flush=True)
        if once:
            return


def _object(found: IntervalStats) -> dict[str, object]:
    """Statistics as JSON, with latencies by quantile: p50."""
    shown = asdict(found)
    for name in ("first_token", "between_tokens", "loop_lag"):
        if shown[name] is not None:
            shown[name] = {f"p{share * 100:.0f}": value for share, value in zip(QUANTILES, shown[name], strict=True)}
    return shown


def _show(watched: MetricsWatcher, url: str, interval: float) -> None:
    """Show intervals on a terminal. An unreachable server is queried again: it may be restarting."""
    with typed_keys() as keys, Live(screen(None, url), console=Console(), screen=True, auto_refresh=False) as live:
        found: IntervalStats | None = None
        while not keys.wait("qQ\x1b\x04", interval):
            problem = ""
            try:
                found = watched.next()
            except APIError as error:
                if not _is_temporary(error):
                    raise
                problem = _describe_error(error)
            live.update(screen(found, url, problem), refresh=True)


def _is_temporary(error: APIError) -> bool:
    """Whether the same request may succeed later, unlike one with an invalid key."""
    return not isinstance(error, APIStatusError) or isinstance(error, (ServerError, RateLimitError))


def _describe_error(error: APIError) -> str:
    if isinstance(error, APIStatusError):
        return f"it answered {error.status}: {with_key_hint(error)}"
    return error.message
