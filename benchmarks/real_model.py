"""Everything that is measured on long texts, for one model: which scaling holds where, hidden numbers, stale keys, caches.

    python benchmarks/real_model.py MODEL [--texts FOLDER] [--work work/real] [--docs work/real/docs] [--only sweep …]

Runs, one after the other and most telling first, `windlass rope sweep` to twice the trained length, `kv_by_position.py` to
the trained length, `passkeys.py` to twice and `stale_keys_model.py` to 1.4 times the trained length, over the texts that
`long_texts.py` makes, and writes their numbers (`real_model_*.json`) and a page of tables, `real-model.md`, into --docs. After an
interruption it goes on: finished passes lie under --work, and none is computed again. --page-only writes the page from the
numbers that are there. A page that somebody else has written, and the numbers beside it, are not touched.
On two cores, 135 million parameters trained on 8,192 tokens take about an hour and a half. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import kv_by_position  # noqa: E402
import passkeys  # noqa: E402
import stale_keys_model  # noqa: E402

STEPS = ("sweep", "kv", "passkeys", "stale")
# The texts of each step; all are read by the sweep.
FEW = ("novel", "handbook")
_MARK = "<!-- made by benchmarks/real_model.py -->"
SWEPT = (
    {"rope_type": "yarn", "factor": 2},
    {"rope_type": "dynamic", "factor": 2},
    {"rope_type": "yarn", "factor": 4},
    {"rope_type": "linear", "factor": 2},
)


def command(step: str, options: argparse.Namespace, trained: int, texts: list[Path]) -> list[str]:
    """The command line of one step; `few` texts where a text takes many passes."""
    out = ["--out", str(options.docs / f"real_model_{step}.json")]
    few = [text for text in texts if text.stem in FEW] or texts[:2]
    if step == "sweep":
        words = [sys.executable, "-m", "windlass.server.cli.main", "rope", "sweep", str(options.model), "--no-cut"]
        words += ["--max-len", str(2 * trained), "--windows", "1", "--policy", "frozen", "--device", "cpu"]
        words += ["--dtype", "float32", "--keep", str(options.work / "sweep.jsonl")]
        words += ["--out", str(options.work / "sweep.html"), "--json", str(options.docs / "real_model_sweep.json")]
        words += ["--png", str(options.docs / "real_model_sweep.png"), *_scalings("--scaling", SWEPT)]
        return words + _texts(texts)
    script = {"kv": "kv_by_position", "passkeys": "passkeys", "stale": "stale_keys_model"}[step]
    words = [sys.executable, str(HERE / f"{script}.py"), str(options.model), *out]
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
    """Perplexity by stretch of half a trained length; behind it the change against no scaling with its interval."""
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
    """The page, from what has been measured; parts that are not there yet are left out."""
    found = {step: docs / f"real_model_{step}.json" for step in STEPS}
    reports = {step: json.loads(path.read_text("utf-8")) for step, path in found.items() if path.exists()}
    if not reports:
        raise SystemExit(f"error: there are no numbers in {docs}")
    first = next(iter(reports.values()))
    lines = [_MARK, "# Long texts and a real model", ""]
    lines += [
        f"The same questions as on the bundled model ([scalings](rope_sweep.md), [stale keys](stale-keys.md)), asked of "
        f"{first['model']}. Texts are whole documents of Debian packages, each read from its beginning; "
        "`benchmarks/long_texts.py` makes them and records their versions. Where there are brackets, they hold a change in per "
        "cent and its 95 % interval (Student's t over texts, paired: every row reads the same texts). Weights, activations "
        "and caches are float32 where nothing else is said.",
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
            f"[each policy](stale-keys.md). In brackets the change against `recompute`. {names}; {report['date']}.",
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
    lines += ["## Making it again", "", "```bash"]
    lines += [".venv/bin/python benchmarks/long_texts.py --out texts --work work/texts"]
    lines += [".venv/bin/python benchmarks/real_model.py /path/to/model --texts texts", "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="Hugging Face directory")
    parser.add_argument("--texts", type=Path, default=Path("texts"), help="folder of *.txt")
    parser.add_argument("--work", type=Path, default=Path("work/real"), help="folder for finished passes")
    parser.add_argument("--docs", type=Path, default=Path("work/real/docs"), help="folder for numbers and page")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="some of the measurements")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    made = options.docs / "real-model.md"
    if made.exists() and not made.read_text("utf-8").startswith(_MARK):
        parser.error(f"{made} was not made by this program: name another folder with --docs")
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
    main()
