"""What is lost where old tokens are dropped: perplexity by position under attention windows with sinks, against recomputing.

    python benchmarks/shifted_context.py MODEL --text FILE_OR_DIR [--text …] [--max-len 16384] [--out FILE.json]

Reads the first --max-len tokens of each text: seeing the last --window of them and each number of --sinks, and with the
context cut off and computed anew whenever it is full (`recomputed`: each token is read behind a half to a whole window).
Prints Markdown tables of perplexities by stretch, one per text. Nothing is timed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.charts import INK, new_figure, style
from long_text_report import make_parser, publish

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.lab.sweep_texts import find_files, make_windows
from windlass.server.text.tokenizer import Tokenizer

Losses = NDArray[np.float64]  # nats, of every token but the first


def read(core: EngineCore, tokens: list[int], context: ContextRule) -> Losses:
    """Losses of a text under one rule."""
    core.add(EngineRequest("text", tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), context=context))
    entries: list[float] = []
    while core.has_work():
        for output in core.step():
            if output.error is not None:
                raise output.error
            entries += [-entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    return np.array(entries)


def read_recomputing(core: EngineCore, tokens: list[int], window: int) -> Losses:
    """The same with at most `window` tokens, of which the older half is cut off and the rest computed anew when it is full."""
    half, losses = window // 2, [read(core, tokens[:window], ContextRule())]
    for start in range(window, len(tokens), half):
        losses.append(read(core, tokens[start - half : start + half], ContextRule())[half - 1 :])
    return np.concatenate(losses)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    texts, windows = make_windows(options.model, find_files(options.text), options.max_len, 1, Tokenizer.from_directory)
    config = EngineConfig(
        model=str(options.model),
        max_model_len=options.max_len,
        compute=ComputeConfig(device="cpu", dtype="float32"),
        cache=CacheConfig(dtype="float32", prefix_caching=False),
    )
    core, window = EngineCore(config), options.window
    rules = {f"sinks {n}": ContextRule(attention_window=window, attention_sinks=n) for n in options.sinks}
    ways: dict[str, ContextRule | None] = {**rules, "recomputed": None}
    edges = [*range(0, options.max_len, options.stretch), options.max_len]
    found = []
    for text in windows:
        tokens, losses = list(text.ids[: options.max_len]), dict[str, Losses]()
        for name, rule in ways.items():
            print(f"{texts[text.text].name}: {name}", file=sys.stderr, flush=True)
            losses[name] = read_recomputing(core, tokens, window) if rule is None else read(core, tokens, rule)
        rows = [
            {
                "from": low,
                "to": high,
                "nats": {name: float(x[max(0, low - 1) : high - 1].mean()) for name, x in losses.items()},
            }
            for low, high in pairwise(edges)
        ]
        found.append({"name": texts[text.text].name, "sha256": texts[text.text].digest, "rows": rows})
    date = datetime.date.today().isoformat()
    return {"date": date, "model": options.model.name, "window": window, "texts": found}


def table(report: dict[str, Any]) -> str:
    """Markdown, one table per text: a row per stretch, a column per way."""
    tables = []
    for text in report["texts"]:
        names = list(text["rows"][0]["nats"])
        lines = [f"| {text['name']} | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
        for row in text["rows"]:
            cells = [f"{math.exp(row['nats'][name]):.2f}" for name in names]
            lines.append(f"| {row['from']:,}–{row['to']:,} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def draw(report: dict[str, Any], path: Path) -> None:
    """A panel per text, a line per way. Needs matplotlib."""
    figure = new_figure(5.6 * len(report["texts"]), 3.6)
    panels = figure.subplots(1, len(report["texts"]), squeeze=False)[0]
    for axes, text in zip(panels, report["texts"], strict=True):
        rows = text["rows"]
        x = [(row["from"] + row["to"]) / 2 for row in rows]
        for index, name in enumerate(
            rows[0]["nats"]
        ):  # some lie on one another: the later ones are thinner, and broken
            look = {"linewidth": 3 - 0.4 * min(index, 5), "linestyle": "-" if index % 2 == 0 else "--"}
            axes.plot(x, [math.exp(row["nats"][name]) for row in rows], marker=".", label=name, **look)
        axes.set_title(text["name"], fontsize=9)
        axes.set_xlabel("position", fontsize=8)
        axes.set_ylabel("perplexity", fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        style(axes)
        axes.tick_params(which="minor", labelsize=8, colors=INK)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = make_parser(__doc__, max_len=16384, stretch=2048)
    parser.add_argument("--window", type=int, default=2048, help="keys that a token sees, itself included")
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 1, 4, 16, 64], help="leading tokens seen besides")
    parser.add_argument("--plot", type=Path, help="draw it, as PNG")
    options = parser.parse_args()
    report = measure(options)
    publish(report, options.out, table)
    if options.plot is not None:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
