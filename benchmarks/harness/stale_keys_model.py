"""Cost of stale keys: cached generation of transformers and each policy, under dynamic NTK.

    python benchmarks/real_model.py stale MODEL --text FILE_OR_DIR [--text …] [--max-len 16384] [--factor 2] --work FOLDER

Each text is read as if generated token by token past the trained length: with the cache of transformers, whose keys have the
frequencies of the step that computed them; under `recompute`, `rotate` and `frozen`; and without scaling. The output is a
Markdown table of perplexity between the lengths at which frequencies change, with the change against recompute in per cent
(paired over texts, 95 % interval of Student's t), and past the trained length the mean KL divergence from recompute and the
share of other most likely tokens. Final hidden states are stored under --work, so an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from harness.long_text_report import make_parser, publish
from helpers.rotary_oracles import CachedInOnePass, dynamic_frequencies

from windlass.clients.loadtest.intervals import mean_interval
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_texts import find_files, make_windows
from windlass.server.text.tokenizer import Tokenizer

CONFIDENCE = 0.95
STALE, RECOMPUTE = "transformers, cached", "recompute"
WAYS = ("no scaling", "frozen", STALE, "rotate", RECOMPUTE)
EVERY = 8  # of the rows past the trained length, for KL
CHUNK = 256


def hidden_states(way: str, scorer: Scorer, options: argparse.Namespace, ids: list[int]) -> Tensor:
    """[T, hidden] of every row but the last, as `way` reads the text."""
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    scaling = RopeScaling.from_dict({"rope_type": "dynamic", "factor": options.factor})
    if way == STALE:
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        frequencies = dynamic_frequencies(theta, dim, options.factor, scorer.trained_len, grid=False)
        return CachedInOnePass(options.model).hidden(ids, frequencies, prompt=1)
    if way == "no scaling":
        return scorer.hidden(ids, scorer.plan(options.max_len, RopeScaling()))
    return scorer.hidden(ids, scorer.plan(options.max_len, scaling, way))


def score(scorer: Scorer, states: dict[str, Tensor], targets: Tensor, first: int) -> tuple[dict[str, Any], ...]:
    """Losses of every row, and of sampled rows past `first` KL from recompute and whether the argmax is another."""
    logits: Callable[[Tensor], Tensor] = scorer.decoder.logits
    losses = {}
    for way, hidden in states.items():
        rows = []
        for start in range(0, len(hidden), CHUNK):
            logged = logits(hidden[start : start + CHUNK]).log_softmax(dim=1)
            rows.append(-logged.gather(1, targets[start : start + CHUNK, None])[:, 0])
        losses[way] = torch.cat(rows).double().numpy()
    divergence, others = {}, {}
    for way, hidden in states.items():
        if way == RECOMPUTE:
            continue
        kl, other = [], []
        for start in range(first, len(hidden), EVERY * CHUNK):
            chosen = slice(start, start + EVERY * CHUNK, EVERY)
            p, q = (logits(states[name][chosen]).log_softmax(dim=1).double() for name in (RECOMPUTE, way))
            kl.append((p.exp() * (p - q)).sum(dim=1))
            other.append(p.argmax(dim=1) != q.argmax(dim=1))
        divergence[way], others[way] = float(torch.cat(kl).mean()), float(torch.cat(other).double().mean())
    return losses, divergence, others


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    scorer = Scorer.load(options.model, device="cpu", dtype="float32")
    trained = scorer.trained_len
    texts, windows = make_windows(options.model, find_files(options.text), options.max_len, 1, Tokenizer.from_directory)
    points = [math.ceil(trained * 2 ** (k / 4)) for k in range(40)]
    edges = [0, *(point for point in points if point < options.max_len), options.max_len]
    found: list[tuple[dict[str, Any], ...]] = []
    for text, window in zip(texts, windows, strict=True):
        states = {}
        for way in WAYS:
            name = hashlib.sha256(repr((scorer.identity, window.digest, way, options.max_len, options.factor)).encode())
            kept = options.work / f"{name.hexdigest()[:24]}.npy"
            if not kept.exists():
                partial = kept.with_suffix(".partial")
                with partial.open("wb") as file:
                    np.save(file, hidden_states(way, scorer, options, list(window.ids[:-1])).numpy())
                partial.replace(kept)
                print(f"{text.name}: {way}", file=sys.stderr, flush=True)
            states[way] = torch.from_numpy(np.load(kept))
        found.append(score(scorer, states, torch.tensor(window.ids[1:]), trained))
    return {
        "date": datetime.date.today().isoformat(),
        "model": options.model.name,
        "factor": options.factor,
        "trained_length": trained,
        "texts": [text.name for text in texts],
        "edges": edges,
        "loss": {
            way: [[float(losses[way][low:high].mean()) for low, high in pairwise(edges)] for losses, _, _ in found]
            for way in WAYS
        },
        "kl_from_recompute": {way: [kl[way] for _, kl, _ in found] for way in WAYS if way != RECOMPUTE},
        "other_argmax": {way: [other[way] for _, _, other in found] for way in WAYS if way != RECOMPUTE},
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: perplexity by stretch (mean loss over texts), then KL and other most likely tokens."""
    spans = [f"{low:,}–{high:,}" for low, high in pairwise(report["edges"])]
    past = f"past {report['trained_length']:,}"
    heads = [*(f"perplexity at {span}" for span in spans), f"{past}: KL from recompute", "other most likely token"]
    lines = ["| read by | " + " | ".join(heads) + " |", "|---" + "|--:" * len(heads) + "|"]
    best = np.array(report["loss"][RECOMPUTE])
    for way in WAYS:
        losses = np.array(report["loss"][way])  # [texts, stretches]
        cells = []
        for place in range(len(spans)):
            mean, interval = mean_interval((losses - best)[:, place].tolist(), CONFIDENCE)
            around = "" if interval is None else f"; {percent(interval.low)} to {percent(interval.high)}"
            change = "" if way == RECOMPUTE or not place else f" ({percent(mean)} %{around})"
            cells.append(f"{math.exp(losses[:, place].mean()):.2f}{change}")
        if way == RECOMPUTE:
            cells += ["", ""]
        else:
            cells.append(f"{np.mean(report['kl_from_recompute'][way]):.2g}")
            cells.append(f"{100 * np.mean(report['other_argmax'][way]):.1f} %")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, 700.0)):+.2g}"


def main() -> None:
    parser = make_parser(__doc__, max_len=16384)
    parser.add_argument("--factor", type=float, default=2.0, help="of dynamic NTK")
    parser.add_argument("--work", type=Path, required=True, help="folder in which final hidden states are kept")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    publish(measure(options), options.out, table)


if __name__ == "__main__":
    main()
