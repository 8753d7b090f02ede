"""Tokens per second with and without speculation, on repetitive and on random text.

    python benchmarks/speculation.py [MODEL] [--mtp] [--tokens 4] [--streams 1,8] [--length 256] [--threads 2] [--json OUT]

MODEL is a model directory, by default the bundled one. Proposals are those of `--speculative-ngram`, or with --mtp of the
model's prediction layer (--draft-quantization: of its weights and head). Two engines with the same weights answer the same
greedy requests in turns, and their answers are compared. Repetitive text is a phrase of 24 random tokens over and over. The
other text is random, continued at temperature 1, so that hardly any run of tokens occurs twice: it shows the cost of failed
proposals. Figures are medians (minimum to maximum) of tokens per second after the prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import (
    CacheConfig,
    ComputeConfig,
    EngineConfig,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.kernels import select_backend

DEMO = Path(__file__).parents[1] / "models" / "demo"


def engine(
    model: Path, speculation: SpeculationConfig, streams: int, quantization: Quantization = "none"
) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=str(model),
            compute=ComputeConfig(device="cpu", quantization=quantization),
            cache=CacheConfig(memory=1 << 30, prefix_caching=False),
            scheduling=SchedulerConfig(max_num_seqs=streams, target_step_seconds=0.0, speculation=speculation),
        )
    )


def prompts(repetitive: bool, streams: int, length: int, vocabulary: int) -> list[list[int]]:
    drawn = random.Random(7)
    fresh = [[drawn.randrange(3, vocabulary) for _ in range(24 if repetitive else length)] for _ in range(streams)]
    return [(tokens * length)[:length] for tokens in fresh]


def answer(
    core: EngineCore, asked: list[list[int]], max_tokens: int, temperature: float
) -> tuple[float, list[list[int]]]:
    """Seconds from the last first token to the end, and the answers."""
    for i, tokens in enumerate(asked):
        sampling = SamplingParams(temperature=temperature, seed=i, ignore_eos=True, max_tokens=max_tokens)
        core.add(EngineRequest(str(i), tokens, sampling))
    found: list[list[int]] = [[] for _ in asked]
    begin, counted = time.perf_counter(), 0
    while core.has_work():
        for output in core.step():
            found[int(output.request_id)] += output.token_ids
        if counted == 0 and all(found):
            begin, counted = time.perf_counter(), sum(map(len, found))
    seconds = time.perf_counter() - begin
    return (sum(map(len, found)) - counted) / seconds, found


def measure(
    engines: dict[str, EngineCore],
    asked: list[list[int]],
    kind: str,
    *,
    max_tokens: int,
    repeats: int,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Tokens per second of the engines `on` and `off` for these prompts. kind: of the text, for display."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["on"].stats()
    answers: dict[str, list[list[int]]] = {}
    for i in range(repeats + 1):
        for name in list(engines)[:: 1 if i % 2 else -1]:
            rate, answers[name] = answer(engines[name], asked, max_tokens, temperature)
            if i:  # the first round warms up
                rates[name].append(rate)
    after = engines["on"].stats()
    proposed = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    result: dict[str, Any] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in rates.items()
    }
    result |= {
        "on_over_off": result["on"]["median"] / result["off"]["median"],
        "proposed": proposed,
        "accepted": accepted,
        "same_answers": answers["on"] == answers["off"],
    }
    figures = "  ".join(
        f"{n} {result[n]['median']:8.1f} ({result[n]['min']:.1f} to {result[n]['max']:.1f})" for n in rates
    )
    print(
        f"{kind:15} {len(asked):3} streams  tokens/s {figures}  x {result['on_over_off']:.2f}  "
        f"{accepted} of {proposed} proposed tokens accepted, answers {'equal' if result['same_answers'] else 'DIFFER'}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--tokens", type=int, default=4, help="tokens proposed per step, at most")
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--length", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--mtp", action="store_true", help="proposals of the model's own prediction layer")
    parser.add_argument("--draft-quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--adaptive", action="store_true", help="let it propose less where that pays")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = SpeculationConfig(num_tokens=options.tokens)
    if options.mtp:
        chosen = SpeculationConfig(
            mtp=True,
            draft_tokens=options.tokens,
            quantization=options.draft_quantization,
            adaptive=options.adaptive,
        )
    engines = {
        name: engine(options.model, config, max(options.streams), options.quantization)
        for name, config in (("off", SpeculationConfig()), ("on", chosen))
    }
    info = engines["on"].info
    print(
        f"{select_backend('cpu').explain()}, {options.threads} threads, "
        f"{info.num_parameters / 1e6:.0f} M parameters, {info.weight_dtype}"
    )
    results = {}
    for kind, temperature in (("repetitive", 0.0), ("not repetitive", 1.0)):
        for streams in options.streams:
            asked = prompts(kind == "repetitive", streams, options.length, info.vocab_size)
            sizes = {"max_tokens": options.max_tokens, "repeats": options.repeats}
            results[f"{kind}, {streams} streams"] = measure(engines, asked, kind, temperature=temperature, **sizes)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
