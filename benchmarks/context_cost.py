"""Cost of a decoded token by context length, compared with the bytes that it must read.

    python benchmarks/context_cost.py [--shape 1b] [--quantization int8] [--kv-dtypes auto int8] [--rounds 5]

The cache is filled with random keys and values, which take as long to read as computed ones. The bound is the bytes of
weights, keys and values over the read bandwidth measured before and after each sample. Slopes are least-squares lines through
medians, of milliseconds and of the bytes readable in the time of a sample. Their quotient is the share of the read bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from harness import charts
from harness.contestants import WindlassContestant
from harness.machine import describe
from harness.measures import Measure
from harness.places import Places
from harness.prepare_peers import prepare_windlass
from harness.quiet import quiet
from harness.rates import Rates
from harness.report import spread
from harness.shape import SHAPES
from harness.worker import WorkerError

Sample = tuple[float, tuple[float, float]]  # seconds per token, and GB/s read right before and right after

DEPTHS = [256, 2048, 4096, 8192, 12288, 16384, 24576, 32768]


def slope(depths: list[float], seconds: list[float]) -> float:
    """Seconds per cached token: the least-squares line's."""
    n = len(depths)
    mean_depth, mean_seconds = sum(depths) / n, sum(seconds) / n
    covariance = sum((d - mean_depth) * (s - mean_seconds) for d, s in zip(depths, seconds, strict=True))
    return covariance / sum((d - mean_depth) ** 2 for d in depths)


def curve_of(samples: dict[int, list[Sample]], weight_bytes: float, bytes_per_token: float) -> list[dict[str, Any]]:
    """A point per depth: the spread of its milliseconds, the rates around them, the medians of bound and share."""
    points = []
    for depth, taken in samples.items():
        read = weight_bytes + depth * bytes_per_token
        bounds = [read / (statistics.mean(rates) * 1e9) for _, rates in taken]
        points.append(
            {
                "depth": depth,
                "milliseconds": spread([1000 * seconds for seconds, _ in taken]),
                "read_gb_s": [list(rates) for _, rates in taken],
                "bound_milliseconds": 1000 * statistics.median(bounds),
                "share": statistics.median(b / seconds for b, (seconds, _) in zip(bounds, taken, strict=True)),
            }
        )
    return points


def slopes_of(samples: dict[int, list[Sample]], bytes_per_token: float) -> dict[str, Any]:
    """What a cached token adds to a decoded one: nanoseconds, and the share of the read bandwidth (None: lost in noise)."""
    depths = [float(depth) for depth in samples]
    seconds = [statistics.median(seconds for seconds, _ in taken) for taken in samples.values()]
    readable = [statistics.median(s * statistics.mean(rates) * 1e9 for s, rates in taken) for taken in samples.values()]
    cost = slope(depths, readable)
    bandwidth = statistics.median(statistics.mean(rates) for taken in samples.values() for _, rates in taken)
    return {
        "nanoseconds_per_cached_token": slope(depths, seconds) * 1e9,
        "bound_nanoseconds_per_cached_token": bytes_per_token / bandwidth,
        "share_of_read_bandwidth": bytes_per_token / cost if cost > 0 else None,
    }


def measure_curves(options: argparse.Namespace) -> dict[str, Any]:
    """The report: a curve per KV dtype, all depths and dtypes in turns."""
    shape, places = SHAPES[options.shape], Places(options.work.resolve(), options.shape)
    kv_gb = (max(options.depths) + 256) * shape.kv_bytes_per_token("float32") / (1 << 30)
    load = {"before": os.getloadavg()[0]}
    machine = Rates(options.threads)
    rates = machine.samples()
    workers: list[WindlassContestant] = []
    left_out: dict[str, str] = {}
    samples: dict[str, dict[int, list[Sample]]] = {}
    foreign = 0.0
    try:
        for kv_dtype in options.kv_dtypes:
            worker = WindlassContestant(places, options.quantization, options.threads, kv_dtype, kv_gb)
            try:
                worker.start()
            except WorkerError as error:
                left_out[worker.name] = str(error)
                print(f"left out: {worker.name}: {error}", flush=True)
                continue
            workers.append(worker)
            samples[worker.name] = {depth: [] for depth in options.depths}
        if not workers:
            raise SystemExit("error: nothing to measure: " + "; ".join(left_out.values()))
        for index in range(options.rounds):
            for depth in options.depths:
                for worker in workers:
                    if worker.name in left_out:
                        continue
                    measure = Measure("", "depth", prompt=depth, steps=options.steps)
                    try:
                        ((value,), around), share, _ = quiet(
                            lambda w=worker, m=measure: machine.around("read_gb_s", lambda p: w.measure(m, 1, p)),
                            options.max_foreign,
                            options.retries,
                            options.pause,
                        )
                    except WorkerError as error:
                        left_out[worker.name] = f"round {index + 1} at {depth:,}: {error}"
                        print(f"left out: {worker.name}: {left_out[worker.name]}", flush=True)
                        continue
                    foreign = max(foreign, share)
                    samples[worker.name][depth].append((1 / value, around))
                    print(
                        f"  round {index + 1}: {worker.name} at {depth:,}: {1000 / value:.1f} ms "
                        f"(read {around[0]:.1f}, then {around[1]:.1f} GB/s)",
                        flush=True,
                    )
        for name, more in machine.samples().items():
            rates[name] += more
        info = {worker.name: worker.info() for worker in workers}
        version = workers[0].version()
    finally:
        for worker in workers:
            worker.close()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe(),
        "threads": options.threads,
        "rates": {name: spread(values) for name, values in rates.items()},
        "load": load | {"after": os.getloadavg()[0]},
        "largest_foreign_share": foreign,
        "versions": {"Windlass": version},
        "model": options.shape,
        "weights": "bf16" if options.quantization == "none" else options.quantization,
        "kv_cache_dtypes": {name: known["kv_cache_dtype"] for name, known in info.items()},
        "left_out": left_out,
        "curves": {},
        "slopes": {},
    }
    for name, known in info.items():
        taken, per_token = (
            {depth: found for depth, found in samples[name].items() if found},
            known["kv_bytes_per_token"],
        )
        if len(taken) > 1:  # one that has failed leaves what it had
            report["curves"][name] = curve_of(taken, known["weight_bytes"], per_token)
            report["slopes"][name] = slopes_of(taken, per_token)
    if not report["curves"]:
        raise SystemExit("error: nothing was measured: " + "; ".join(left_out.values()))
    return report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights")
    parser.add_argument("--kv-dtypes", nargs="+", default=["auto", "int8"], help="each makes a curve")
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS)
    parser.add_argument("--steps", type=int, default=6, help="decoded tokens per sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--max-foreign", type=float, default=0.05, help="share of the machine that others may use (0.05)"
    )
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--pause", type=float, default=5.0)
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--out", type=Path, help="default: WORK/context_cost.json, and a .png of the same name")
    options = parser.parse_args()
    options.out = options.out or options.work / "context_cost.json"
    if len(options.depths) < 2 or min(options.depths) < 1 or max(options.depths) > SHAPES[options.shape].context - 256:
        parser.error(f"--depths: two or more, from 1 to {SHAPES[options.shape].context - 256}")
    return options


def main() -> None:
    options = parse_arguments()
    prepare_windlass(Places(options.work.resolve(), options.shape), options.shape)
    report = measure_curves(options)
    options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, found in report["slopes"].items():
        share = found["share_of_read_bandwidth"]
        text = "no slope, the noise is larger" if share is None else f"{share:.0%} of the read bandwidth"
        print(f"{name}: {found['nanoseconds_per_cached_token']:.0f} ns per cached token, {text}")
    try:
        charts.save(lambda: charts.draw_context_cost(report), options.out.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
