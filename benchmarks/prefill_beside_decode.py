"""How long running streams wait for their next token while a long prompt prefills beside them.

    python benchmarks/prefill_beside_decode.py [--shape 1b] [--quantization int8] [--prompt 32768] [--streams 4]

The engine runs in this process, scheduling and sampling included, HTTP not. The streams decode alone for a while, then the
prompt arrives; a token's latency is the time since the same stream's previous token. The engine bounds a step by its
measured length, so the latencies should stay near --target-step-ms however long the prompt is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from harness import charts
from harness.machine import cpu_clock, describe
from harness.places import Places
from harness.rates import Rates
from harness.report import percentile, spread
from harness.shape import SHAPES
from prepare_peers import prepare_windlass

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.server.config.option_names import from_flat

_SHORT = 64  # prompt tokens of a stream


class Streams:
    """Decoding streams of one engine and when each of their tokens came."""

    def __init__(self, core: EngineCore, count: int, max_tokens: int) -> None:
        self.core = core
        self._rng = random.Random(0)
        self.token_times: dict[str, list[float]] = {}
        self.steps: list[tuple[float, float]] = []  # (end, seconds) of every step
        for index in range(count):
            self.token_times[f"stream-{index}"] = []
            self.add(f"stream-{index}", _SHORT, max_tokens)

    def add(self, name: str, length: int, max_tokens: int) -> None:
        prompt = [self._rng.randrange(10, self.core.info.vocab_size) for _ in range(length)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(EngineRequest(name, prompt, sampling))

    def step(self) -> set[str]:
        """One step; the names that got tokens."""
        start = time.perf_counter()
        outputs = self.core.step()
        now = time.perf_counter()
        self.steps.append((now, now - start))
        named = {output.request_id for output in outputs if output.token_ids}
        for name in named & set(self.token_times):
            self.token_times[name].append(now)
        return named

    def latencies(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens of one stream, over all streams, for tokens that came in begin .. end."""
        return [1000 * (b - a) for times in self.token_times.values() for a, b in _pairs(times) if begin < b <= end]


def _pairs(times: list[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))


def _summary(values: list[float]) -> dict[str, float]:
    return spread(values) | {"p99": percentile(values, 99), "tokens": len(values)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    shape, places = SHAPES[options.shape], Places(options.work.resolve(), options.shape)
    tokens = options.alone + options.prompt // 16 + 4096  # no stream may end before the prompt is through
    tokens = min(tokens, shape.context - _SHORT)
    room = options.prompt + options.streams * (tokens + _SHORT) + 4096
    config: dict[str, Any] = {
        "device": "cpu",
        "prefix_caching": False,
        "kv_cache_memory": int(room * shape.kv_bytes_per_token("float32")),
        "threads": options.threads,
        "target_step_seconds": options.target_step_ms / 1000,
        "max_num_seqs": options.streams + 1,
    }
    if options.quantization != "none":
        config["quantization"] = options.quantization
    if options.kv_dtype != "auto":
        config["kv_cache_dtype"] = options.kv_dtype
    load = {"before": os.getloadavg()[0]}
    rates = {name: spread(values) for name, values in Rates(options.threads).samples().items()}
    core = EngineCore(from_flat(str(places.model), config))
    streams = Streams(core, options.streams, tokens)
    while not all(streams.token_times.values()):
        streams.step()
    clock = cpu_clock()
    origin = time.perf_counter()
    for _ in range(options.alone):
        streams.step()
    arrival = time.perf_counter()
    streams.add("long", options.prompt, 1)
    shown = arrival
    while "long" not in streams.step():
        if time.perf_counter() - shown > 30:
            shown = time.perf_counter()
            print(f"  {shown - arrival:.0f} s: last step {streams.steps[-1][1] * 1000:.0f} ms", flush=True)
        if not core.scheduler.num_running:
            raise SystemExit("error: the streams ended before the prompt was through: lower --prompt or --alone")
    done = time.perf_counter()
    for _ in range(options.alone):
        streams.step()
    end_clock = cpu_clock()
    during, alone = streams.latencies(arrival, done), streams.latencies(origin, arrival)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe(),
        "threads": options.threads,
        "rates": rates,
        "load": load | {"after": os.getloadavg()[0]},
        "foreign_share": end_clock.foreign_share(clock, os.cpu_count() or 1) if clock and end_clock else None,
        "versions": {"torch": torch.__version__},
        "model": options.shape,
        "weights": "bf16" if options.quantization == "none" else options.quantization,
        "kv_cache_dtype": core.info.kv_cache_dtype,
        "target_step_ms": options.target_step_ms,
        "prompt": options.prompt,
        "prefill_span": [arrival - origin, done - origin],
        "prefill_tokens_per_second": options.prompt / (done - arrival),
        "during": _summary(during),
        "alone": _summary(alone),
        "steps_during": _summary([1000 * seconds for end, seconds in streams.steps if arrival < end <= done]),
        "during_milliseconds": [round(value, 3) for value in during],
        "alone_milliseconds": [round(value, 3) for value in alone],
        "streams": [
            {
                "at": [round(b - origin, 4) for _, b in _pairs(times) if b > origin],
                "milliseconds": [round(1000 * (b - a), 3) for a, b in _pairs(times) if b > origin],
            }
            for times in streams.token_times.values()
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--alone", type=int, default=64, help="steps before the prompt arrives and after it is through")
    parser.add_argument("--target-step-ms", type=float, default=250.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--out", type=Path, help="default: WORK/prefill_beside_decode.json, and .png beside it")
    options = parser.parse_args()
    options.out = options.out or options.work / "prefill_beside_decode.json"
    if min(options.prompt, options.streams, options.threads) < 1 or options.alone < 2 or options.target_step_ms < 0:
        parser.error(
            "--prompt, --streams and --threads: at least 1; --alone: at least 2; --target-step-ms: not negative"
        )
    if options.prompt + 1 > SHAPES[options.shape].context:
        parser.error(f"--prompt must stay below {SHAPES[options.shape].context}")
    return options


def main() -> None:
    options = parse_arguments()
    prepare_windlass(Places(options.work.resolve(), options.shape), options.shape)
    try:
        report = measure(options)
    except LoadError as error:
        raise SystemExit(f"error: {error}") from None
    options.out.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in ("alone", "during", "steps_during"):
        found = report[name]
        print(
            f"{name}: median {found['median']:.1f} ms, p99 {found['p99']:.1f}, max {found['max']:.1f}, {found['tokens']} samples"
        )
    print(f"prompt: {report['prefill_tokens_per_second']:.1f} tokens/s beside the streams")
    try:
        charts.save(lambda: charts.draw_latencies(report), options.out.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
