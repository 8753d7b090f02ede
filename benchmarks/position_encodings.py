"""Rotary, sinusoidal, learned and no positions, trained on the same text from the same seeds: a classifier and a language model.

    python benchmarks/position_encodings.py --work FOLDER [--steps 800] [--seeds 2] [--out benchmarks/results/trained.json]

The text is Python's language reference as bytes, which every Python contains (`pydoc_data.topics`). The language model
predicts the next byte of windows of 128. The classifier decides whether 32 bytes are in their order or reversed. Every eighth
topic is held out. The report has the loss by step and past the trained length, for the rotary model also under YaRN. Its
checkpoint is written to FOLDER/rotary, for `windlass serve`. Results are stored per model and text, so an interrupted run
resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import pydoc_data.topics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.machine import describe
from harness.small_transformer import BEGINNING, POSITIONS, WIDTH, Positions, SmallTransformer, save_checkpoint
from matplotlib.figure import Figure
from torch import Tensor, nn

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.plotting import BEYOND, COLOURS, DASHES, new_figure, save_figure, style_axes

KINDS = ("language model", "classifier")
TRAINED = {"language model": 128, "classifier": 32}  # bytes of a training text
TOKENS = 2048  # of a step
STRETCH = 4  # how much longer the longest text is that is read
EVERY = 25  # steps between two points of a curve
YARN = RopeScaling.from_dict({"rope_type": "yarn", "factor": STRETCH})


@dataclass(frozen=True, slots=True)
class Texts:
    train: Tensor  # [N] int64, bytes of all topics to learn from
    held_out: Tensor
    digest: str


def read_texts() -> Texts:
    """Every eighth topic is held out."""
    topics = sorted(pydoc_data.topics.topics.items())
    parts = ["\n\n".join(text for at, (_, text) in enumerate(topics) if (at % 8 == 4) is out) for out in (False, True)]
    whole = "\n".join(parts).encode()
    train, held_out = (torch.tensor(list(part.encode())) for part in parts)
    return Texts(train, held_out, hashlib.sha256(whole).hexdigest())


def windows(text: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, length] bytes from anywhere in a text, each behind the token that begins one."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    rows = text[starts[:, None] + torch.arange(length - 1)]
    return torch.cat((torch.full((count, 1), BEGINNING), rows), dim=1)


class Reader(nn.Module):
    """A classifier: the mean of the states, then one number; above 0 means that the bytes are in order."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        trained = TRAINED["classifier"]
        self.body = SmallTransformer(positions, trained, STRETCH * trained, causal=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, scaling: RopeScaling | None = None) -> Tensor:
        return self.head(self.body(ids, scaling).mean(dim=1))[:, 0]


def labelled(text: Tensor, length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = windows(text, length, count, generator)
    labels = torch.arange(count) % 2
    rows[labels == 0, 1:] = rows[labels == 0, 1:].flip(1)
    return rows, labels.float()


def lengths_of(kind: str) -> tuple[int, ...]:
    """The trained length, and longer ones."""
    return tuple(TRAINED[kind] * times for times in (1, 2, STRETCH))


def learning_rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1.0, (step + 1) / 40) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(kind: str, positions: Positions, seed: int, steps: int, texts: Texts, work: Path) -> dict[str, Any]:
    """Curve and held-out results of one model. The same seed gives every kind of positions the same windows."""
    torch.manual_seed(seed)
    trained = TRAINED[kind]
    batch = TOKENS // trained
    model: nn.Module = SmallTransformer(positions, trained, STRETCH * trained, causal=True)
    if kind == "classifier":
        model = Reader(positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(1000 + seed)
    curve, recent, begun = [], [], time.perf_counter()
    for step in range(steps):
        if isinstance(model, Reader):
            rows, labels = labelled(texts.train, trained, batch, generator)
            loss = F.binary_cross_entropy_with_logits(model(rows), labels)
        else:
            loss = model.losses(windows(texts.train, trained + 1, batch, generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 2e-3)
        optimizer.step()
        recent.append(loss.item())
        if len(recent) == EVERY:
            curve.append(round(sum(recent) / EVERY, 4))
            print(f"{kind} {positions} seed {seed} step {step + 1}: {curve[-1]:.3f}", flush=True)
            recent = []
    took = time.perf_counter() - begun
    found = held_out(model, texts, None)
    result = {
        "kind": kind,
        "positions": positions,
        "seed": seed,
        "curve": curve,
        "seconds": round(took),
        "held_out": found,
    }
    if positions == "rotary":
        result["held_out_yarn"] = held_out(model, texts, YARN)
        if isinstance(model, SmallTransformer) and seed == 0:
            save_checkpoint(model, work / "rotary")
    return result


def trained_once(kind: str, positions: Positions, seed: int, steps: int, texts: Texts, work: Path) -> dict[str, Any]:
    """What `train` returns, from a file where this was trained before."""
    kept = work / f"{kind.split()[0]}-{positions}-{seed}-{steps}-{texts.digest[:12]}.json"
    if not kept.exists():
        partial = kept.with_suffix(".part")
        partial.write_text(json.dumps(train(kind, positions, seed, steps, texts, work)), encoding="utf-8")
        partial.replace(kept)
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


@torch.no_grad()
def held_out(model: nn.Module, texts: Texts, scaling: RopeScaling | None) -> dict[str, Any]:
    """By length of the text: of a classifier the share it gets right; of a language model nats a byte, by place."""
    found: dict[str, Any] = {}
    if isinstance(model, Reader):
        for length in lengths_of("classifier"):
            generator = torch.Generator().manual_seed(5)
            right = 0.0
            for _ in range(16):
                rows, labels = labelled(texts.held_out, length, 32, generator)
                right += float(((model(rows, scaling) > 0).float() == labels).sum())
            found[str(length)] = round(right / 512, 4)
        return found
    generator = torch.Generator().manual_seed(5)
    assert isinstance(model, SmallTransformer)
    longest = lengths_of("language model")[-1]
    total = torch.zeros(longest - 1)
    for _ in range(16):
        total += model.losses(windows(texts.held_out, longest, 16, generator), scaling).sum(dim=0)
    by_place = total / 256
    found["by_place"] = [round(float(part.mean()), 4) for part in by_place.split(32)]
    return found


def table(report: dict[str, Any]) -> str:
    """Both tables as Markdown: means over seeds."""
    trained = TRAINED["language model"]
    spans = [(0, trained), (trained, 2 * trained), (3 * trained, STRETCH * trained)]
    lines = [
        "| language model, nats a byte | " + " | ".join(f"bytes {a} to {b}" for a, b in spans) + " |",
        "|---|--:|--:|--:|",
    ]
    for label, found in _by_label(report, "language model"):
        values = _past("language model", found)[1]
        cells = [f"{mean_of(values[a // 32 : b // 32]):.2f}" for a, b in spans]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lengths = lengths_of("classifier")
    lines += ["", "| classifier, correct | " + " | ".join(f"{n} bytes" for n in lengths) + " |", "|---|--:|--:|--:|"]
    for label, found in _by_label(report, "classifier"):
        cells = [f"{100 * value:.0f} %" for value in _past("classifier", found)[1]]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_label(report: dict[str, Any], kind: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for positions in POSITIONS:
        runs = [run for run in report["runs"] if (run["kind"], run["positions"]) == (kind, positions)]
        yield positions, [run["held_out"] for run in runs]
        if positions == "rotary":
            yield "rotary, read under YaRN 4", [run["held_out_yarn"] for run in runs]


def draw(report: dict[str, Any]) -> Figure:
    """Loss by step at the left, past the trained length at the right; above the language model, below the classifier."""
    figure = new_figure((10.5, 7), "The same model with four kinds of positions")
    grid = figure.subplots(2, 2)
    styles = {name: (COLOURS[at + 1], DASHES[at]) for at, name in enumerate(POSITIONS)}
    for row, kind in enumerate(KINDS):
        left, right = grid[row]
        for positions, (colour, dash) in styles.items():
            runs = [run for run in report["runs"] if (run["kind"], run["positions"]) == (kind, positions)]
            line = {"color": colour, "dashes": dash, "label": positions}
            steps = [EVERY * (at + 0.5) for at in range(len(runs[0]["curve"]))]
            left.plot(steps, [mean_of(points) for points in zip(*(run["curve"] for run in runs), strict=True)], **line)
            right.plot(*_past(kind, [run["held_out"] for run in runs]), **line)
            if positions == "rotary":
                under = {"color": COLOURS[5], "dashes": DASHES[4], "label": "rotary, read under YaRN 4"}
                right.plot(*_past(kind, [run["held_out_yarn"] for run in runs]), **under)
        lengths = lengths_of(kind)
        right.axvspan(lengths[0], lengths[-1], color=BEYOND, alpha=0.08, linewidth=0)
        right.set_xlim(0 if kind == "language model" else lengths[0] / 2, lengths[-1])
        style_axes(left, x="training step", y=report["units"][kind][0], title=f"{kind}: training")
        style_axes(right, x="place in the text" if row == 0 else "bytes of the text", y=report["units"][kind][1])
        right.set_title(f"{kind}: held-out text (coloured: longer than trained)", fontsize=10)
        right.set_xticks(lengths)
    lines, names = grid[0, 1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    grid[1, 1].set_ylim(0.45, 1.0)
    return figure


def _past(kind: str, found: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    if kind == "classifier":
        lengths = lengths_of(kind)
        return [float(n) for n in lengths], [mean_of([one[str(n)] for one in found]) for n in lengths]
    values = [mean_of(points) for points in zip(*(one["by_place"] for one in found), strict=True)]
    return [32 * (at + 0.5) for at in range(len(values))], values


def mean_of(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/positions"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help="train these alone; all are reported once all are there",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: FOLDER/trained.json; the picture has the same name")
    options = parser.parse_args()
    if options.steps < EVERY or options.seeds < 1:
        parser.error(f"--steps: at least {EVERY}; --seeds: at least 1")
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    out = options.out or options.work / "trained.json"
    texts = read_texts()
    print(f"{len(texts.train):,} bytes to learn from, {len(texts.held_out):,} held out", flush=True)
    runs = []
    for seed in range(options.seeds):
        for kind in options.kinds:
            for positions in POSITIONS:
                runs.append(trained_once(kind, positions, seed, options.steps, texts, options.work))
    if len(options.kinds) < len(KINDS):
        return
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text": {"sha256": texts.digest, "train": len(texts.train), "held_out": len(texts.held_out)},
        "steps": options.steps,
        "trained_length": TRAINED,
        "tokens_per_step": TOKENS,
        "units": {
            "language model": ["nats a byte", "nats a byte"],
            "classifier": ["cross-entropy, nats", "share correct"],
        },
        "runs": runs,
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    save_figure(draw(report), out.with_suffix(".png"))
    print(table(report))


if __name__ == "__main__":
    main()
