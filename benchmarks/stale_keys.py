"""What becomes of cached keys when frequencies change with length: transformers' cache and each policy of Windlass.

    python benchmarks/stale_keys.py [--out docs] [--text FILE]

Random Llamas read 192 tokens, 48 of them as the prompt and the rest one by one, whatever the model would have said. Their
rotary scaling is dynamic NTK (factor 4, trained length 64) or LongRoPE (short list up to 96 tokens). Each way to read is
compared, past the length where frequencies first change, with a model that keeps no cache. With --text, the bundled model
reads that text under dynamic NTK to four times its trained length, and its perplexity says which differences matter.
Writes stale_keys.json and stale_keys.png. The references are those of the tests; nothing here is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.rotary_oracles import (
    Uncached,
    UnrotatedCache,
    cached_by_transformers,
    dynamic_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
)
from helpers.tiny_models import make_model

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.lab.scoring import Scorer
from windlass.server.text.tokenizer import Tokenizer

THETA, HEAD_DIM, TRAINED, ORIGINAL = 10_000.0, 32, 64, 96
PROMPT, LENGTH = 48, 192
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.02 * j for j in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.4 * j for j in range(HEAD_DIM // 2)],
}
EXACT = "no cache, exact length"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way to read against one reference, over the positions past the first change of frequencies.

    max, mean: over positions, of the largest difference of any logit. agree: positions of equal argmax, of `rows`.
    relative: max over the largest logit of the reference.
    """

    way: str
    reference: str
    max: float
    mean: float
    relative: float
    agree: int
    rows: int
    by_position: tuple[float, ...]

    @classmethod
    def of(cls, way: str, reference: str, a: Tensor, b: Tensor, first: int) -> Comparison:
        a, b = a[first:], b[first:]
        apart = (a - b).abs().amax(dim=1)
        same = int((a.argmax(-1) == b.argmax(-1)).sum())
        largest = float(apart.max())
        by_position = tuple(float(f"{value:.4g}") for value in apart.tolist())
        return cls(
            way, reference, largest, float(apart.mean()), largest / float(b.abs().max()), same, len(a), by_position
        )


def make_random_llama(directory: Path, layers: int, scaling: dict[str, Any], qk_scale: float = 1.0) -> Path:
    """head_dim 32; qk_scale below 1 flattens attention, as in a model that has learnt something it tends to be."""
    trained = TRAINED if scaling["rope_type"] == "dynamic" else int(ORIGINAL * scaling["factor"])
    path = make_model(
        "llama",
        directory,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        head_dim=HEAD_DIM,
        max_position_embeddings=trained,
        rope_parameters={"rope_theta": THETA, **scaling},
    )
    if qk_scale != 1.0:
        from safetensors.torch import load_file, save_file

        weights = load_file(path / "model.safetensors")
        shrunk = {
            name: w * qk_scale if name.endswith(("q_proj.weight", "k_proj.weight")) else w
            for name, w in weights.items()
        }
        save_file(shrunk, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tokens() -> list[int]:
    return torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


def compare_dynamic(directory: Path) -> list[Comparison]:
    """Every way to read under dynamic NTK against what it should equal, and against no cache at the exact length."""
    ids = tokens()
    exact = dynamic_frequencies(THETA, HEAD_DIM, DYNAMIC["factor"], TRAINED, grid=False)
    grid = dynamic_frequencies(THETA, HEAD_DIM, DYNAMIC["factor"], TRAINED, grid=True)
    uncached, scorer = Uncached(directory), Scorer.load(directory, device="cpu")
    truth = uncached.at_each_length(ids, exact)

    def read(policy: RopeUpdate, exact: bool = False) -> Tensor:
        return scorer.logits(ids, scorer.plan(LENGTH, None, policy, exact=exact), prompt=PROMPT)

    ways: list[tuple[str, Tensor, str, Callable[[], Tensor]]] = [
        ("transformers, cached", cached_by_transformers(directory, ids, PROMPT), EXACT, lambda: truth),
        ("recompute, exact", read("recompute", exact=True), EXACT, lambda: truth),
        ("recompute", read("recompute"), "no cache, length on the grid", lambda: uncached.at_each_length(ids, grid)),
        (
            "frozen",
            read("frozen"),
            f"no cache, frequencies of {LENGTH} tokens on the grid",
            lambda: uncached.logits(ids, grid(LENGTH)),
        ),
        (
            "rotate",
            read("rotate"),
            "cache of unrotated keys, length on the grid",
            lambda: UnrotatedCache(directory).logits(ids, grid, PROMPT),
        ),
    ]
    return _compare(ways, truth, TRAINED)


def compare_longrope(directory: Path) -> list[Comparison]:
    """The same for LongRoPE, whose frequencies change once."""
    ids, factor = tokens(), longrope_attention_factor(LONGROPE)
    frequencies = longrope_frequencies(THETA, HEAD_DIM, LONGROPE)
    uncached, scorer = Uncached(directory, factor), Scorer.load(directory, device="cpu")
    truth = uncached.at_each_length(ids, frequencies)

    def read(policy: RopeUpdate) -> Tensor:
        return scorer.logits(ids, scorer.plan(LENGTH, None, policy), prompt=PROMPT)

    ways: list[tuple[str, Tensor, str, Callable[[], Tensor]]] = [
        ("transformers, cached", cached_by_transformers(directory, ids, PROMPT), EXACT, lambda: truth),
        ("recompute", read("recompute"), EXACT, lambda: truth),
        (
            "frozen",
            read("frozen"),
            f"no cache, frequencies of {LENGTH} tokens",
            lambda: uncached.logits(ids, frequencies(LENGTH)),
        ),
        (
            "rotate",
            read("rotate"),
            "cache of unrotated keys",
            lambda: UnrotatedCache(directory, factor).logits(ids, frequencies, PROMPT),
        ),
    ]
    return _compare(ways, truth, ORIGINAL)


def _compare(ways: list[tuple[str, Tensor, str, Callable[[], Tensor]]], truth: Tensor, first: int) -> list[Comparison]:
    found = []
    for way, logits, name, reference in ways:
        found.append(Comparison.of(way, name, logits, reference(), first))
        if name != EXACT:
            found.append(Comparison.of(way, EXACT, logits, truth, first))
    return found


MODELS: tuple[tuple[str, dict[str, Any], int, float], ...] = (
    ("dynamic NTK, 1 layer", DYNAMIC, 1, 1.0),
    ("dynamic NTK, 2 layers", DYNAMIC, 2, 1.0),
    ("dynamic NTK, 4 layers", DYNAMIC, 4, 1.0),
    ("dynamic NTK, 4 layers, q and k times 0.35", DYNAMIC, 4, 0.35),
    ("LongRoPE, 1 layer", LONGROPE, 1, 1.0),
    ("LongRoPE, 4 layers", LONGROPE, 4, 1.0),
)


def measure_trained(text: Path, windows: int = 4) -> dict[str, Any]:
    """Perplexity of the bundled model by stretch of the text, as each way reads it: a dynamic cache token by token.

    Windows lie evenly over the text, each four trained lengths long.
    """
    bundled = Path(__file__).resolve().parents[1] / "models" / "demo"
    config = json.loads((bundled / "config.json").read_text(encoding="utf-8"))
    trained = config["max_position_embeddings"]
    length = 4 * trained
    tokenizer = Tokenizer.from_directory(bundled)
    prefix = tokenizer.encode("")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    room = len(ids) - length - 1
    if room < 0:
        raise SystemExit(f"{text} has {len(ids)} tokens: {length + 1} are needed")
    found: dict[str, list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "model.safetensors").symlink_to(bundled / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": DYNAMIC}), encoding="utf-8")
        scorer = Scorer.load(directory, device="cpu")
        for index in range(windows):
            start = round(index * room / max(windows - 1, 1))
            window = [*prefix, *ids[start : start + length + 1 - len(prefix)]]
            logits = cached_by_transformers(directory, window[:-1], PROMPT).float()
            target = torch.tensor(window[1:])[:, None]
            stale = logits.log_softmax(-1).gather(1, target)[:, 0]
            found.setdefault("transformers, cached", []).append(-stale)
            for policy in ("frozen", "recompute", "rotate"):
                plan = scorer.plan(length, None, policy)
                found.setdefault(policy, []).append(-scorer.logprobs(window, plan))
            plain = scorer.plan(length, RopeScaling())
            found.setdefault("no scaling", []).append(-scorer.logprobs(window, plain))
    edges = [0, trained, 2 * trained, 3 * trained, 4 * trained]
    perplexity = {
        way: [float(f"{torch.stack(losses)[:, low:high].double().mean().exp():.5g}") for low, high in pairwise(edges)]
        for way, losses in found.items()
    }
    return {"text": text.name, "windows": windows, "edges": edges, "perplexity": perplexity}


def measure() -> dict[str, Any]:
    found = {}
    for name, scaling, layers, qk_scale in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            directory = make_random_llama(Path(folder), layers, scaling, qk_scale)
            compare = compare_dynamic if scaling is DYNAMIC else compare_longrope
            found[name] = [
                {field: getattr(c, field) for field in Comparison.__slots__}
                | {field: float(f"{getattr(c, field):.3g}") for field in ("max", "mean", "relative")}
                for c in compare(directory)
            ]
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompt": PROMPT,
        "length": LENGTH,
        "models": found,
    }


COLOURS = {
    "transformers, cached": "#d1495b",
    "rotate": "#8e6bbf",
    "frozen": "#3b82c4",
    "recompute": "#2aa6a6",
    "recompute, exact": "#2f9e62",
}


DRAWN = ("dynamic NTK, 1 layer", "dynamic NTK, 4 layers", "LongRoPE, 4 layers")


def draw(report: dict[str, Any]) -> Figure:
    """Left of each pair: against no cache at the exact length. Right: against what each way should equal."""
    names = [name for name in DRAWN if name in report["models"]]
    figure = Figure(figsize=(11, 2.6 * len(names) + 0.8), layout="constrained")
    panels = figure.subplots(len(names), 2, sharex=True, sharey=True, squeeze=False)
    for row, name in zip(panels, names, strict=True):
        comparisons = report["models"][name]
        for axes, wanted in zip(row, (lambda c: c["reference"] == EXACT, lambda c: True), strict=True):
            last = {c["way"]: c for c in reversed(comparisons) if wanted(c)}
            for way in reversed(list(last)):
                values = last[way]["by_position"]
                start = report["length"] - len(values) + 1
                axes.plot(
                    range(start, report["length"] + 1),
                    [max(value, 1e-7) for value in values],
                    color=COLOURS[way],
                    label=way,
                    linewidth=1.3,
                )
            axes.set_yscale("log")
            axes.axhline(1e-7, alpha=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(
                f"{name}: {'no cache, exact length' if axes is row[0] else 'what it should equal'}", fontsize=9
            )
        row[0].set_ylabel("largest logit difference")
    for axes in panels[-1]:
        axes.set_xlabel("tokens read")
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle("Difference from a model without a cache (left) and from what each way should equal (right)")
    return figure


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per model and way to read, then the trained model's perplexities if they were measured."""
    lines = [
        "| model | read by | should equal | largest / mean difference | same argmax | … from no cache, exact length "
        "| same argmax |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for name, comparisons in report["models"].items():
        exact = {c["way"]: c for c in comparisons if c["reference"] == EXACT}
        own = {c["way"]: c for c in reversed(comparisons)}  # the first of each way
        for way in exact:
            cells = [name, way, own[way]["reference"]]
            for c in (own[way], exact[way]):
                cells += [f"{c['max']:.2g} / {c['mean']:.2g}", f"{c['agree']}/{c['rows']}"]
            lines.append("| " + " | ".join(cells) + " |")
    trained = report.get("trained")
    if trained:
        spans = [f"{low:,}–{high:,}" for low, high in pairwise(trained["edges"])]
        lines += ["", "| perplexity at positions | " + " | ".join(spans) + " |", "|---" + "|--:" * len(spans) + "|"]
        lines += [f"| {way} | " + " | ".join(map(str, row)) + " |" for way, row in trained["perplexity"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for stale_keys.json and stale_keys.png")
    parser.add_argument("--text", type=Path, help="UTF-8 text for the bundled model, which has not seen it")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: draw the folder's stale_keys.json")
    options = parser.parse_args()
    if not options.out.is_dir():
        parser.error(f"{options.out} is no directory")
    if options.redraw:
        redraw(options.out)
        return
    report = measure()
    if options.text is not None:
        report["trained"] = measure_trained(options.text)
    (options.out / "stale_keys.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    redraw(options.out)


def redraw(folder: Path) -> None:
    """The picture, and the table on standard output, from the folder's numbers."""
    report = json.loads((folder / "stale_keys.json").read_text(encoding="utf-8"))
    draw(report).savefig(folder / "stale_keys.png", dpi=80, metadata={"Software": None})
    print(table(report))


if __name__ == "__main__":
    main()
