"""A load test's report: one HTML page that needs nothing from anywhere. Chooses what is shown and what is warned of.

`figures.py` has the numbers of the charts, `assets/` draws them in the reader's browser with uPlot; the tables are plain
HTML, so a reader without JavaScript misses the pictures only. Everything from results is escaped by jinja2 or travels
as JSON inside the page, and its content security policy lets no other script run and no request leave.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.results import PERCENTILES, NamedRun, RequestRecord, RunResult, unique_names

MAX_FAILURES = 50  # rows of the table of failures
_SCRIPTS = ("uPlot.iife.min.js", "chart.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")
_UNITS = {"ttft": "ms", "ttft_actual": "ms", "tpot": "ms per token", "itl": "ms per chunk", "e2el": "ms"}


class Sweep(Protocol):
    """Several runs and what was searched for: `results.ResultFile`, or what a search returns."""

    @property
    def runs(self) -> Sequence[RunResult | NamedRun]: ...
    @property
    def highest_rate(self) -> float | None: ...


Results = RunResult | Sequence[RunResult | NamedRun] | Sweep


def write_html(
    results: Results,
    path: Path,
    *,
    title: str = "Load test",
) -> None:
    """Write the page for one run, or for several: a sweep or runs to set side by side.

    Raises OSError, and ValueError for no runs.
    """
    path.write_text(to_html(results, title=title), encoding="utf-8")


def to_html(results: Results, *, title: str = "Load test") -> str:
    """The page as text; see write_html."""
    highest_rate = None if isinstance(results, RunResult | Sequence) else results.highest_rate
    runs = named(results)
    scripts = [_asset(name) for name in _SCRIPTS]
    context = figures.against_context(runs)
    data: dict[str, Any] = {
        "runs": [_chart_data(run) for run in runs],
        "measures": figures.MEASURES,
        "units": _UNITS,
        "rate": figures.against_rate(runs),
        "slo": dict(runs[0].result.slo) if all(run.result.slo == runs[0].result.slo for run in runs) else {},
        "context": context,
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_asset("report.html.j2", folder="")).render(
        title=title,
        policy="; ".join(
            ["default-src 'none'", "style-src 'unsafe-inline'", "script-src " + " ".join(map(_hash, scripts))]
        ),
        styles=[Markup(_asset(name)) for name in _STYLES],
        scripts=[Markup(script) for script in scripts],
        data=Markup(_json_in_html(figures.round_floats(data))),
        rates=data["rate"] is not None,
        offered=data["rate"] is not None and data["rate"]["offered"],
        warnings=[warning for run in runs for warning in _warnings(run, several=len(runs) > 1)],
        runs=[_run_view(run) for run in runs],
        overview=_overview(runs),
        fits=_fits(context),
        cut=sum(entry[name]["left_out"] for entry in context for name in ("ttft", "prefill")),
        highest_rate=highest_rate,
        measures=figures.MEASURES,
        number=figures.number,
    )


def named(results: Results) -> list[NamedRun]:
    """Every run with a name of its own, those of a sweep by their rate. Raises ValueError for none."""
    given: list[RunResult | NamedRun]
    if isinstance(results, RunResult):
        given = [results]
    elif isinstance(results, Sequence):
        given = list(results)
    else:
        given = sorted(results.runs, key=lambda run: _result(run).offered_rate or 0.0)
    if not given:
        raise ValueError("a report needs a run")
    runs = [
        run if isinstance(run, NamedRun) else NamedRun(name=_name(run, index, len(given)), result=run)
        for index, run in enumerate(given, 1)
    ]
    names = unique_names(run.name for run in runs)
    return [NamedRun(name=name, result=run.result, series=run.series) for name, run in zip(names, runs, strict=True)]


def _result(run: RunResult | NamedRun) -> RunResult:
    return run.result if isinstance(run, NamedRun) else run


def _name(run: RunResult, index: int, count: int) -> str:
    if run.offered_rate is not None:
        return f"{run.offered_rate:.4g} req/s"
    return "run" if count == 1 else f"run {index}"


def _asset(name: str, folder: str = "assets") -> str:
    return importlib.resources.files("windlass.clients.loadtest").joinpath(folder, name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """A script's source expression in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json_in_html(data: Any) -> str:
    """JSON that ends no script element and opens no comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(run: NamedRun) -> dict[str, Any]:
    result = run.result
    return {
        "name": run.name,
        "duration": result.duration_s,
        "tails": {measure: figures.tail_curve(figures.values_of(result, measure)) for measure in figures.MEASURES},
        "time": figures.over_time(result),
        "timeline": figures.timeline(result),
        "slo": dict(result.slo),
    }


def _warnings(run: NamedRun, several: bool) -> list[str]:
    """What a reader must know before believing a number."""
    result, found = run.result, []
    if result.interrupted:
        found.append("The run was interrupted: it holds what came before, and its last requests may be missing.")
    if result.generator.get("limited"):
        reasons = result.generator.get("reasons")
        why = f" ({'; '.join(map(str, reasons))})" if isinstance(reasons, list | tuple) and reasons else ""
        found.append(
            f"The load generator, not the server, was the limit{why}: the server may do better than these figures."
        )
    failed = sum(result.errors.values())
    if failed:
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(result.errors.items(), key=lambda e: -e[1]))
        found.append(
            f"{failed:,} of {len(result.records):,} requests failed ({kinds}). Latencies count completed requests only, so "
            "they may look better than what callers met."
        )
    given_up = len(result.records) - len(result.completed) - failed
    if given_up and not result.interrupted:
        found.append(f"{given_up:,} requests were given up on purpose: they count neither as completed nor as failed.")
    if not result.records:
        found.append("The run holds no requests.")
    return [f"{run.name}: {text}" if several else text for text in found]


def _run_view(run: NamedRun) -> dict[str, Any]:
    """What the template shows of one run."""
    result = run.result
    summary = result.summary()
    return {
        "name": run.name,
        "started_at": result.started_at,
        "tiles": _tiles(result, summary),
        "percentiles": _percentiles(summary, result),
        "errors": sorted(result.errors.items(), key=lambda entry: -entry[1]),
        "requests": len(result.records),
        "failures": _failures(result),
        "more_failures": max(0, summary["failed"] - MAX_FAILURES),
        "given_up": len(result.records) - summary["completed"] - summary["failed"],
        "left_out": max(0, len(result.records) - figures.MAX_ROWS),
        "tables": [
            (heading, list(figures.flat(values)))
            for heading, values in (
                ("Settings", result.settings),
                ("Server", result.server),
                ("Load generator", result.generator),
            )
            if values
        ],
        "lag": [(name, figures.format_ms(value)) for name, value in summary["schedule_lag_ms"].items()],
        "means": figures.phase_means(result.server_metrics),
        "metrics": [(name, figures.number(value)) for name, value in sorted(result.server_metrics.items())],
        "labels": _labels(result),
    }


def _tiles(result: RunResult, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The headline figures: label, value, unit, and a line below."""

    def tile(label: str, value: str, unit: str, below: str = "", kind: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "unit": unit, "below": below, "kind": kind}

    def latency(label: str, measure: str) -> dict[str, str]:
        value, unit = figures.duration(summary[f"{measure}_ms"]["p50"])
        tail, tail_unit = figures.duration(summary[f"{measure}_ms"]["p99"])
        return tile(label, value, unit, f"median; p99 {tail} {tail_unit}")

    offered, achieved = summary["offered_rate"], summary["achieved_rate"]
    kept = "" if achieved is None else f", {figures.format_rate(achieved)} achieved"
    span = f"in {figures.number(float(result.duration_s))} s"
    tiles = [
        tile(
            "Output",
            figures.format_rate(summary["output_tokens_per_second"]),
            "tokens/s",
            f"{summary['output_tokens']:,} tokens {span}",
        ),
        tile(
            "Requests",
            figures.format_rate(summary["request_rate"]),
            "per s",
            "no rate set" if offered is None else f"{figures.format_rate(offered)} offered{kept}",
        ),
        latency("Time to first token", "ttft"),
        latency("Inter-token latency", "itl"),
        latency("Whole request", "e2el"),
        tile(
            "Completed",
            f"{summary['completed']:,}",
            f"of {len(result.records):,}",
            f"{summary['failed']:,} failed" if summary["failed"] else "none failed",
            "bad" if summary["failed"] else "",
        ),
    ]
    if summary["cached_tokens"] and summary["input_tokens"]:  # a server may tell the one and not the other
        share = 100 * summary["cached_tokens"] / summary["input_tokens"]
        reused = summary["reused_tokens"]
        elsewhere = f"{reused:,} tokens from elsewhere" if reused else "equal beginnings"
        tiles.append(tile("From the cache", figures.number(share), "% of prompt tokens", elsewhere))
    if summary["goodput"] is not None:
        limits = ", ".join(f"{name} ≤ {figures.plain(limit)} ms" for name, limit in result.slo.items())
        tiles.insert(2, tile("Goodput", figures.format_rate(summary["goodput"]), "per s", f"inside {limits}"))
    return tiles


def _percentiles(summary: dict[str, Any], result: RunResult) -> list[dict[str, Any]]:
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    rows = []
    for measure, label in figures.MEASURES.items():
        limit = result.slo.get(measure)
        rows.append(
            {
                "label": label,
                "unit": _UNITS[measure],
                "cells": [figures.format_ms(summary[f"{measure}_ms"][column]) or "–" for column in columns],
                "limit": "" if limit is None else figures.plain(limit),
            }
        )
    return rows


def _failures(result: RunResult) -> list[dict[str, Any]]:
    errors = result.errors
    failed = [record for record in result.records if record.outcome in errors]
    return [
        {
            "index": record.index,
            "at": f"{record.intended:.2f}",
            "outcome": record.outcome,
            "message": record.message or "",
            "request_id": record.request_id or "",
        }
        for record in failed[:MAX_FAILURES]
    ]


def _labels(result: RunResult) -> list[dict[str, Any]]:
    """A row per label of a mixed workload; none where all requests carry the same."""
    by_label: dict[str, list[RequestRecord]] = {}
    for record in result.records:
        by_label.setdefault(record.label or "–", []).append(record)
    if len(by_label) < 2:
        return []
    rows = []
    for label, records in sorted(by_label.items()):
        part = RunResult(records=tuple(records), duration_s=result.duration_s).summary()
        cells = [figures.format_ms(part[f"{m}_ms"][p]) or "–" for m in ("ttft", "itl", "e2el") for p in ("p50", "p99")]
        rows.append({"label": label, "completed": part["completed"], "failed": part["failed"], "cells": cells})
    return rows


def _overview(runs: Sequence[NamedRun]) -> list[dict[str, Any]]:
    """A row per run of several."""
    rows = []
    for run in runs if len(runs) > 1 else ():
        summary = run.result.summary()
        rates = ("offered_rate", "achieved_rate", "request_rate", "output_tokens_per_second", "goodput")
        latencies = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"), ("e2el_ms", "p50")]
        rows.append(
            {
                "name": run.name,
                "rates": [figures.format_rate(summary[name]) for name in rates],
                "latencies": [figures.format_ms(summary[name][percent]) or "–" for name, percent in latencies],
                "requests": f"{summary['completed']:,}",
                "failed": f"{summary['failed']:,}" if summary["failed"] else "",
            }
        )
    return rows


def _fits(context: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per line through ITL over context."""
    return [
        {
            "name": entry["name"],
            "intercept": figures.number(fit["intercept"]),
            "slope": f"{figures.number(fit['slope'] * 1000)} ± {figures.number(2000 * fit['error'])}",
            "shown": "" if abs(fit["slope"]) > 2 * fit["error"] else "none shown",
            "span": f"{entry['itl']['bins'][0]['x']:,.0f} to {entry['itl']['bins'][-1]['x']:,.0f}",
        }
        for entry in context
        if (fit := entry["itl_fit"])
    ]
