"""What a run leaves behind: plain data, its statistics, its ratios against the goals, and a table to read.

Knows no program and starts none. A report is {"schema": 1, "model": …, "runs": [run, …]}; runs are parts measured at
different times, each with its own machine rates, so a ratio never crosses two of them.
"""

from __future__ import annotations

import math
import statistics
from collections import abc
from dataclasses import dataclass
from typing import Any

from harness.shape import ModelShape

SCHEMA = 1
_RUN_KEYS = ("date", "machine", "threads", "rounds", "rates", "load", "versions", "results", "left_out")
_RESULT_KEYS = ("measure", "contestant", "program", "weights", "unit", "samples", "foreign", "discarded")


@dataclass(frozen=True, slots=True)
class Goal:
    """`over` is a contestant's name, or "bound". at_least: the ratio wanted."""

    measure: str
    contestant: str
    over: str
    at_least: float


GOALS = (
    Goal("decode, 1 stream", "Windlass int8", "OpenVINO int8", 1.1),
    Goal("decode, 1 stream", "Windlass int8", "bound", 0.9),
    Goal("decode, 1 stream", "Windlass int4", "llama.cpp Q4_0", 1.3),
    Goal("decode, 1 stream", "Windlass int4", "bound", 0.75),
    Goal("decode, 1 stream", "Windlass bf16", "bound", 0.9),
    Goal("decode, 8 streams", "Windlass int8", "OpenVINO int8", 1.2),
    Goal("prefill 512", "Windlass int8", "OpenVINO int8", 1.25),
    Goal("prefill 512", "Windlass int8", "llama.cpp Q8_0", 4.0),
    Goal("prefill 4,096", "Windlass int8", "OpenVINO int8", 1.1),
    Goal("decode at 4,096", "Windlass int8, int8 KV", "llama.cpp Q8_0", 2.0),
    Goal("decode at 8,192", "Windlass int8, int8 KV", "llama.cpp Q8_0", 2.0),
    Goal("decode at 32,768", "Windlass int8, int8 KV", "llama.cpp Q8_0", 2.0),
)


def spread(samples: abc.Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum; ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def percentile(values: abc.Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank); ValueError for none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def bound_of(
    shape: ModelShape,
    measure: str,
    kind: str,
    streams: int,
    prompt: int,
    weights: str,
    kv_dtype: str,
    rates: dict[str, Any],
) -> tuple[float, str] | None:
    """Tokens per second the memory allows a decode step, and why; None for a prompt, whose products are not float32 only.

    A step reads every weight once for all streams, and at depth also every key and value of its stream.
    """
    if kind not in ("decode", "depth"):
        return None
    bandwidth = rates["read_gb_s"]["median"] * 1e9
    read = shape.weight_bytes(weights)
    reason = "weights"
    if kind == "depth":
        cached = {"u8": "int8", "auto": "float32"}.get(kv_dtype, "int8" if "q8_0" in kv_dtype else kv_dtype)
        read += prompt * shape.kv_bytes_per_token(cached)
        reason = f"weights and {cached} KV"
    return streams * bandwidth / read, f"{reason} at the measured read bandwidth"


def ratios(run: dict[str, Any], goals: abc.Iterable[Goal] = GOALS) -> list[dict[str, Any]]:
    """Medians over medians for every goal whose two sides this run measured."""
    by_name = {(result["measure"], result["contestant"]): result for result in run["results"]}
    found = []
    for goal in goals:
        ours = by_name.get((goal.measure, goal.contestant))
        theirs = by_name.get((goal.measure, goal.over))
        if ours is None:
            continue
        if goal.over == "bound":
            value = ours["median"] / ours["bound"] if ours.get("bound") else None
        else:
            value = ours["median"] / theirs["median"] if theirs else None
        if value is not None:
            found.append(
                {
                    "measure": goal.measure,
                    "contestant": goal.contestant,
                    "over": goal.over,
                    "ratio": value,
                    "goal": goal.at_least,
                    "reached": value >= goal.at_least,
                }
            )
    return found


def attention_rate(short: dict[str, Any], long: dict[str, Any], shape: ModelShape, lengths: tuple[int, int]) -> float:
    """Gflop/s of causal attention, from two prefills of one contestant.

    The long prompt's seconds beyond its share of the short one's are attention: everything else is linear in tokens.
    nan where noise leaves none.
    """
    a, b = lengths
    extra = b / long["median"] - (b / a) * (a / short["median"])
    work = shape.attention_operations(b) - (b / a) * shape.attention_operations(a)
    return work / extra / 1e9 if extra > 0 else math.nan


def check(report: dict[str, Any]) -> None:
    """Raise ValueError where a report lacks what pages and pictures rely on."""
    if report.get("schema") != SCHEMA:
        raise ValueError(f"schema {report.get('schema')!r}, expected {SCHEMA}")
    for run in report["runs"]:
        _require(run, _RUN_KEYS, "run")
        for name in ("read_gb_s", "copy_gb_s", "fp32_gflop_s"):
            _require(run["rates"][name], ("median", "min", "max"), name)
        for result in run["results"]:
            _require(result, _RESULT_KEYS, f"result {result.get('measure')!r}")
            expected = spread(result["samples"])
            if any(not math.isclose(result[key], value) for key, value in expected.items()):
                raise ValueError(
                    f"{result['contestant']}, {result['measure']}: median, min or max is not that of the samples"
                )


def _require(mapping: dict[str, Any], keys: abc.Iterable[str], what: str) -> None:
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def newest_results(report: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(run, result) for each measure of the newest run that has it; a measure's bars always come from one run."""
    newest: dict[str, dict[str, Any]] = {}
    for run in report["runs"]:
        for result in run["results"]:
            newest[result["measure"]] = run
    return [(run, r) for measure, run in newest.items() for r in run["results"] if r["measure"] == measure]


def three_digits(value: float) -> str:
    """Three digits, or a whole number with commas."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(run: dict[str, Any]) -> str:
    """The run in Markdown, as `make bench` prints it."""
    lines = [
        f"{run['date']}, {run['machine']['cpu']}, {run['threads']} threads, load {run['load']['before']:.2f} before and "
        f"{run['load']['after']:.2f} after",
        ", ".join(
            f"{label} {run['rates'][name]['median']:.1f} {unit} "
            f"({run['rates'][name]['min']:.1f}–{run['rates'][name]['max']:.1f})"
            for name, label, unit in (
                ("read_gb_s", "read", "GB/s"),
                ("copy_gb_s", "copy", "GB/s"),
                ("fp32_gflop_s", "float32 products", "Gflop/s"),
            )
        ),
        "",
        "| measure | contestant | median | min–max | of the bound | others' share of the machine |",
        "|---|---|---|---|---|---|",
    ]
    for result in run["results"]:
        bound = result.get("bound")
        share = f"{result['median'] / bound:.0%} of {three_digits(bound)}" if bound else "–"
        lines.append(
            f"| {result['measure']} | {result['contestant']} | {three_digits(result['median'])} {result['unit']} | "
            f"{three_digits(result['min'])}–{three_digits(result['max'])} | {share} | {max(result['foreign'] or [0]):.0%} |"
        )
    if run.get("ratios"):
        lines += ["", "| measure | ratio | | goal |", "|---|---|---|---|"]
        for ratio in run["ratios"]:
            verdict = "reached" if ratio["reached"] else "missed"
            pair = f"{ratio['contestant']} over {ratio['over']}"
            lines.append(f"| {ratio['measure']} | {pair} | {ratio['ratio']:.2f} | {ratio['goal']} {verdict} |")
    if run.get("derived"):
        lines += ["", *(f"{name}: {value:.3g}" for name, value in run["derived"].items())]
    if run["left_out"]:
        reasons = (f"left out: {item['contestant']}: {item['reason']}" for item in run["left_out"])
        lines += ["", *dict.fromkeys(reasons)]  # once, though several groups may have left it out
    return "\n".join(lines)
