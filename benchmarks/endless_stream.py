"""One stream far beyond its context: memory and speed, against a fresh stream that holds as many tokens.

    python benchmarks/endless_stream.py MODEL [--tokens 100000] [--context 2048] [--last 5000] [--out FILE.json]

Generates --tokens tokens in a context of --context that drops its oldest ones, and notes the blocks in use every 1,000.
The last --last tokens go in turns with a stream that has just filled an equal context and has dropped hardly anything, 250
tokens each, so that both meet the same state of the machine. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import CacheConfig, ComputeConfig, ContextConfig, EngineConfig, SchedulerConfig
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams

_TURN = 250


class Stream:
    """An engine with one endless request of its own."""

    def __init__(self, options: argparse.Namespace, prompt: list[int]) -> None:
        config = EngineConfig(
            model=str(options.model),
            max_model_len=options.context,
            compute=ComputeConfig(device="cpu", quantization=options.quantization),
            cache=CacheConfig(dtype=options.kv_cache_dtype, memory=1 << 30),
            scheduling=SchedulerConfig(max_num_seqs=2),
            context=ContextConfig(),
        )
        self.core = EngineCore(config)
        self.core.warm_up()
        sampling = SamplingParams(max_tokens=1 << 40, temperature=0.8, seed=7, ignore_eos=True)
        self.core.add(EngineRequest("stream", prompt, sampling, context=ContextRule("shift", keep_tokens=16)))
        self.tokens: list[int] = list(prompt)

    def go(self, count: int) -> float:
        """Generate so many tokens; the seconds it took."""
        end, started = len(self.tokens) + count, time.perf_counter()
        while len(self.tokens) < end:
            for output in self.core.step():
                if output.error is not None:
                    raise output.error
                self.tokens += output.token_ids
        return time.perf_counter() - started

    @property
    def blocks(self) -> int:
        return self.core.scheduler.stats().kv_blocks_used


def measure(options: argparse.Namespace) -> dict[str, Any]:
    prompt = list(range(1000, 1064))
    old = Stream(options, prompt)
    blocks: list[int] = []
    spans: list[float] = []
    while len(old.tokens) < options.tokens - options.last:
        spans.append(old.go(1000))
        blocks.append(old.blocks)
        if len(spans) % 10 == 0:
            print(f"{len(old.tokens):,} tokens, {blocks[-1]} blocks, {1000 / spans[-1]:.1f} tok/s", flush=True)
    fresh = Stream(options, old.tokens[-options.context + 16 :])
    fresh.go(16)
    turns = [(old.go(_TURN), fresh.go(_TURN)) for _ in range(options.last // _TURN)]
    blocks.append(old.blocks)
    rates = [[_TURN / pair[i] for pair in turns] for i in range(2)]
    full = blocks[-(-options.context // 1000) :]
    return {
        "date": datetime.date.today().isoformat(),
        "model": options.model.name,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "context": options.context,
        "tokens": len(old.tokens),
        "shifts": old.core.scheduler.counters.context_shifts,
        "blocks_once_full": sorted(set(full)),
        "tokens_per_second": {"last": statistics.median(rates[0]), "fresh": statistics.median(rates[1])},
        "turns": rates,
    }


def table(report: dict[str, Any]) -> str:
    speed = report["tokens_per_second"]
    return "\n".join(
        [
            "| tokens | shifts | blocks in use once full | last tokens, tok/s | a fresh stream, tok/s | ratio |",
            "|--:|--:|--:|--:|--:|--:|",
            f"| {report['tokens']:,} | {report['shifts']:,} | {', '.join(map(str, report['blocks_once_full']))} "
            f"| {speed['last']:.1f} | {speed['fresh']:.1f} | {speed['last'] / speed['fresh']:.3f} |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--last", type=int, default=5_000)
    parser.add_argument("--quantization", default="int8", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    options = parser.parse_args()
    report = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
