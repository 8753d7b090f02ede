"""Long contexts on one model: facts found in documents, and perplexity by position, under several scalings.

    python benchmarks/real_model.py facts MODEL --text novel.txt --text inductor.py [--only 8192 16384]
    python benchmarks/real_model.py perplexity MODEL --text novel.txt --text inductor.py
    python benchmarks/real_model.py draw

Both measurements take hours. What is finished is stored in --out (by default benchmarks/results), so a later run continues, also
on another machine: the lengths in scaling_facts.json, and the passes in scaling_perplexity.json with the loss by 2,048 tokens.
Single documents are stored in --work. draw makes a picture of both. Scalings that are equal at a length, because a text is within
the trained length, are read once. Nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.machine import describe
from harness.report import save

from windlass.engine.rotary.auto_scaling import model_thresholds
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.plotting import COLOURS, DASHES, mark_position, new_figure, save_png, style_axes, thousands
from windlass.lab.retrieval_documents import TASKS
from windlass.lab.retrieval_sweep import TaskOptions, run_tasks
from windlass.lab.scaling_inspection import read_groups
from windlass.server.startup.model_files import resolve_model
from windlass.server.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parents[1] / "results"

Scaling = dict[str, Any]

NONE: Scaling = {"rope_type": "default"}
YARN_2: Scaling = {"rope_type": "yarn", "factor": 2}
YARN_4: Scaling = {"rope_type": "yarn", "factor": 4}
DUAL_CHUNK: Scaling = {"rope_type": "dual_chunk"}
NTK: Scaling = {"rope_type": "ntk", "factor": 2}
DYNAMIC: Scaling = {"rope_type": "dynamic", "factor": 2}
SELF_EXTEND: Scaling = {"rope_type": "self_extend", "group_size": 3}

# Scalings by length of the documents, next to none: all of them within the trained length, where they cost something.
SCALINGS: Mapping[int, tuple[Scaling, ...]] = {
    8192: (YARN_2, YARN_4, DUAL_CHUNK, NTK, DYNAMIC, SELF_EXTEND),
    16384: (YARN_2, YARN_4, DUAL_CHUNK, NTK, DYNAMIC, SELF_EXTEND),
    32768: (YARN_2, YARN_4, DUAL_CHUNK, NTK, DYNAMIC, SELF_EXTEND),
    49152: (YARN_2, YARN_4, DUAL_CHUNK),
    65536: (YARN_2, YARN_4, DUAL_CHUNK),
    98304: (YARN_4,),
}

# (scaling, tokens) of the passes over each text; a pass shows all positions before its end.
PASSES: tuple[tuple[Scaling, int], ...] = (
    *((scaling, 32768) for scaling in (NONE, YARN_2, YARN_4, DUAL_CHUNK, NTK, SELF_EXTEND)),
    *((scaling, 65536) for scaling in (NONE, YARN_2, YARN_4, DUAL_CHUNK)),
    *((scaling, 98304) for scaling in (NONE, YARN_4)),
)

BUCKET = 2048  # positions


def name_of(scaling: Scaling) -> str:
    kind, *rest = scaling.values()
    return " ".join(["none" if kind == "default" else kind, *map(str, rest)])


# -- facts -------------------------------------------------------------------------------------------------------------


def facts() -> None:
    """Run every length and store the shares of right answers."""
    options = _parse(documents=True)
    model = resolve_model(options.model)
    file = options.out / "scaling_facts.json"
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    stored = _stored(file) or {}
    asked = {"texts": [text.name for text in options.text], "seed": options.seed}
    if stored and any(stored[name] != value for name, value in asked.items()):
        raise SystemExit(f"error: {file} is of other texts or another seed: choose another folder with --out")
    lengths: dict[int, Any] = {entry["length"]: entry for entry in stored.get("lengths", ())}
    for length, scalings in SCALINGS.items():
        if length in lengths or (options.only and length not in options.only):
            continue
        found = run_tasks(
            TaskOptions(
                model=model,
                model_name=options.model,
                load_tokenizer=Tokenizer.from_directory,
                html=work / f"facts_{length}.html",
                keep=work / "facts.jsonl",
                seed=options.seed,
                tasks=tuple(TASKS),
                texts=tuple(options.text),
                lengths=(length,),
                documents=options.documents,
                scalings=scalings,
                policies=("frozen",),
                cut=False,
            )
        )
        measured = found.to_json()
        lengths[length] = {
            **measured["lengths"][0],
            **_heading(),
            "auto": _auto(model, length),
            "answers": measured["documents"],
        }
        rest = {key: measured[key] for key in ("model", "trained_length", "texts", "seed", "confidence", "choices")}
        save({**rest, "lengths": [lengths[key] for key in sorted(lengths)]}, file)


def _auto(model: Path, length: int) -> str:
    """The scaling that `auto` chooses for a request of this length."""
    scaling = model_thresholds(read_groups(model), length).step(length).scaling or RopeScaling()
    return name_of(scaling.to_dict())


def _heading() -> dict[str, Any]:
    return {"date": time.strftime("%Y-%m-%d"), "machine": describe()}


# -- perplexity --------------------------------------------------------------------------------------------------------


def perplexity() -> None:
    """Run every pass that is not stored yet."""
    options = _parse()
    from windlass.lab.scoring import Scorer

    model = resolve_model(options.model)
    file = options.out / "scaling_perplexity.json"
    report = _stored(file) or {"bucket": BUCKET, "passes": []}
    known = {(entry["sha256"], entry["scaling"], entry["tokens"]) for entry in report["passes"]}
    tokenizer, scorer = Tokenizer.from_directory(model), None
    texts = {path.name: path.read_text(encoding="utf-8") for path in options.text}
    for scaling, tokens in PASSES:
        for name, text in texts.items():
            digest = hashlib.sha256(text.encode()).hexdigest()
            if (digest, name_of(scaling), tokens) in known or (options.only and tokens not in options.only):
                continue
            scorer = scorer or Scorer.load(model)
            ids = tokenizer.encode(text)[:tokens]
            if len(ids) < tokens:
                raise SystemExit(f"error: {name} has {len(ids):,} tokens and {tokens:,} are needed: give a longer text")
            plan = scorer.plan(tokens, RopeScaling.from_dict(scaling), "frozen" if scaling is DYNAMIC else None)
            losses = -scorer.logprobs(ids, plan).double()
            means = [round(float(part.mean()), 6) for part in losses.split(BUCKET)]
            entry = {"text": name, "sha256": digest, "scaling": name_of(scaling), "tokens": tokens}
            report["passes"].append({**entry, **_heading(), "nats": means})
            save(report, file)
            print(f"{name}, {name_of(scaling)}, {tokens:,} tokens: {math.exp(float(losses.mean())):.3f}", flush=True)


def _stored(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


# -- picture -----------------------------------------------------------------------------------------------------------


def draw() -> None:
    """Shares of right answers by length, and perplexity by position against no scaling."""
    options = _parse(measures=False)
    found = _stored(options.out / "scaling_facts.json")
    losses = _stored(options.out / "scaling_perplexity.json")
    if found is None or losses is None:
        raise SystemExit(f"error: {options.out} has no results of both measurements: run them first")
    names = list(dict.fromkeys(c["name"] for length in found["lengths"] for c in length["candidates"]))
    styles = {_short(name): (COLOURS[i % 7], DASHES[i % 7]) for i, name in enumerate(names)}
    figure = new_figure((10, 4.2))
    left, *rest = figure.subplots(1, 1 + len({entry["text"] for entry in losses["passes"]}))
    for name in names:
        points = []
        for length in found["lengths"]:
            for candidate in length["candidates"]:
                if candidate["name"] == name:
                    shares = [task["chosen"] for task in candidate["tasks"].values()]
                    right, total = sum(s["right"] for s in shares), sum(s["of"] for s in shares)
                    points.append((length["length"], 100 * right / total))
        colour, dashes = styles[_short(name)]
        left.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, dashes=dashes, label=_short(name))
    style_axes(left, x="tokens of the document", y="right answers chosen, %", title="facts (chance 25 %)")
    left.legend(fontsize=7, frameon=False)
    left.set_ylim(0, 100)
    for axes, text in zip(rest, dict.fromkeys(entry["text"] for entry in losses["passes"]), strict=True):
        passes = {(e["scaling"], e["tokens"]): e["nats"] for e in losses["passes"] if e["text"] == text}
        for name, (colour, dashes) in styles.items():
            longest = max((tokens for scaling, tokens in passes if scaling == name), default=0)
            if name == "none" or not longest:
                continue
            plain, own = passes["none", longest], passes[name, longest]
            positions = [losses["bucket"] * (i + 0.5) for i in range(len(own))]
            change = [100 * math.expm1(b - a) for a, b in zip(plain, own, strict=True)]
            axes.plot(positions, change, color=colour, dashes=dashes, label=name)
        style_axes(axes, x="position", y="perplexity above no scaling, %", title=text)
    for axes in (left, *rest):
        thousands(axes)
        mark_position(axes, found["trained_length"], "trained", "#808080", linewidth=0.8, linestyle=":")
    save_png(figure, options.out / "scaling_evidence.png")


def _short(name: str) -> str:
    """A candidate's name as in the perplexity report."""
    return "none" if name == "no scaling" else name.split(",")[0].replace("group_size=", "")


def _parse(measures: bool = True, documents: bool = False) -> argparse.Namespace:
    """Options of a command. measures: it reads a model. documents: it makes documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    if measures:
        parser.add_argument("model", help="GGUF file, directory or known name")
        parser.add_argument("--text", type=Path, action="append", required=True, help="prose (.txt) or code (.py)")
        parser.add_argument("--only", type=int, nargs="+", help="tokens of the documents or passes to run")
    if documents:
        parser.add_argument("--documents", type=int, default=1, help="per length and kind")
        parser.add_argument("--seed", type=int, default=1, help="random seed of the documents")
        parser.add_argument("--work", type=Path, default=Path("work/scaling"), help="folder of the pages")
    return parser.parse_args()
