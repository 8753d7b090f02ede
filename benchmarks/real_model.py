"""Measurements of a model on long texts: scalings, hidden numbers, stale keys and narrower caches. Nothing is timed.

    python benchmarks/real_model.py texts --out texts      # long documents from Debian packages
    python benchmarks/real_model.py all MODEL [--texts FOLDER] [--work work/real] [--docs work/real/docs] [--only sweep …]
    python benchmarks/real_model.py kv|passkeys|stale MODEL --text FILE …       # one of them; see --help
    python benchmarks/real_model.py facts|perplexity MODEL --text FILE …        # many scalings at up to 98,304 tokens; then: draw

all runs, in this order, `windlass rope sweep` to twice the trained length, kv to the trained length, passkeys to twice and
stale to 1.4 times the trained length. It writes numbers (`real_model_*.json`) and a page of tables (`real-model.md`) to
--docs. Finished passes are stored under --work, so an interrupted run resumes. --page-only writes the page from existing
numbers. A page that another program wrote is not overwritten, and neither are the numbers next to it. A model of 135 million
parameters, trained on 8,192 tokens, takes about an hour and a half on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import kv_by_position, long_texts, passkeys, scaling_evidence, stale_keys_model
from harness.subcommands import run_subcommand

STEPS = ("sweep", "kv", "passkeys", "stale")
# Texts of the steps other than the sweep.
FEW = ("novel", "handbook")
_MARK = "<!-- made by benchmarks/real_model.py -->"
SWEPT = (
    {"rope_type": "yarn", "factor": 2},
    {"rope_type": "dynamic", "factor": 2},
    {"rope_type": "yarn", "factor": 4},
    {"rope_type": "linear", "factor": 2},
)


def command(step: str, options: argparse.Namespace, trained: int, texts: list[Path]) -> list[str]:
    """The command line of one step. Steps of many passes read only FEW texts."""
    out = ["--out", str(options.docs / f"real_model_{step}.json")]
    few = [text for text in texts if text.stem in FEW] or texts[:2]
    if step == "sweep":
        words = [sys.executable, "-m", "windlass.server.cli.main", "rope", "sweep", str(options.model), "--no-cut"]
        words += ["--max-len", str(2 * trained), "--windows", "1", "--policy", "frozen", "--device", "cpu"]
        words += ["--dtype", "float32", "--keep", str(options.work / "sweep.jsonl")]
        words += ["--out", str(options.work / "sweep.html"), "--json", str(options.docs / "real_model_sweep.json")]
        words += ["--png", str(options.docs / "real_model_sweep.png"), *_scalings("--scaling", SWEPT)]
        return words + _texts(texts)
    words = [sys.executable, str(Path(__file__).resolve()), step, str(options.model), *out]
    if step == "kv":
        keep = str(options.work / "kv.jsonl")
        return [*words, "--max-len", str(trained), "--stretch", str(trained // 4), "--keep", keep, *_texts(texts)]
    if step == "passkeys":
        words += ["--max-len", str(2 * trained), "--stretch", str(trained // 2), "--every", str(trained // 32)]
        words += ["--keep", str(options.work / "passkeys.jsonl")]
        return [*words, *_scalings("--scaling", SWEPT[:3]), *_texts(few)]
    return [*words, "--max-len", str(math.floor(trained * math.sqrt(2))), "--work", str(options.work), *_texts(few)]


def _texts(texts: list[Path]) -> list[str]:
    return [word for text in texts for word in ("--text", str(text))]


def _scalings(option: str, scalings: tuple[dict[str, Any], ...]) -> list[str]:
    return [word for scaling in scalings for word in (option, json.dumps(scaling))]


def sweep_table(report: dict[str, Any]) -> str:
    """Perplexity by half trained lengths, with the change against no scaling and its interval."""
    heads = list(report["curves"][0]["perplexity"])
    lines = ["| scaling | " + " | ".join(heads) + " |", "|---" + "|--:" * len(heads) + "|"]
    for curve in report["curves"]:
        cells = []
        for head in heads:
            above = curve["nats_above_no_scaling"][head]
            cell = f"{curve['perplexity'][head]:.4g}"
            if above is not None:
                ends = above["interval"]
                around = "" if ends is None else f"; {_percent(ends[0])} to {_percent(ends[1])}"
                cell += f" ({_percent(above['mean'])} %{around})"
            cells.append(cell)
        lines.append(f"| {curve['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, 700.0)):+.3g}"


def page(docs: Path) -> str:
    """The page, with the parts that have been measured."""
    found = {step: docs / f"real_model_{step}.json" for step in STEPS}
    reports = {step: json.loads(path.read_text("utf-8")) for step, path in found.items() if path.exists()}
    if not reports:
        raise SystemExit(f"error: no numbers in {docs}")
    first = next(iter(reports.values()))
    lines = [_MARK, "# Long texts and a real model", ""]
    lines += [
        f"Perplexity by position, hidden numbers, stale keys and caches of "
        f"{first['model']}. Texts are whole documents of Debian packages, each read from its beginning; "
        "`benchmarks/real_model.py texts` extracts them and records their versions. Brackets hold a change in per cent and its "
        "95 % interval (Student's t over texts, paired: every row reads the same texts). Weights, activations and caches are "
        "float32 unless stated otherwise.",
        "",
    ]
    if "sweep" in reports:
        report = reports["sweep"]
        names = ", ".join(text["name"].removesuffix(".txt") for text in report["texts"])
        lines += ["## Which scaling holds where", ""]
        lines += [f"Perplexity of {names}, {report['max_length']:,} tokens each, by position. {report['date']}.", ""]
        lines += [sweep_table(report), "", "![Perplexity by position](real_model_sweep.png)", ""]
    if "passkeys" in reports:
        report = reports["passkeys"]
        names = ", ".join(dict.fromkeys(question["text"].removesuffix(".txt") for question in report["questions"]))
        far = sorted(question["distance"] for question in report["questions"])
        reach = (
            f"{far[0]:,} to {far[-1]:,} tokens behind (half of them within {far[len(far) // 2]:,})" if far else "behind"
        )
        lines += ["## Hidden numbers", ""]
        lines += [
            f'Notes in the text, "The secret number of Alice is 48213.", and further on the same sentence again, '
            f"{reach}: how many of the numbers come "
            f"out right, all five digits, greedily. In brackets Wilson's 95 % interval. {names}; {report['date']}.",
            "",
            passkeys.table(report),
            "",
        ]
    if "stale" in reports:
        report = reports["stale"]
        names = ", ".join(name.removesuffix(".txt") for name in report["texts"])
        lines += ["## Stale keys", ""]
        lines += [
            f"Dynamic NTK of factor {report['factor']:g}, read as if generated token by token, by "
            f"each policy. In brackets the change against `recompute`. {names}; {report['date']}.",
            "",
            stale_keys_model.table(report),
            "",
        ]
    if "kv" in reports:
        report = reports["kv"]
        names = ", ".join(text["name"].removesuffix(".txt") for text in report["texts"])
        lines += ["## Narrower caches, by position", ""]
        lines += [f"The change of perplexity by `--kv-cache-dtype`. {names}; {report['date']}.", ""]
        lines += [kv_by_position.table(report), ""]
    lines += ["## Reproduction", "", "```bash"]
    lines += [".venv/bin/python benchmarks/real_model.py texts --out texts --work work/texts"]
    lines += [".venv/bin/python benchmarks/real_model.py all /path/to/model --texts texts", "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run all measurements and write the page.")
    parser.add_argument("model", type=Path, nargs="?", help="Hugging Face directory")
    parser.add_argument("--texts", type=Path, default=Path("texts"), help="folder of *.txt")
    parser.add_argument("--work", type=Path, default=Path("work/real"), help="folder for finished passes")
    parser.add_argument("--docs", type=Path, default=Path("work/real/docs"), help="folder for numbers and page")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="some of the measurements")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    made = options.docs / "real-model.md"
    if made.exists() and not made.read_text("utf-8").startswith(_MARK):
        parser.error(f"{made} was not written by this program: choose another folder with --docs")
    if not options.page_only:
        if options.model is None:
            parser.error("name a model")
        options.work.mkdir(parents=True, exist_ok=True)
        options.docs.mkdir(parents=True, exist_ok=True)
        config = json.loads((options.model / "config.json").read_text("utf-8"))
        texts = sorted(options.texts.glob("*.txt"))
        for step in STEPS:
            if step in options.only:
                subprocess.run(command(step, options, config["max_position_embeddings"], texts), check=True)
                made.write_text(page(options.docs), encoding="utf-8")
    made.write_text(page(options.docs), encoding="utf-8")


if __name__ == "__main__":
    commands = {"texts": long_texts.main, "all": main, "kv": kv_by_position.main, "passkeys": passkeys.main}
    commands |= {
        "stale": stale_keys_model.main,
        "facts": scaling_evidence.facts,
        "perplexity": scaling_evidence.perplexity,
    }
    run_subcommand(__doc__, commands | {"draw": scaling_evidence.draw})
