"""Quality of quantized weights: each quantization of a model, and GGUF files of it, on text that it was not trained on.

    python benchmarks/quantization_quality.py TEXT [MODEL.gguf ...] [--model DIRECTORY] [--window 768] [--skip 384]

Each window is read with float32 arithmetic on the stored weights, then with each quantization, with an int8 KV cache, in
bfloat16, and with each GGUF file. A model that is quantized itself, such as a GGUF file, is compared with float32 arithmetic on
its dequantized weights. The output is perplexity and its change, mean KL divergence from the unquantized next-token
distribution (nats), the share of equal most likely tokens, and the bytes of all weights. `--skip` excludes the first
predictions of each window: with half a window the figures are those of `llama-perplexity -c 768 --kl-divergence`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import windlass
from windlass.engine.interface.config import Activations, CacheConfig, ComputeConfig, EngineConfig, Quantization
from windlass.engine.model.loading.gguf_index import INDEX
from windlass.engine.model.loading.loader import load_model
from windlass.lab.scoring import Scorer
from windlass.server.startup.model_files import resolve_model
from windlass.server.text.tokenizer import Tokenizer

WIDTHS: tuple[Quantization, ...] = ("none", "int8", "int4")


@dataclass(slots=True)
class Quality:
    """Sums over `tokens` predicted tokens; `loss` and `divergence` in nats."""

    name: str
    weight_bytes: int
    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


def scorer_of(
    model: Path,
    width: Quantization = "none",
    cache: str = "auto",
    dtype: str = "auto",
    activations: Activations = "int8",
) -> Scorer:
    config = EngineConfig(
        model=str(model),
        compute=ComputeConfig(device="cpu", dtype=dtype, quantization=width, activations=activations),
        cache=CacheConfig(dtype=cache),
    )
    loaded = load_model(config)
    return Scorer(loaded.decoder, loaded.cache_dtype)


def scorers_of(model: Path, files: list[Path]) -> dict[str, Scorer]:
    """What is compared, by name; the first is the yardstick."""
    if (model / INDEX).exists():
        exact = scorer_of(model, cache="float32", activations="float32")
        return {
            "dequantized, float32": exact,
            "as served": scorer_of(model),
            "int8 keys and values": scorer_of(model, cache="int8"),
        }
    found = {"as stored" if width == "none" else width: scorer_of(model, width) for width in WIDTHS}
    found["int8 keys and values"] = scorer_of(model, cache="int8")
    found["computed in bfloat16"] = scorer_of(model, dtype="bfloat16")
    return found | {file.name: scorer_of(resolve_model(str(file))) for file in files}


def measure(scorers: dict[str, Scorer], ids: list[int], window: int, skip: int) -> list[Quality]:
    """One Quality each over consecutive windows, without the first `skip` predictions of each."""
    results = [Quality(name, scorer.decoder.weight_bytes()) for name, scorer in scorers.items()]
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        target = torch.tensor(part[skip + 1 :])[:, None]
        base = torch.empty(0)
        for scorer, result in zip(scorers.values(), results, strict=True):
            with torch.inference_mode():
                found = scorer.logits(part, scorer.plan(window))[skip:-1].double().log_softmax(-1)
            if result is results[0]:
                base = found
            result.tokens += len(target)
            result.loss -= float(found.gather(1, target).sum())
            result.divergence += float((base.exp() * (base - found)).sum())
            result.agreeing += int((base.argmax(-1) == found.argmax(-1)).sum())
    return results


def table(results: list[Quality]) -> str:
    """Markdown, a row each."""
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
        lines.append(f"| {r.name} | {cells} | {divergence} | {same} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text the model has not been trained on")
    parser.add_argument("files", type=Path, nargs="*", help="GGUF files of the same model")
    parser.add_argument("--model", type=Path, default=Path(windlass.__file__).parent / "models" / "demo")
    parser.add_argument("--tokens", type=int, default=20_000, help="how much of the text to read")
    parser.add_argument("--window", type=int, help="tokens of a window; the trained length by default")
    parser.add_argument("--skip", type=int, default=0, help="predictions at a window's start that do not count")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    options.model = resolve_model(str(options.model))
    ids = Tokenizer.from_directory(options.model).encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    scorers = scorers_of(options.model, options.files)
    window = options.window or next(iter(scorers.values())).trained_len
    results = measure(scorers, ids, window, options.skip)
    print(f"{results[0].tokens:,} tokens\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in results]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
