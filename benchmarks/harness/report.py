"""Reports of a run: plain data, statistics, ratios against the goals, and tables.

A report is {"schema": 1, "model": …, "runs": [run, …]}. Runs are measured at different times with their own rates of the
machine, so a ratio never compares two of them. `rates` of a result are those right before and right after each sample, from
which its bound and share follow. Older reports have a bound from the rates of the run, and no share.
"""

from __future__ import annotations

import math
import statistics
from collections import abc
from dataclasses import dataclass
from typing import Any, Literal

from harness.shape import ModelShape

SCHEMA = 1
MOST_SHARE = 1.05  # of a bound; more does not come from rates that swing
_RUN_KEYS = ("date", "machine", "threads", "rounds", "rates", "load", "versions", "results", "left_out")
_RESULT_KEYS = ("measure", "contestant", "program", "weights", "unit", "samples", "foreign", "discarded")


@dataclass(frozen=True, slots=True)
class Goal:
    """`over` is a contestant's name, or "bound". at_least: the ratio wanted."""

    measure: str
    contestant: str
    over: str
    at_least: float


# Pairs of similar quality.
REAL_GOALS = (
    Goal("decode, 1 stream", "Windlass int8", "ik_llama.cpp Q8_0", 1.15),
    Goal("decode, 1 stream", "Windlass int4", "ik_llama.cpp Q4_K_M", 1.15),
    Goal("decode, 1 stream", "Windlass f16", "ik_llama.cpp F16", 1.1),
    Goal("decode, 1 stream", "Windlass int8", "bound", 0.92),
    Goal("decode, 1 stream", "Windlass int4", "bound", 0.92),
    Goal("decode, 8 streams", "Windlass int8", "ik_llama.cpp Q8_0", 1.5),
    Goal("decode, 8 streams", "Windlass int4", "ik_llama.cpp Q4_K_M", 1.5),
    Goal("prefill 512", "Windlass int8", "ik_llama.cpp Q8_0", 1.15),
    Goal("prefill 512", "Windlass int8", "OpenVINO int8", 1.15),
    Goal("prefill 512", "Windlass f16", "ik_llama.cpp F16", 1.1),
    Goal("prefill 4,096", "Windlass int8", "ik_llama.cpp Q8_0", 1.1),
    Goal("prefill 4,096", "Windlass int8", "OpenVINO int8", 1.1),
    Goal("decode at 512", "Windlass int8, int8 KV", "ik_llama.cpp Q8_0", 1.15),
    Goal("decode at 4,096", "Windlass int8, int8 KV", "ik_llama.cpp Q8_0", 1.15),
)
GOALS = (
    Goal("decode, 1 stream", "Windlass int8", "ik_llama.cpp Q8_0", 1.1),
    Goal("decode, 1 stream", "Windlass int4", "ik_llama.cpp Q4_K_M", 1.1),
    Goal("decode, 8 streams", "Windlass int8", "ik_llama.cpp Q8_0", 1.5),
    Goal("decode, 8 streams", "Windlass int4", "ik_llama.cpp Q4_K_M", 1.5),
    Goal("prefill 512", "Windlass int8", "ik_llama.cpp Q8_0", 1.15),
    Goal("prefill 4,096", "Windlass int8", "ik_llama.cpp Q8_0", 1.1),
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


def rate_of_kind(kind: str) -> Literal["read_gb_s", "fp32_gflop_s"]:
    """The rate measured around each sample of a kind: its bound, or for prompts the reference of their attention."""
    return "fp32_gflop_s" if kind == "prefill" else "read_gb_s"


def bound_of(
    shape: ModelShape,
    kind: str,
    streams: int,
    prompt: int,
    weights: str | float,
    kv_dtype: str,
    read_gb_s: float,
    kv_bytes: float | None = None,
) -> tuple[float, str] | None:
    """Tokens per second the memory allows a decode step, and why; None for a prompt, whose products are not float32 only.

    weights: a key of WEIGHT_BITS, or bytes. kv_bytes: of a token in the cache, None for what kv_dtype takes.
    A step reads every weight once for all streams, and at depth also every key and value of its stream.
    """
    if kind not in ("decode", "depth"):
        return None
    read = shape.weight_bytes(weights) if isinstance(weights, str) else weights
    reason = "weights"
    if kind == "depth":
        cached = "int8" if kv_dtype == "u8" or "q8_0" in kv_dtype else kv_dtype
        read += prompt * (kv_bytes or shape.kv_bytes_per_token(cached))
        reason = f"weights and {cached} KV"
    return streams * read_gb_s * 1e9 / read, f"{reason} at the read bandwidth of each sample"


def add_bound(result: dict[str, Any], shape: ModelShape) -> None:
    """Set `bound` and `share` of a result, if its kind has them: medians over the samples, each with its own rate.

    The cache that the program reported (`kv_cache_dtype`, `kv_bytes_per_token`) counts, not the requested one.
    """
    weights = result.get("weight_bytes") or result["weights"]
    cache = result.get("kv_cache_dtype") or result["kv_dtype"]
    numbers = (result["kind"], result["streams"], result["prompt"], weights, cache)
    per_gb_s = bound_of(shape, *numbers, 1.0, result.get("kv_bytes_per_token"))
    if per_gb_s:
        rates = sample_rates(result, "read_gb_s")
        result["bound"], result["bound_reason"] = statistics.median(rates) * per_gb_s[0], per_gb_s[1]
        result["share"] = _share(result["samples"], rates, result["bound"])


def sample_rates(result: dict[str, Any], name: str) -> list[float]:
    """The rate of each sample: the mean of the ones right before and right after it."""
    return [statistics.mean(pair) for pair in result["rates"][name]]


def share_of(result: dict[str, Any]) -> float | None:
    """A result's share of its bound, None where it has none. In older reports the median over the run's bound."""
    if not result.get("bound"):
        return None
    return float(result.get("share") or result["median"] / result["bound"])


def _share(samples: list[float], rates: list[float], bound: float) -> float:
    """The median of each sample over its own bound, which is to `bound` as its rate is to the median rate."""
    middle = statistics.median(rates)
    return statistics.median(sample / (bound * rate / middle) for sample, rate in zip(samples, rates, strict=True))


def ratios(run: dict[str, Any], goals: abc.Iterable[Goal] = GOALS) -> list[dict[str, Any]]:
    """Medians over medians for every goal whose two sides this run measured."""
    by_name = {(result["measure"], result["contestant"]): result for result in run["results"]}
    found = []
    for goal in goals:
        ours = by_name.get((goal.measure, goal.contestant))
        theirs = by_name.get((goal.measure, goal.over))
        value = None
        if ours and goal.over == "bound":
            value = share_of(ours)
        elif ours and theirs:
            value = ours["median"] / theirs["median"]
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
            _check_rates(result)


def _check_rates(result: dict[str, Any]) -> None:
    """A pair of rates for each sample, and the share that follows from them, in results that hold any."""
    what = f"{result['contestant']}, {result['measure']}"
    for name, pairs in result.get("rates", {}).items():
        if len(pairs) != len(result["samples"]) or not all(len(pair) == 2 and min(pair) > 0 for pair in pairs):
            raise ValueError(f"{what}: {name} is not two rates for each sample")
    if "share" in result:
        rates = sample_rates(result, "read_gb_s")
        if not math.isclose(result["share"], _share(result["samples"], rates, result["bound"])):
            raise ValueError(f"{what}: share is not that of the samples")


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


def by_contestant(run: dict[str, Any]) -> str:
    """The run as one table in Markdown: a row each, quality first, then medians with minimum and maximum by measure."""
    measures = list(dict.fromkeys(result["measure"] for result in run["results"] if result["unit"] == "tokens/s"))
    found = {(result["contestant"], result["measure"]): result for result in run["results"]}
    lines = ["| | perplexity | " + " | ".join(measures) + " |", "|---" * (len(measures) + 2) + "|"]
    for name in dict.fromkeys(result["contestant"] for result in run["results"]):
        cells = [quality_of(run.get("quality", {}), name)]
        for measure in measures:
            result = found.get((name, measure))
            spread_shown = "" if result is None else f"{three_digits(result['min'])}–{three_digits(result['max'])}"
            cells.append("–" if result is None else f"{three_digits(result['median'])} ({spread_shown})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quality_of(quality: abc.Mapping[str, dict[str, float]], contestant: str) -> str:
    """The increase of perplexity over the stored weights, or – if unknown. It depends on the compute dtype, not on the cache."""
    known = contestant if ", computed in " in contestant else contestant.split(",")[0]
    found = quality.get(contestant) or quality.get(known)
    return "–" if found is None else f"{100 * found['change']:+.2g} %"


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
        "| measure | contestant | perplexity | median | min–max | of the bound | rate | others' share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    quality = run.get("quality", {})
    for result in run["results"]:
        share = share_of(result)
        bounded = f"{share:.0%} of {three_digits(result['bound'])}" if share else "–"
        if share and share > MOST_SHARE:
            bounded += " (impossible: the bound is wrong)"
        rates = (
            f"{three_digits(statistics.median(sample_rates(result, name)))} {unit}"
            for name, unit in (("read_gb_s", "GB/s"), ("fp32_gflop_s", "Gflop/s"))
            if name in result.get("rates", {})
        )
        lines.append(
            f"| {result['measure']} | {result['contestant']} | {quality_of(quality, result['contestant'])} | "
            f"{three_digits(result['median'])} {result['unit']} | "
            f"{three_digits(result['min'])}–{three_digits(result['max'])} | {bounded} | {', '.join(rates) or '–'} | "
            f"{max(result['foreign'] or [0]):.0%} |"
        )
    if run.get("ratios"):
        lines += ["", "| measure | ratio | | goal |", "|---|---|---|---|"]
        for ratio in run["ratios"]:
            verdict = "reached" if ratio["reached"] else "missed"
            both = [quality_of(quality, ratio[side]) for side in ("contestant", "over")]
            suffix = f" (perplexity {both[0]} against {both[1]})" if quality and ratio["over"] != "bound" else ""
            pair = f"{ratio['contestant']} over {ratio['over']}{suffix}"
            lines.append(f"| {ratio['measure']} | {pair} | {ratio['ratio']:.2f} | {ratio['goal']} {verdict} |")
    if run.get("derived"):
        lines += ["", *(f"{name}: {value:.3g}" for name, value in run["derived"].items())]
    if run["left_out"]:
        reasons = (f"left out: {item['contestant']}: {item['reason']}" for item in run["left_out"])
        lines += ["", *dict.fromkeys(reasons)]  # once, though several groups may have left it out
    return "\n".join(lines)
