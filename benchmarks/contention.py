"""Decode speed while other programs take cores: run `python benchmarks/contention.py`, nothing else running.

One engine per way of waiting stays loaded, and they take turns, so that all see the same machine. Each turn is measured
with no busy loop, one, and as many as there are cores beside it. What counts is the ratio to the quiet turn of the same
run: an engine that is denied one of two cores should keep about half of its speed, and one that shares both with as many
busy loops about half as well. Threads that spin at barriers keep a few percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
_BUSY = "while True: pass"

# Name -> (environment, threads or None for the engine's choice). Environment entries of None are removed.
VARIANTS: dict[str, tuple[dict[str, str | None], int | None]] = {
    "libgomp's default": ({"GOMP_SPINCOUNT": "300000"}, None),
    "windlass": ({"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}, None),
    "one thread": ({}, 1),
}


def worker(model: str, streams: int, threads: int | None, context: int) -> int:
    """Answer each line "SECONDS" on standard input with the tokens per second of that long a run."""
    from windlass.engine.host_resources import thread_wait_environment

    os.environ.update(thread_wait_environment(os.environ))
    import random

    from windlass.engine.core.engine_core import EngineCore
    from windlass.engine.interface.request import EngineRequest, SamplingParams
    from windlass.server.config.option_names import from_flat

    core = EngineCore(from_flat(model, {"max_num_seqs": streams, "kv_cache_memory": 1 << 30, "threads": threads}))
    rng = random.Random(0)

    def top_up() -> None:
        sampling = SamplingParams(max_tokens=core.info.max_model_len - context, temperature=0.0, ignore_eos=True)
        for i in range(streams):
            prompt = [rng.randrange(4, core.info.vocab_size) for _ in range(context)]
            core.add(EngineRequest(f"{i}-{rng.random()}", prompt, sampling))

    for line in sys.stdin:
        end, count, spent = time.monotonic() + float(line), 0, 0.0
        while time.monotonic() < end:
            if not core.has_work():
                top_up()
                core.step()
            begin = time.monotonic()
            count += sum(len(output.token_ids) for output in core.step())
            spent += time.monotonic() - begin
        print(count / spent, flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=str(_MODEL))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="of: " + ", ".join(VARIANTS))
    parser.add_argument("--spincounts", type=int, nargs="*", default=[], help="further values of GOMP_SPINCOUNT to try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options.model, options.streams, options.threads, options.context)

    variants = {name: VARIANTS[name] for name in options.variants}
    variants |= {f"spin {n}": ({"GOMP_SPINCOUNT": str(n)}, None) for n in options.spincounts}
    common = [f"--model={options.model}", f"--streams={options.streams}", f"--context={options.context}"]
    workers = {}
    for name, (changes, threads) in variants.items():
        environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
        for key in (k for k, v in changes.items() if v is None):
            environment.pop(key, None)
        workers[name] = subprocess.Popen(
            [sys.executable, __file__, "--worker", *common, *([f"--threads={threads}"] if threads else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
    loads = sorted({0, 1, len(os.sched_getaffinity(0))})
    speeds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in loads} for name in workers}
    try:
        for name in workers:
            _ask(workers[name], 0.5)  # loads the model and warms up
        for _ in range(options.repeats):
            for busy in loads:
                loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(busy)]
                try:
                    for name in workers:
                        speeds[name][busy].append(_ask(workers[name], options.seconds))
                finally:
                    for loop in loops:
                        loop.kill()
                        loop.wait()
    finally:
        for process in workers.values():
            process.kill()
            process.wait()
    print(f"{options.streams} streams: tokens per second, median (minimum to maximum), and the share of the quiet turn")
    for name, by_load in speeds.items():
        quiet = statistics.median(by_load[0])
        cells = []
        for busy, found in by_load.items():
            middle = statistics.median(found)
            cells.append(
                f"{busy} busy: {middle:7.0f} ({min(found):.0f} to {max(found):.0f}) {100 * middle / quiet:4.0f} %"
            )
        print(f"{name:20}" + "   ".join(cells))
    if options.json:
        options.json.write_text(json.dumps(speeds, indent=1))
    return 0


def _ask(process: subprocess.Popen[str], seconds: float) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


if __name__ == "__main__":
    sys.exit(main())
