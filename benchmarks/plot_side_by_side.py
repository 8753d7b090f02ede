"""Draws what `transformers_side_by_side.py --out FILE` wrote: Windlass beside transformers, with bounds where they are known.

    python benchmarks/plot_side_by_side.py side_by_side.json side_by_side.png

One row per dtype, one panel per measure; bars are medians, whiskers minimum and maximum. The dashed line is the machine's
bound, from the bandwidth and matrix rate measured in the same run. It measures nothing and needs no torch.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

CONTESTANTS = {"windlass": ("Windlass", "#1f6f8b"), "transformers": ("transformers", "#b9b4a7")}


def dtypes_of(report: dict[str, Any]) -> list[str]:
    """The keys of the report that hold measurements."""
    return [name for name, value in report.items() if isinstance(value, dict) and "tokens_per_second" in value]


def measures_of(result: dict[str, Any]) -> list[str]:
    """Names such as "decode, 1 stream", in the order they were measured."""
    names = (re.sub(r"^(windlass|transformers) ", "", name) for name in result["tokens_per_second"])
    return list(dict.fromkeys(names))


def bound_of(report: dict[str, Any], dtype: str, measure: str) -> tuple[float, str] | None:
    """Tokens per second the machine allows and what limits it; None where the report does not tell.

    Decoding reads every weight once per step, whatever the number of streams. A prompt costs two operations per weight
    and token; the matrix rate is measured in float32, so it bounds nothing but float32.
    """
    result = report[dtype]
    decode = re.fullmatch(r"decode, (\d+) streams?", measure)
    bandwidth, weights = report.get("read_bandwidth_gb_s"), result.get("weight_bytes")
    if decode and bandwidth and weights:
        return int(decode[1]) * bandwidth * 1e9 / weights, f"weights read once per step at {bandwidth:.1f} GB/s"
    rate, parameters = report.get("fp32_matrix_gflop_s"), result.get("num_parameters")
    if measure.startswith("prefill") and dtype == "float32" and rate and parameters:
        return rate * 1e9 / (2 * parameters), f"two operations per weight at {rate:.0f} Gflop/s"
    return None


def draw_panel(axes: Axes, report: dict[str, Any], dtype: str, measure: str) -> None:
    """Two bars, their whiskers and the bound."""
    figures = report[dtype]["tokens_per_second"]
    top = 0.0
    for place, (key, (label, colour)) in enumerate(CONTESTANTS.items()):
        figure = figures.get(f"{key} {measure}")
        if figure is None:
            continue
        median, low, high = figure["median"], figure["min"], figure["max"]
        axes.bar(place, median, width=0.7, color=colour, label=label)
        axes.errorbar(place, median, yerr=[[median - low], [high - median]], color="#333333", capsize=5, linewidth=1)
        axes.annotate(
            f"{median:,.3g}" if median < 1000 else f"{median:,.0f}",
            (place, high),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            zorder=5,  # above the bound, which may pass through
        )
        top = max(top, high)
    bound = bound_of(report, dtype, measure)
    if bound is not None:
        value, reason = bound
        axes.axhline(value, color="#a33b20", linestyle="--", linewidth=1.2)
        axes.set_xlabel(f"bound {value:,.3g}: {reason}", fontsize=8, color="#a33b20")
        top = max(top, value)
    axes.set_ylim(0, top * 1.18 or 1)
    axes.set_xlim(-0.6, 1.6)
    axes.set_xticks(range(len(CONTESTANTS)), [label for label, _ in CONTESTANTS.values()])
    axes.set_title(f"{measure}, {dtype}", fontsize=10)
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)


def draw(report: dict[str, Any]) -> Figure:
    """The whole picture; raises ValueError for a report without measurements."""
    dtypes = dtypes_of(report)
    if not dtypes:
        raise ValueError("the report holds no measurements: make one with transformers_side_by_side.py --out FILE")
    columns = max(len(measures_of(report[dtype])) for dtype in dtypes)
    figure = Figure(figsize=(3.8 * columns, 3.5 * len(dtypes) + 0.9), layout="constrained")
    grid = figure.subplots(len(dtypes), columns, squeeze=False)
    for row, dtype in zip(grid, dtypes, strict=True):
        measures = measures_of(report[dtype])
        for axes, measure in zip(row, measures, strict=False):
            draw_panel(axes, report, dtype, measure)
        for axes in row[len(measures) :]:
            axes.set_visible(False)
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    figure.suptitle(
        f"Tokens per second on a Llama of 1B shape, {report.get('layers', '?')} layers (median, minimum to maximum)\n"
        f"{report.get('date', 'no date')}  |  {report.get('cpu', 'unknown machine')}, "
        f"{report.get('threads', '?')} threads  |  {versions}",
        fontsize=11,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON written by transformers_side_by_side.py --out")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    try:
        figure = draw(json.loads(options.report.read_text(encoding="utf-8")))
        figure.savefig(options.picture, dpi=130)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"cannot draw {options.report}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
