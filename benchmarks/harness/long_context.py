"""What a study of long contexts leaves behind: runs by model and length, their figures, forecasts, a picture, a page.

Starts nothing and measures nothing. A study is {"format": …, "date", "machine", "models": {name: {"options": [...],
"lengths": [{"length", "foreign_share", "run": a load test's JSON object}]}}, "fits": {name: …}}, lengths in tokens of input.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.charts import BOUND, COLOURS, INK, OTHER, legend, new_figure, style

from windlass.clients.loadtest.figures import against_context
from windlass.clients.loadtest.report import write_html
from windlass.clients.loadtest.results import NamedRun, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "windlass-long-context/1"
_COLOURS = (COLOURS["Windlass"], COLOURS["OpenVINO"], COLOURS["llama.cpp"], OTHER)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds, from about the least to about the most."""

    low: float
    high: float

    def __add__(self, other: Forecast) -> Forecast:
        return Forecast(self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        low, high = _minutes(self.low), _minutes(self.high)
        return low if low == high else f"{low} to {high}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def forecast(measured: dict[int, float], length: int, prompts: int) -> Forecast:
    """How long `prompts` requests of a length will take, from the seconds per request measured at others.

    A request's cost grows between linearly and with the square of its length (attention); with two lengths measured, the power
    between the last two, and a quarter more or less.
    """
    if not measured:
        raise ValueError("nothing was measured yet")
    *_, last = sorted(measured)
    ratio, seconds = length / last, prompts * measured[last]
    if len(measured) == 1:
        ends = sorted((ratio, ratio**2))
        return Forecast(seconds * ends[0], seconds * ends[1])
    before = sorted(measured)[-2]
    power = math.log(measured[last] / measured[before]) / math.log(last / before)
    likely = seconds * ratio ** min(max(power, 0.0), 2.0)
    return Forecast(0.75 * likely, 1.25 * likely)


def runs_of(study: dict[str, Any]) -> list[NamedRun]:
    """All runs, a series per model. Raises ValueError for one that cannot be read."""
    return [
        NamedRun(name=f"{name}, {entry['length']:,} tokens", result=RunResult.from_dict(entry["run"]), series=name)
        for name, model in study["models"].items()
        for entry in model["lengths"]
    ]


def rows_of(study: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per model and length: medians in ms, and tokens per second while the prompt is read."""
    rows = []
    for run, (name, entry) in zip(
        runs_of(study),
        ((name, entry) for name, model in study["models"].items() for entry in model["lengths"]),
        strict=True,
    ):
        summary = run.result.summary()
        ttft, itl = summary["ttft_actual_ms"], summary["itl_ms"]
        rows.append(
            {
                "model": name,
                "length": entry["length"],
                "completed": summary["completed"],
                "failed": summary["failed"],
                "ttft_ms": ttft["p50"],
                "itl_ms": itl["p50"],
                "itl_p95_ms": itl["p95"],
                "prompt_tokens_per_second": entry["length"] * 1000 / ttft["p50"] if ttft["p50"] else None,
                "foreign_share": entry["foreign_share"],
            }
        )
    return rows


def fits_of(study: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per model the line through ITL over context, in ms and ms per token, and its slope's standard error; models with too
    few lengths are left out."""
    return {entry["name"]: entry["itl_fit"] for entry in against_context(runs_of(study)) if entry["itl_fit"]}


def text_table(study: dict[str, Any]) -> str:
    """The rows as Markdown, with the fits below."""
    lines = [
        "| model | input tokens | TTFT, ms | prompt tokens/s | ITL, ms | ITL p95, ms | requests |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows_of(study):
        cells = [row[key] for key in ("ttft_ms", "prompt_tokens_per_second", "itl_ms", "itl_p95_ms")]
        figures = ["–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in cells]
        lines.append(f"| {row['model']} | {row['length']:,} | {' | '.join(figures)} | {row['completed']} |")
    lines.append("")
    for name, fit in fits_of(study).items():
        slope = f"{fit['slope'] * 1000:.3g} ± {fit['error'] * 2000:.2g}"
        lines.append(f"{name}: ITL = {fit['intercept']:.3g} ms + {slope} ms per 1,000 tokens of context.")
    return "\n".join(lines).rstrip() + "\n"


def draw(study: dict[str, Any]) -> Figure:
    """TTFT over input tokens, and ITL over context with its fit; a colour per model. Needs matplotlib."""
    figure = new_figure(9.6, 4.0)
    left, right = figure.subplots(1, 2)
    for entry, colour in zip(against_context(runs_of(study)), itertools.cycle(_COLOURS), strict=False):
        bins, gaps, fit = entry["ttft"]["bins"], entry["itl"]["bins"], entry["itl_fit"]
        points = entry["ttft"]["points"]
        left.scatter([x for x, _ in points], [y for _, y in points], s=7, color=colour, alpha=0.35)
        left.plot([b["x"] for b in bins], [b["median"] for b in bins], color=colour, marker="o", markersize=3)
        right.plot(
            [b["x"] for b in gaps],
            [b["median"] for b in gaps],
            color=colour,
            marker="o",
            markersize=3,
            label=f"{entry['name']}: median",
        )
        right.plot([b["x"] for b in gaps], [b["p95"] for b in gaps], color=colour, linewidth=1, linestyle="--")
        if fit:
            ends = [0.0, gaps[-1]["x"]]
            text = f"{fit['intercept']:.3g} + {fit['slope'] * 1000:.3g} per 1,000 tokens"
            right.plot(
                ends,
                [fit["intercept"] + fit["slope"] * x for x in ends],
                color=BOUND,
                linewidth=1,
                linestyle=":",
                label=text,
            )
    for axes, label, title in (
        (left, "input tokens", "Time to first token, ms"),
        (right, "input tokens + position", "Inter-token latency, ms (dashed: p95, dotted: fit)"),
    ):
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        style(axes)
    if right.get_legend_handles_labels()[0]:
        legend(right)
    machine = study["machine"]
    figure.suptitle(f"{study['date']}  |  {machine['cpu']}, {machine['cores']} cores", color=INK, fontsize=9)
    return figure


def save_study(study: dict[str, Any], out: Path) -> None:
    """The JSON, and beside it the page and, where matplotlib is there, the picture. Written anew after every length, each file
    in one move, so that whoever interrupts keeps a whole one."""
    study["fits"] = fits_of(study)
    _replace(out, json.dumps(study, ensure_ascii=False) + "\n")
    runs = runs_of(study)
    if not runs:
        return
    page = out.with_suffix(".html.part")
    write_html(runs, page, title="Speed at long contexts")
    page.replace(out.with_suffix(".html"))
    try:
        figure = draw(study)
    except ImportError:
        return
    picture = out.with_suffix(".part.png")
    figure.savefig(picture, dpi=130)
    picture.replace(out.with_suffix(".png"))


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load_study(path: Path) -> dict[str, Any]:
    """A study to go on with. Raises ValueError, or OSError."""
    study = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(study, dict) or study.get("format") != FORMAT:
        raise ValueError(f"{path} is no study of long contexts")
    runs_of(study)
    return study


def seconds_per_request(run: RunResult) -> float:
    """Mean of the completed requests. Raises ValueError where there are none."""
    done = [record.e2el_ms for record in run.completed if record.e2el_ms is not None]
    if not done:
        why = next((f": {r.outcome}: {r.message}" for r in run.records if not r.completed), "")
        raise ValueError(f"no request completed{why}")
    return math.fsum(done) / len(done) / 1000
