"""Numbers and texts of the charts and tables of a report."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from windlass.clients.loadtest.results import MEASURES, NamedRun, RequestRecord, RunResult, linear_fit, percentile

MAX_POINTS = 4000  # of one scatter
MAX_ROWS = 4000  # of one timeline
BINS = 40
_PHASES = ("queue", "prefill", "decode")


def format_ms(value: float | None) -> str:
    """Three significant digits or whole milliseconds, without the unit; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_duration(value: float | None) -> tuple[str, str]:
    """Milliseconds as (number, unit), in seconds from 10,000 ms on."""
    if value is None:
        return "–", ""
    return (format_ms(value), "ms") if abs(value) < 10_000 else (f"{value / 1000:,.1f}", "s")


def format_number(value: float | int | None) -> str:
    """Whole numbers with separators, others to three significant digits, – for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.2e}"


def format_rate(value: float | None) -> str:
    """A rate: three significant digits or whole, – for None."""
    return format_number(None if value is None else float(value))


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of nested settings, inner names after a dot. Null and empty values are omitted."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            yield f"{prefix}{name}", format_setting(value)


def format_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def phase_means(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, mean) of the server's histograms of the phases of a request: `_sum` over `_count`, in milliseconds."""
    found = []
    for name, total in metrics.items():
        stem = name.removesuffix("_seconds_sum")
        count = metrics.get(f"{stem}_seconds_count", 0.0)
        if stem != name and count > 0 and any(phase in stem for phase in _PHASES):
            found.append((stem, f"{format_ms(total / count * 1000)} ms"))
    return found


def gaps_at_context(record: RequestRecord) -> list[tuple[float, float]]:
    """(context in tokens, gap in ms) of every gap between the chunks of a request."""
    per_chunk = record.tokens_per_chunk
    return [(record.input_tokens + index * per_chunk, gap) for index, gap in enumerate(record.gaps_ms, 1)]


def bins_for(records: Sequence[RequestRecord]) -> int:
    """Number of bins over context: BINS where the prompts have a few lengths only, as in a study.

    Otherwise one for every eight requests, so that the median of a bin does not rest on a request or two.
    """
    lengths = len({record.input_tokens for record in records})
    if lengths <= 8 or lengths <= min(BINS, len(records) // 2):
        return BINS
    return min(BINS, max(3, len(records) // 8))


def bin_points(pairs: Sequence[tuple[float, float]], bins: int = BINS) -> list[dict[str, float]]:
    """Mean x, mean, median and p95 of y, and the number of points, for each non-empty bin of equal width over x.

    Neighbouring bins whose points span no more than a width are merged, so that an edge does not split a cluster.
    """
    if not pairs:
        return []
    low, high = min(x for x, _ in pairs), max(x for x, _ in pairs)
    width = (high - low) / bins or 1.0
    inside: dict[int, list[tuple[float, float]]] = {}
    for x, y in pairs:
        inside.setdefault(min(int((x - low) / width), bins - 1), []).append((x, y))
    groups: list[list[tuple[float, float]]] = []
    for _, members in sorted(inside.items()):
        if groups and max(x for x, _ in members) - min(x for x, _ in groups[-1]) <= width:
            groups[-1] += members
        else:
            groups.append(members)
    found = []
    for members in groups:
        ordered = sorted(y for _, y in members)
        found.append(
            {
                "x": math.fsum(x for x, _ in members) / len(members),
                "mean": math.fsum(ordered) / len(ordered),
                "median": percentile(ordered, 50),
                "p95": percentile(ordered, 95),
                "count": len(ordered),
            }
        )
    return found


def subsample(points: Sequence[Any], max_points: int) -> list[Any]:
    """At most `max_points` of the points, evenly spread over their order, first and last included."""
    if len(points) <= max_points:
        return list(points)
    return [points[round(k * (len(points) - 1) / (max_points - 1))] for k in range(max_points)]


def tail_curve(values: Sequence[float], steps: int = 120) -> list[tuple[float, float]]:
    """(percent, value) in equal steps of -log10(1 - percent / 100), up to the last percentile with a value above it."""
    if not values:
        return []
    ordered = sorted(values)
    longest = math.log10(len(ordered)) if len(ordered) > 1 else 0.0
    percents = sorted({0.0, *(100 * (1 - 10 ** (-longest * k / steps)) for k in range(steps + 1))})
    return [(percent, percentile(ordered, percent)) for percent in percents]


def nice_step(span: float, max_points: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides `span` into at most `max_points` steps."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / max_points))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power, 20 * power) if span / step <= max_points)


def over_time(run: RunResult, max_points: int = 100) -> dict[str, Any]:
    """Output tokens per second, requests waiting for their first token and requests decoding, in equal steps of time.

    Tokens count on arrival, also those of failed requests, since the server delivered them. Steps begin at the first
    intended send, as the duration of a run does; the last is half to one and a half steps long.
    """
    step, start = nice_step(run.duration_s, max_points), run.start
    edges = [step * k for k in range(max(1, math.floor(run.duration_s / step + 0.5)))]
    tokens = [0.0] * len(edges)
    for record in run.records:
        per_chunk = record.tokens_per_chunk
        for moment in record.chunks:
            tokens[min(max(int((moment - start) / step), 0), len(edges) - 1)] += per_chunk
    widths = [step] * (len(edges) - 1) + [run.duration_s - edges[-1] or step]
    middles = [start + edge + width / 2 for edge, width in zip(edges, widths, strict=True)]
    sent = [r for r in run.records if r.sent is not None]
    starts = sorted(r.sent for r in sent if r.sent is not None)
    firsts = sorted(r.chunks[0] for r in sent if r.chunks)
    ends = sorted(_end(r, run) for r in sent)
    silent = sorted(_end(r, run) for r in sent if not r.chunks)

    def open_at(moment: float) -> tuple[int, int]:
        waiting = bisect_right(starts, moment) - bisect_right(firsts, moment) - bisect_right(silent, moment)
        return waiting, bisect_right(starts, moment) - bisect_left(ends, moment) - waiting

    counts = [open_at(moment) for moment in middles]
    return {
        "step_s": step,
        "widths": widths,
        "seconds": middles,
        "tokens_per_second": [count / width for count, width in zip(tokens, widths, strict=True)],
        "waiting": [waiting for waiting, _ in counts],
        "decoding": [max(0, decoding) for _, decoding in counts],
    }


def _end(record: RequestRecord, run: RunResult) -> float:
    return run.start + run.duration_s if record.ended is None else record.ended


def timeline(run: RunResult, max_points: int = MAX_ROWS) -> dict[str, Any]:
    """One row per request in the order of intended sends: its times, tokens, label, and outcome unless completed.

    Past `max_points` rows completed requests are thinned evenly; all failed ones stay unless they alone are more.
    failed: false for requests that the load generator abandoned.
    """
    errors = run.errors
    ordered = sorted(run.records, key=lambda record: (record.intended, record.index))
    shown = ordered
    if len(ordered) > max_points:
        failed = subsample([r for r in ordered if r.outcome in errors], max_points)
        others = subsample([r for r in ordered if r.outcome not in errors], max(2, max_points - len(failed)))
        keep = {id(r) for r in [*failed, *others]}
        shown = [r for r in ordered if id(r) in keep]
    rows = [
        {
            "index": record.index,
            "intended": record.intended,
            "sent": record.sent,
            "first": record.chunks[0] if record.chunks else None,
            "end": record.ended,
            "tokens": [record.input_tokens, record.output_tokens],
            "label": record.label,
            "outcome": None if record.completed else record.outcome,
            "failed": record.outcome in errors,
            "message": record.message,
        }
        for record in shown
    ]
    return {"rows": rows, "left_out": len(ordered) - len(shown)}


def against_context(runs: Sequence[NamedRun]) -> list[dict[str, Any]]:
    """Figures over context for each series of runs: TTFT and prompt speed by input tokens, ITL and decode speed by context.

    ttft: points (input tokens, ms from the actual send) and bins. prefill: points (input tokens, prompt tokens per second,
    without cached ones). itl: bins of gaps. decode: (context, tokens per second of one stream) for each bin. itl_fit: the
    line through all gaps, None unless the longest context is at least 1.5 times the shortest.
    """
    series: dict[str, list[NamedRun]] = {}
    for run in runs:
        series.setdefault(run.line, []).append(run)
    return [_context_of(name, members) for name, members in series.items()]


def _context_of(name: str, runs: Sequence[NamedRun]) -> dict[str, Any]:
    done = [record for run in runs for record in run.result.completed if record.ttft_actual_ms is not None]
    ttft = [(float(r.input_tokens), r.ttft_actual_ms or 0.0) for r in done]
    prefill = [
        (float(r.input_tokens), (r.input_tokens - (r.cached_tokens or 0)) * 1000 / r.ttft_actual_ms)
        for r in done
        if r.ttft_actual_ms and r.input_tokens > (r.cached_tokens or 0)
    ]
    gaps, bins = [gaps_at_context(record) for record in done], bins_for(done)
    itl = bin_points([pair for each in gaps for pair in each], bins)
    # The contexts, and therefore the bins, are the same.
    tokens = bin_points([(x, r.tokens_per_chunk) for r, each in zip(done, gaps, strict=True) for x, _ in each], bins)
    wide = bool(itl) and itl[-1]["x"] >= 1.5 * itl[0]["x"]
    fit = linear_fit(gaps) if wide else None
    return {
        "name": name,
        "ttft": {
            "points": subsample(sorted(ttft), MAX_POINTS),
            "bins": bin_points(ttft, bins),
            "left_out": _num_left_out(ttft),
        },
        "prefill": {"points": subsample(sorted(prefill), MAX_POINTS), "left_out": _num_left_out(prefill)},
        "itl": {"bins": itl},
        "decode": [[b["x"], t["mean"] * 1000 / b["mean"]] for b, t in zip(itl, tokens, strict=True) if b["mean"] > 0],
        "itl_fit": None if fit is None else asdict(fit),
    }


def _num_left_out(points: Sequence[Any]) -> int:
    return max(0, len(points) - MAX_POINTS)


def against_rate(runs: Sequence[NamedRun]) -> dict[str, Any] | None:
    """Percentiles, throughput and goodput by load; None where all runs have the same load.

    The load is the offered rate where every run has one, and the concurrency where none has. Rows are sorted by their
    `group` (the series of the run), in order of first appearance, then by load.
    """
    offered = all(run.result.offered_rate is not None for run in runs)
    loads = [run.result.offered_rate if offered else _concurrency(run.result) for run in runs]
    if None in loads or len(set(loads)) < 2:
        return None
    rows = []
    for run, load in zip(runs, loads, strict=True):
        summary = run.result.summary()
        rows.append(
            {
                "name": run.name,
                "group": run.series or "",
                "load": load,
                **{measure: summary[f"{measure}_ms"] for measure in MEASURES},
                "request_rate": summary["request_rate"],
                "tokens_per_second": summary["output_tokens_per_second"],
                "goodput": summary["goodput"],
            }
        )
    order = list(dict.fromkeys(row["group"] for row in rows))
    return {"offered": offered, "rows": sorted(rows, key=lambda row: (order.index(row["group"]), row["load"]))}


def _concurrency(run: RunResult) -> float | None:
    found = run.settings.get("concurrency")
    if run.offered_rate is not None or isinstance(found, bool) or not isinstance(found, int):
        return None
    return float(found)


def round_floats(value: Any, digits: int = 7) -> Any:
    """Plain data with every float rounded to `digits` significant digits, more than a page shows."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: round_floats(entry, digits) for key, entry in value.items()}
    return (
        [round_floats(entry, digits) for entry in value]
        if isinstance(value, Iterable) and not isinstance(value, str)
        else value
    )
