"""Time of a decode step outside its kernels.

A step of eight streams of the bundled model has a few hundred microseconds of arithmetic, so the time of Python code shows.
Every compiled function is timed. The rest is overhead: planning, building the batch, choosing kernels and checking operands,
sampling, accounting and encoding. Converting the arguments of a call counts as overhead too; it is measured with a function
that does nothing. Steps that repeat a recording make one call, `repeat_calls`, with the kernels of all layers. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.core.messages import StepDone, encode
from windlass.engine.interface.config import CacheConfig, EngineConfig, SchedulerConfig
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.kernels.cpu import library as cpu_library

_MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"


NOW: list[Callable[[], float]] = [time.perf_counter]


class Clock:
    """Seconds by name of what ran, within the step under way."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = NOW[0]()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += NOW[0]() - begin
                self.calls[name] += 1

        return run


def time_kernels(clock: Clock) -> dict[str, float]:
    """Put a stopwatch around every compiled function; returns what the call alone costs, in seconds, by name."""
    real = cpu_library.load()
    timed, empty = {}, {}
    for name, function in real.functions.items():
        if not isinstance(function, ctypes._CFuncPtr):
            continue
        timed[name] = clock.timed(f"kernel {name}", function)
        empty[name] = _call_cost(function.argtypes)
    patched = real.with_functions(timed)
    cpu_library._load_once = lambda: (patched, None)  # type: ignore[assignment]
    return empty


def _call_cost(argtypes: Any) -> float:
    """Seconds that ctypes needs for a function of these argument types which does nothing (getpid ignores them)."""
    nothing = ctypes.CDLL(None).getpid
    nothing.argtypes = argtypes
    of_kind = {ctypes.c_float: 1.0, ctypes.c_void_p: 94_000_000_000_000, ctypes.c_int: 1, ctypes.c_long: 4096}
    values = [of_kind[kind] if kind in of_kind else ctypes.byref(kind._type_()) for kind in argtypes]
    best = 1.0
    for _ in range(20):
        begin = NOW[0]()
        for _ in range(500):
            nothing(*values)
        best = min(best, (NOW[0]() - begin) / 500)
    return best


def build(model: str, streams: int, context: int, *, temperature: float, top_p: float, seed: int) -> EngineCore:
    """An engine whose streams all decode."""
    core = EngineCore(
        EngineConfig(
            model=model,
            max_model_len=context + 4096,
            cache=CacheConfig(memory=4 << 30),
            scheduling=SchedulerConfig(max_num_seqs=max(streams, 8), target_step_seconds=0, burst_seconds=0),
        )
    )
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=4000, temperature=temperature, top_p=top_p, ignore_eos=True)
    for i in range(streams):
        prompt = [rng.randrange(4, core.info.vocab_size) for _ in range(context)]
        core.add(EngineRequest(f"stream-{i}", prompt, sampling))
    running: set[str] = set()
    while len(running) < streams:
        running |= {output.request_id for output in core.step() if output.token_ids}
    return core


def measure(
    core: EngineCore, clock: Clock, empty: dict[str, float], steps: int, streams: int
) -> dict[str, dict[str, float]]:
    """Microseconds per step by part: median and minimum."""
    parts: dict[str, list[float]] = defaultdict(list)
    runner, scheduler = core.runner, core.scheduler
    stages = {
        "schedule": (scheduler, "schedule"),
        "update": (scheduler, "update"),
        "build_batch": (runner.batches, "build"),
        "sampler": (runner.sampler, "sample"),
        "forward": (runner.decoder, "forward"),
        "logits": (runner.decoder, "logits"),
    }
    wrapped = [(owner, attribute, getattr(owner, attribute)) for owner, attribute in stages.values()]
    for name, (owner, attribute) in stages.items():
        setattr_or_patch(owner, attribute, clock.timed(name, getattr(owner, attribute)))
    try:
        for _ in range(steps):
            clock.seconds.clear()
            clock.calls.clear()
            begin = NOW[0]()
            outputs = core.step()
            middle = NOW[0]()
            encode(StepDone(tuple(outputs), 0.0, None))
            end = NOW[0]()
            if (tokens := sum(len(output.token_ids) for output in outputs)) != streams:
                raise RuntimeError(f"a step of {streams} streams returned {tokens} tokens")
            calling = sum(
                empty[name.removeprefix("kernel ")] * n for name, n in clock.calls.items() if name[:7] == "kernel "
            )
            kernels = sum(value for name, value in clock.seconds.items() if name[:7] == "kernel ") - calling
            for name, value in clock.seconds.items():
                parts[name].append(value)
            parts["encode"].append(end - middle)
            parts["whole step"].append(end - begin)
            parts["kernels"].append(kernels)
            parts["foreign calls"].append(calling)
            parts["OVERHEAD"].append(end - begin - kernels)
    finally:
        for owner, attribute, function in wrapped:
            setattr_or_patch(owner, attribute, function)
    return {
        name: {"median_us": 1e6 * statistics.median(values), "min_us": 1e6 * min(values)}
        for name, values in parts.items()
    }


def setattr_or_patch(owner: Any, attribute: str, value: Any) -> None:
    setattr(owner, attribute, value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(_MODEL))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 400])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count this thread's CPU time: for a busy machine, with --threads 1"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.cpu_time:
        NOW[0] = time.thread_time
    torch.set_num_threads(options.threads)
    clock = Clock()
    empty = time_kernels(clock)
    report: dict[str, Any] = {"streams": options.streams, "threads": options.threads, "contexts": {}}
    for context in options.contexts:
        core = build(
            options.model, options.streams, context, temperature=options.temperature, top_p=options.top_p, seed=0
        )
        for _ in range(20):
            core.step()
        found = measure(core, clock, empty, options.steps, options.streams)
        report["contexts"][context] = found
        print(
            f"\n{options.streams} streams, {context} tokens of context, {options.threads} threads: microseconds per step"
        )
        print(f"{'part':32} {'median':>9} {'minimum':>9}")
        for name, row in sorted(found.items(), key=lambda item: -item[1]["median_us"]):
            print(f"{name:32} {row['median_us']:9.1f} {row['min_us']:9.1f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
