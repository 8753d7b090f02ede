"""What weights of 8 and 4 bits cost in quality: the bundled model, or another, on text it has not seen.

    python benchmarks/quantization_quality.py TEXT [--model DIRECTORY] [--tokens 20000] [--json FILE]

Each window of the model's trained length is read once with float32 arithmetic on the weights as stored, then with each
quantization. Printed: perplexity and its change, mean KL divergence of the next-token distribution from the unquantized
one (nats), how often both put the same token first, and the bytes of all weights. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import windlass
from windlass.engine.api.config import ComputeConfig, EngineConfig, Quantization
from windlass.engine.evaluation.scoring import Scorer
from windlass.engine.model.loading.loader import load_model
from windlass.server.text.tokenizer import Tokenizer

WIDTHS: tuple[Quantization, ...] = ("none", "int8", "int4")


@dataclass(slots=True)
class Quality:
    """Sums over `tokens` predicted tokens; `loss` and `divergence` in nats."""

    width: str
    weight_bytes: int
    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


def scorer_of(model: Path, width: Quantization) -> Scorer:
    loaded = load_model(EngineConfig(model=str(model), compute=ComputeConfig(device="cpu", quantization=width)))
    return Scorer(loaded.decoder, loaded.cache_dtype)


def measure(model: Path, ids: list[int]) -> list[Quality]:
    """One Quality per width over consecutive windows of the model's trained length."""
    scorers = [scorer_of(model, width) for width in WIDTHS]
    results = [Quality(w, s.decoder.weight_bytes()) for w, s in zip(WIDTHS, scorers, strict=True)]
    length = scorers[0].trained_len
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length]
        if len(window) < 2:
            break
        target = torch.tensor(window[1:])[:, None]
        base = torch.empty(0)
        for scorer, result in zip(scorers, results, strict=True):
            with torch.inference_mode():
                found = scorer.logits(window, scorer.plan(len(window)))[:-1].double().log_softmax(-1)
            if result.width == "none":
                base = found
            result.tokens += len(target)
            result.loss -= float(found.gather(1, target).sum())
            result.divergence += float((base.exp() * (base - found)).sum())
            result.agreeing += int((base.argmax(-1) == found.argmax(-1)).sum())
    return results


def table(results: list[Quality]) -> str:
    """Markdown, a row per width."""
    plain = results[0]
    lines = [
        "| weights | bytes | perplexity | change | KL divergence, nats | same first token |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        change = "–" if r is plain else f"{100 * (r.perplexity / plain.perplexity - 1):+.2f} %"
        cells = f"{r.weight_bytes / 1e6:,.1f} MB | {r.perplexity:.3f} | {change}"
        divergence, same = (
            ("–", "–") if r is plain else (f"{r.divergence / r.tokens:.5f}", f"{r.agreeing / r.tokens:.1%}")
        )
        lines.append(f"| {'as stored' if r is plain else r.width} | {cells} | {divergence} | {same} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text the model has not been trained on")
    parser.add_argument("--model", type=Path, default=Path(windlass.__file__).parent / "models" / "demo")
    parser.add_argument("--tokens", type=int, default=20_000, help="how much of the text to read")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    ids = Tokenizer.from_directory(options.model).encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    results = measure(options.model, ids)
    print(f"{results[0].tokens:,} tokens\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in results]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
