"""The report of load tests as one self-contained HTML page: its contents and warnings.

`figures.py` computes the charts, and `assets/` draws them with uPlot in the browser. Tables are plain HTML, so only the
charts need JavaScript. jinja2 escapes everything from results, or it is JSON inside the page; the content security
policy of the page allows neither other scripts nor any request.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.results import (
    MEASURES,
    PERCENTILES,
    NamedRun,
    RequestRecord,
    RunResult,
    SweepResult,
    name_runs,
)

MAX_FAILURES = 50  # rows of the table of failures
_SCRIPTS = ("uPlot.iife.min.js", "chart.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")

Results = RunResult | Sequence[RunResult | NamedRun] | SweepResult


def write_html(results: Results, path: Path, *, title: str = "Load test") -> None:
    """Write the page of one run, of a sweep, or of several runs to compare.

    Raises OSError, and ValueError for no runs.
    """
    path.write_text(to_html(results, title=title), encoding="utf-8")


def to_html(results: Results, *, title: str = "Load test") -> str:
    """The page as text; see `write_html`."""
    highest_rate = results.highest_rate if isinstance(results, SweepResult) else None
    runs = named(results)
    scripts = [_asset(name) for name in _SCRIPTS]
    context = figures.against_context(runs)
    data: dict[str, Any] = {
        "runs": [_chart_data(run) for run in runs],
        "measures": {name: measure.label for name, measure in MEASURES.items()},
        "units": {name: measure.unit for name, measure in MEASURES.items()},
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
        warnings=[f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in _warnings(run.result)],
        runs=[_run_view(run) for run in runs],
        overview=_overview(runs),
        fits=_fits(context),
        cut=sum(entry[name]["left_out"] for entry in context for name in ("ttft", "prefill")),
        highest_rate=highest_rate,
        number=figures.format_number,
    )


def named(results: Results) -> tuple[NamedRun, ...]:
    """Every run under a unique name, those of a sweep by ascending rate. Raises ValueError for none."""
    given: Sequence[RunResult | NamedRun]
    if isinstance(results, RunResult):
        given = [results]
    elif isinstance(results, SweepResult):
        ascending = sorted(results.runs, key=lambda run: run.offered_rate or 0.0)
        given = ascending
    else:
        given = results
    if not given:
        raise ValueError("a report needs a run")
    return name_runs(given)


def _asset(name: str, folder: str = "assets") -> str:
    return importlib.resources.files("windlass.clients.loadtest").joinpath(folder, name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The source expression of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json_in_html(data: Any) -> str:
    """JSON that can neither end a script element nor open a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(run: NamedRun) -> dict[str, Any]:
    result = run.result
    return {
        "name": run.name,
        "duration": result.duration_s,
        "tails": {measure: figures.tail_curve(result.values(measure)) for measure in MEASURES},
        "time": figures.over_time(result),
        "timeline": figures.timeline(result),
        "slo": dict(result.slo),
    }


def _warnings(result: RunResult) -> list[str]:
    """Sentences at the top of the page."""
    found = [f"{text[0].upper()}{text[1:]}." for text in result.warnings()]
    given_up = sum(result.abandoned.values())
    if given_up and not result.interrupted:
        found.append(f"{given_up:,} requests were given up on purpose: they count neither as completed nor as failed.")
    if not result.records:
        found.append("The run contains no requests.")
    return found


def _run_view(run: NamedRun) -> dict[str, Any]:
    """Values of one run for the template."""
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
        "given_up": sum(result.abandoned.values()),
        "left_out": max(0, len(result.records) - figures.MAX_ROWS),
        "tables": [
            (heading, list(figures.flatten_settings(values)))
            for heading, values in (
                ("Settings", result.settings),
                ("Server", result.server),
                ("Load generator", result.generator),
            )
            if values
        ],
        "lag": [(name, figures.format_ms(value)) for name, value in summary["schedule_lag_ms"].items()],
        "means": figures.phase_means(result.server_metrics),
        "metrics": [(name, figures.format_number(value)) for name, value in sorted(result.server_metrics.items())],
        "labels": _labels(result),
    }


def _tiles(result: RunResult, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Headline figures: label, value, unit, and a line below."""

    def tile(label: str, value: str, unit: str, below: str = "", kind: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "unit": unit, "below": below, "kind": kind}

    def latency(label: str, measure: str) -> dict[str, str]:
        value, unit = figures.format_duration(summary[f"{measure}_ms"]["p50"])
        tail, tail_unit = figures.format_duration(summary[f"{measure}_ms"]["p99"])
        return tile(label, value, unit, f"median; p99 {tail} {tail_unit}")

    offered, achieved = summary["offered_rate"], summary["achieved_rate"]
    achieved_text = "" if achieved is None else f", {figures.format_rate(achieved)} achieved"
    span = f"in {figures.format_number(float(result.duration_s))} s"
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
            "no rate set" if offered is None else f"{figures.format_rate(offered)} offered{achieved_text}",
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
    if summary["cached_tokens"] and summary["input_tokens"]:  # a server may report only one of them
        share = 100 * summary["cached_tokens"] / summary["input_tokens"]
        reused = summary["reused_tokens"]
        elsewhere = f"{reused:,} tokens from elsewhere" if reused else "equal beginnings"
        tiles.append(tile("From the cache", figures.format_number(share), "% of prompt tokens", elsewhere))
    if summary["goodput"] is not None:
        limits = ", ".join(f"{name} ≤ {figures.format_setting(limit)} ms" for name, limit in result.slo.items())
        tiles.insert(2, tile("Goodput", figures.format_rate(summary["goodput"]), "per s", f"within {limits}"))
    return tiles


def _percentiles(summary: dict[str, Any], result: RunResult) -> list[dict[str, Any]]:
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    rows = []
    for name, measure in MEASURES.items():
        limit = result.slo.get(name)
        rows.append(
            {
                "label": measure.label,
                "unit": measure.unit,
                "cells": [figures.format_ms(summary[f"{name}_ms"][column]) or "–" for column in columns],
                "limit": "" if limit is None else figures.format_setting(limit),
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
    """A row per label of a mixed workload; none where all requests have the same label."""
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
    """A row per run, where there are several."""
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
    """A row per fitted line of ITL over context."""
    return [
        {
            "name": entry["name"],
            "intercept": figures.format_number(fit["intercept"]),
            "slope": f"{figures.format_number(fit['slope'] * 1000)} ± {figures.format_number(2000 * fit['error'])}",
            "shown": "" if abs(fit["slope"]) > 2 * fit["error"] else "none shown",
            "span": f"{entry['itl']['bins'][0]['x']:,.0f} to {entry['itl']['bins'][-1]['x']:,.0f}",
        }
        for entry in context
        if (fit := entry["itl_fit"])
    ]
