"""What decode steps cost under kinds of rotary scaling that change how far keys seem: one long stream, and a mixed batch.

    python benchmarks/distance_cost.py MODEL [--context 16384] [--streams 8] [--batch-context 4096] [--rounds 5] [--out FILE.json]

One stream of --context tokens under each kind, and --streams of --batch-context tokens: all under one kind, and each under
another. Their prompts are computed first and found again in the cache, so a round times decode steps alone. Kinds take turns;
a sample that others disturbed is taken again, and medians over the rounds are shown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
from collections import abc
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.machine import describe
from harness.quiet import quiet
from harness.steps import ONE_BY_ONE, step_seconds

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling

KINDS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "yarn 2": {"rope_type": "yarn", "factor": 2.0},
    "dual_chunk": {"rope_type": "dual_chunk"},
    "self_extend": {"rope_type": "self_extend"},
    "rerope": {"rope_type": "rerope"},
    "rerope, factor 8": {"rope_type": "rerope", "factor": 8.0},
    "log_n": {"rope_type": "log_n"},
}
MIXED = "each under another"


class Streams:
    """Streams of one length over an engine, whose prompts stay in its cache."""

    def __init__(self, core: EngineCore, length: int, count: int, steps: int) -> None:
        self._core, self._steps, self._number = core, steps, 0
        draw = random.Random(7)  # the same texts for every kind
        self._prompts = [
            [draw.randrange(100, core.info.vocab_size) for _ in range(length - steps - 8)] for _ in range(count)
        ]

    def _add(self, kinds: abc.Sequence[str], tokens: int) -> None:
        for prompt, kind in zip(self._prompts, kinds, strict=True):
            self._number += 1
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            scaling = RopeScaling.from_dict(KINDS[kind])
            self._core.add(EngineRequest(f"{id(self)} {self._number}", prompt, sampling, rope_scaling=scaling))

    def fill(self, kinds: abc.Sequence[str]) -> float:
        """Compute the prompts under these kinds, one each; returns tokens a second."""
        self._add(kinds, 1)
        start = time.perf_counter()
        self._run()
        return sum(map(len, self._prompts)) / (time.perf_counter() - start)

    def step_seconds(self, kinds: abc.Sequence[str]) -> float:
        """The median decode step of all streams together."""
        self._add(kinds, self._steps + 2)
        begun: set[str] = set()
        while len(begun) < len(self._prompts):
            begun |= self._begun()
        seconds = []
        for _ in range(self._steps - len(self._prompts)):
            seconds.append(step_seconds(self._core, len(self._prompts)))
        self._run()
        return statistics.median(seconds)

    def _begun(self) -> set[str]:
        outputs = self._core.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return {output.request_id for output in outputs}

    def _run(self) -> None:
        while self._core.has_work():
            self._begun()


def mixes(count: int, kinds: abc.Sequence[str] = tuple(KINDS)) -> dict[str, list[str]]:
    """Every batch to time: its name, and the kind of each stream."""
    alike = {kind: [kind] * count for kind in kinds}
    return {**alike, MIXED: list(islice(cycle(kinds), count))} if count > 1 else alike


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        model=str(options.model),
        max_model_len=max(options.context, options.batch_context),
        compute=ComputeConfig(device="cpu", quantization=options.quantization, threads=options.threads),
        cache=CacheConfig(dtype=options.kv_cache_dtype, memory=options.kv_cache_memory << 30),
        # As many pages as hold the prompts under every kind, of which some keep their keys twice.
        scheduling=SchedulerConfig(max_num_seqs=2 * options.streams * len(options.kinds), **ONE_BY_ONE),
    )
    core = EngineCore(config)
    sizes = {"one stream": (options.context, 1), "batch": (options.batch_context, options.streams)}
    found: dict[str, Any] = {}
    for name, (length, count) in sizes.items():
        streams, batches = Streams(core, length, count, options.steps), mixes(count, options.kinds)
        rates = {}
        for kind, kinds in batches.items():
            if kind == MIXED:
                continue
            rates[kind] = streams.fill(kinds)
            print(
                f"{name} of {length:,} tokens, {kind}: prompts computed, {rates[kind]:,.0f} tokens/s", file=sys.stderr
            )
        if options.wait_for:
            options.wait_for.touch()
            time.sleep(options.pause)
        times: dict[str, list[float]] = {kind: [] for kind in batches}
        for _ in range(options.rounds):
            for kind, kinds in batches.items():
                step = partial(streams.step_seconds, kinds)
                took, share, _ = quiet(step, options.max_foreign, options.retries, options.pause)
                times[kind].append(took)
                print(f"{name}, {kind}: {1000 * took:.2f} ms a step, others {share:.0%}", file=sys.stderr)
        if options.wait_for:
            options.wait_for.unlink(missing_ok=True)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        found[name] = {
            "tokens": length,
            "streams": count,
            "prompt_tokens_per_second": {kind: round(rate, 1) for kind, rate in rates.items()},
            "milliseconds": {kind: round(1000 * value, 3) for kind, value in medians.items()},
            "samples": {kind: [round(1000 * value, 3) for value in values] for kind, values in times.items()},
        }
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "model": options.model.name,
        "weights": options.quantization,
        "kv_cache": options.kv_cache_dtype,
        "threads": options.threads,
        "measured": found,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: a table for one stream and one for the batch."""
    tables = []
    for name, part in report["measured"].items():
        plain = part["milliseconds"]["none"]
        lines = [f"| {name}, {part['streams']} × {part['tokens']:,} tokens | ms a step | over none |", "|---|--:|--:|"]
        lines += [
            f"| {kind} | {took:.2f} | {took / plain - 1:+.1%} |".replace("-0.0%", "0.0%")
            for kind, took in part["milliseconds"].items()
        ]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory or GGUF file")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--batch-context", type=int, default=4096)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="none among them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a sample")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="int8", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--kv-cache-memory", type=int, default=8, help="GiB")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-foreign", type=float, default=0.05, help="share of the machine that others may use")
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds")
    parser.add_argument("--wait-for", type=Path, help="a file that stands while steps are timed")
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    options = parser.parse_args()
    report = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
