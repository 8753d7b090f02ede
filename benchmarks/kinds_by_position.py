"""Perplexity by position under every kind of scaling, every policy, a window with sinks and cut text: means over several texts.

    python benchmarks/kinds_by_position.py MODEL --text FILE [--text …] --keep FILE.jsonl [--max-len 16384] [--out FILE.json]

MODEL: what `windlass serve` takes. Reads the first --max-len tokens of each text, one text after the other, under the kinds
that `windlass rope sweep --tasks` asks under, so that those of an interrupted run are whole texts; --keep goes on. With
--report-only nothing is read, and the report is of what --keep has. Writes mean losses by stretch, and prints Markdown tables:
perplexities, and what they are against no scaling within the trained length and against the cut text near the end, with 95 %
intervals (paired: Student's t over texts). Nothing is timed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.machine import describe
from long_text_report import make_parser, publish

from windlass.clients.loadtest.intervals import mean_interval
from windlass.engine.model.weight_storage import block_formats
from windlass.engine.rotary.rope_scaling import main_group, original_len
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES
from windlass.lab.candidates import Candidate, task_candidates, window_sweep_candidate
from windlass.lab.perplexity_sweep import PerplexityRunner
from windlass.lab.result_log import PassLog
from windlass.lab.scaling_inspection import read_groups
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_progress import SweepProgress
from windlass.lab.sweep_texts import find_files, make_windows
from windlass.server.startup.model_files import resolve_model
from windlass.server.text.tokenizer import Tokenizer

CONFIDENCE = 0.95
NONE, CUT = "no scaling", "text cut to the trained length"
# What is read first where there is not time for all of it.
ORDER = (
    "none",
    "yarn",
    "dual_chunk",
    "self_extend",
    "window",
    "rerope",
    "ntk",
    "longrope",
    "llama3",
    "linear",
    "log_n",
)


def candidates_of(model: Path, max_len: int, sinks: int) -> tuple[list[Candidate], int]:
    """Every kind once, each with the factor that `max_len` needs, and the trained length. The cut text is none of them."""
    group = main_group(read_groups(model))
    trained = original_len(group.scaling, group.base)
    window = window_sweep_candidate(trained - sinks, sinks)
    found = [window]
    dynamic: list[Candidate] = []
    for task in task_candidates(group, trained, max_len):
        name, scaling = task.name, task.scaling or {"rope_type": "default"}
        if task.kind == "dynamic":
            dynamic = [Candidate(f"{name}, {p}", name, "dynamic", scaling, p, max_len) for p in ROPE_UPDATES]
        elif task.kind == "longrope":  # under recompute it is no scaling up to the trained length, and this beyond
            found.append(Candidate(f"{name}, frozen", name, task.kind, scaling, "frozen", max_len))
        elif task.kind not in ("own", "cut"):
            found.append(Candidate(name, name, task.kind, scaling))
    found.sort(key=lambda candidate: ORDER.index(candidate.kind))
    frozen, recompute, rotate = dynamic
    return [*found[:5], frozen, *found[5:], rotate, recompute], trained


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = resolve_model(str(options.model))
    candidates, trained = candidates_of(model, options.max_len, options.sinks)
    candidates = [c for c in candidates if not options.kinds or c.kind in options.kinds]
    if options.max_len <= trained:
        raise SystemExit(f"error: --max-len {options.max_len} is not past the trained length, {trained}")
    texts, windows = make_windows(model, find_files(options.text), options.max_len, 1, Tokenizer.from_directory)
    scorer = Scorer.load(model, device="cpu", dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype)
    kept, progress = PassLog(options.keep), SweepProgress()
    edges = edges_of(trained, options.max_len, options.stretch)
    losses: dict[str, dict[str, list[float]]] = {}
    try:
        reading = [PerplexityRunner(scorer, texts, [window], trained, kept, progress) for window in windows]
        if not options.report_only:
            for measured in reading:
                measured.announce(candidates)
                if any(c.kind == "none" for c in candidates):
                    measured.announce_cut()
        for text, measured in zip(texts, reading, strict=True):
            for candidate in candidates:
                if options.report_only and not measured.is_known(candidate):
                    continue
                curve = measured(candidate)
                losses.setdefault(candidate.name, {})[text.name] = _by_stretch(curve.nll[0], edges)
                if candidate.kind == "none" and (measured.is_cut_logged() or not options.report_only):
                    cut = measured.cut(curve).nll[0]
                    losses.setdefault(CUT, {})[text.name] = _by_stretch(cut, edges)
    finally:
        progress.stop()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "model": str(options.model),
        **_types(scorer),
        "identity": scorer.identity,
        "trained_length": trained,
        "edges": edges,
        "texts": [{"name": text.name, "sha256": text.digest} for text in texts],
        "scalings": {c.name: c.scaling for c in candidates if c.name in losses},
        "loss": losses,
    }


def edges_of(trained: int, max_len: int, stretch: int) -> list[int]:
    """Where the stretches end that losses are means over; what the table is of ends at one of these."""
    return sorted({*range(0, max_len, stretch), trained, _late(trained, max_len), max_len})


def _late(trained: int, end: int) -> int:
    """From where on the last column looks."""
    return (trained + end) // 2


def _types(scorer: Scorer) -> dict[str, str]:
    """What weights lie in, what they are multiplied by, and what keys and values are cached in."""
    decoder = scorer.decoder
    blocks = block_formats(decoder.spec, decoder.plan)
    return {
        "weights": ", ".join(blocks) or _name(decoder.weight_dtype),
        "activations": decoder.backend.options.activations if blocks else _name(decoder.dtype),
        "cache": _name(scorer.cache_dtype),
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _by_stretch(nll: Any, edges: Sequence[int]) -> list[float]:
    return [round(float(nll[low:high].mean()), 6) for low, high in pairwise(edges)]


def mean_over(report: dict[str, Any], losses: Sequence[float], low: int, high: int) -> float:
    """Nats a token over positions low .. high, both of them edges."""
    edges = report["edges"]
    parts = [(b - a, loss) for (a, b), loss in zip(pairwise(edges), losses, strict=True) if low <= a and b <= high]
    return sum(width * loss for width, loss in parts) / sum(width for width, _ in parts)


def change(report: dict[str, Any], name: str, other: str, texts: Sequence[str], low: int, high: int) -> str:
    """By how many per cent the perplexity of one way lies above another's, with its interval over texts."""
    loss = report["loss"]
    apart = [
        mean_over(report, loss[name][text], low, high) - mean_over(report, loss[other][text], low, high)
        for text in texts
    ]
    mean, interval = mean_interval(apart, CONFIDENCE)
    around = "" if interval is None else f" ({_percent(interval.low)} to {_percent(interval.high)})"
    return f"{_percent(mean)} %{around}"


def _percent(nats: float) -> str:
    percent = 100 * math.expm1(min(nats, 700.0))
    return f"{percent:+.2f}" if abs(percent) < 9.995 else f"{percent:+,.0f}"


def table(report: dict[str, Any]) -> str:
    """Markdown: a row for each way that all texts were read in; ways that only some were read in have tables of their own."""
    loss, order = report["loss"], [text["name"] for text in report["texts"]]
    sets = {name: tuple(text for text in order if text in found) for name, found in loss.items()}
    tables = []
    for texts in sorted(
        {texts for name, texts in sets.items()}, key=lambda texts: (-len(texts), order.index(texts[0]))
    ):
        full = len(texts) == max(map(len, sets.values()))
        names = [name for name, own in sets.items() if own == texts or (not full and name in (NONE, CUT))]
        names = [name for name in names if set(texts) <= set(sets[name])]
        if names:
            tables.append(_table_of(report, names, texts))
    return "\n\n".join(tables)


def _table_of(report: dict[str, Any], names: list[str], texts: Sequence[str]) -> str:
    edges, trained = report["edges"], report["trained_length"]
    end, late = edges[-1], _late(trained, edges[-1])
    stretches = [(0, trained), *((a, b) for a, b in pairwise(edges) if a >= trained)]
    heads = [f"{a:,}–{b:,}" for a, b in stretches]
    heads += [f"0–{trained:,} against no scaling", f"{late:,}–{end:,} against cut text"]
    lines = [f"| {', '.join(text.removesuffix('.txt') for text in texts)} | " + " | ".join(heads) + " |"]
    lines.append("|---" + "|--:" * len(heads) + "|")
    for name in names:
        found = [report["loss"][name][text] for text in texts]
        cells = []
        for low, high in stretches:
            mean = sum(mean_over(report, one, low, high) for one in found) / len(found)
            cells.append(f"{math.exp(min(mean, 700.0)):.2f}")
        cells.append("" if name == NONE or NONE not in names else change(report, name, NONE, texts, 0, trained))
        cells.append("" if name == CUT or CUT not in names else change(report, name, CUT, texts, late, end))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """By how much each way's perplexity lies above the cut text's, of those that all texts were read in. Needs matplotlib."""
    from harness.charts import legend, new_figure, style

    from windlass.lab.sweep_plots import KIND_COLOURS, KIND_DASHES

    figure = new_figure(9.0, 4.6)
    axes = figure.subplots()
    middles = [(a + b) / 2 for a, b in pairwise(report["edges"])]
    texts = [text["name"] for text in report["texts"]]
    for name, found in report["loss"].items():
        if name == CUT or len(found) < len(texts):
            continue
        apart = [[a - b for a, b in zip(found[t], report["loss"][CUT][t], strict=True)] for t in texts]
        above = [100 * math.expm1(min(sum(at) / len(at), 5.0)) for at in zip(*apart, strict=True)]
        kind = next((k for k in KIND_COLOURS if name.startswith(k)), "other")
        kind = {NONE: "none"}.get(name, kind)
        look: dict[str, Any] = {"dashes": KIND_DASHES[kind]} if kind in KIND_DASHES else {}
        if name.startswith("leaky"):
            kind, look = "rerope", {"dashes": (1, 1)}
        axes.plot(middles, above, color=KIND_COLOURS[kind], label=name, linewidth=1.4, **look)
    axes.set_ylim(-3, 15)
    axes.axvline(report["trained_length"], color="#808080", linewidth=0.8, linestyle=":")
    axes.set_xlabel("position", fontsize=8)
    axes.set_ylabel("% of perplexity above text cut to the trained length", fontsize=8)
    style(axes)
    legend(axes)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__, max_len=16384, stretch=2048)
    parser.add_argument(
        "--sinks", type=int, default=4, help="of the window, which leaves room for them in the trained length"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=[*ORDER, "dynamic"], help="read only these; without none, nothing is cut either"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--keep", type=Path, required=True, help="file of finished passes, which are not repeated")
    parser.add_argument("--report-only", action="store_true", help="read nothing")
    parser.add_argument("--plot", type=Path, help="draw it, as PNG")
    options = parser.parse_args()
    if options.plot is not None and options.kinds and "none" not in options.kinds:
        parser.error("--plot draws what lies above the cut text, which is read with the kind none: add it to --kinds")
    report = measure(options)
    publish(report, options.out, table)
    if options.plot is None:
        return
    if len(report["loss"].get(CUT, ())) < len(report["texts"]):
        print(f"no picture: not all texts have been read as {CUT} yet")
    else:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
