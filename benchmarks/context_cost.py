"""Cost of a decoded token by context length, compared with the bytes that it must read.

    python benchmarks/context_cost.py [--model FILE.gguf] [--kv-dtypes auto int8] [--depths 256 4096 16384] [--rounds 5]

The cache is filled with random keys and values, which take as long to read as computed ones. The bound is the bytes of
weights, keys and values over the read bandwidth measured before and after each sample. Slopes are least-squares lines through
medians, of milliseconds and of the bytes readable in the time of a sample. Their quotient is the share of the read bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from harness import charts
from harness.contestants import Row, Windlass
from harness.gguf_model import GGUFModel, open_model
from harness.machine import describe
from harness.quiet import quiet
from harness.rates import Rates
from harness.report import save, spread
from harness.worker import WorkerError

Sample = tuple[float, tuple[float, float]]  # seconds per token, and GB/s read right before and right after

DEPTHS = [256, 2048, 4096, 8192, 12288, 16384, 24576, 32000]


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


def measure_curves(options: argparse.Namespace, model: GGUFModel) -> dict[str, Any]:
    """The report: a curve per KV dtype, all depths and dtypes in turns."""
    load = {"before": os.getloadavg()[0]}
    machine = Rates(options.threads)
    rates = machine.samples()
    workers: dict[str, Windlass] = {}
    left_out: dict[str, str] = {}
    samples: dict[str, dict[int, list[Sample]]] = {}
    foreign = 0.0
    try:
        for name in options.kv_dtypes:
            most = max(options.depths) + 256
            worker = Windlass(model, options.threads, options.work.resolve(), kv_cache_dtype=name, most=most)
            try:
                worker.start("f16")
            except WorkerError as error:
                left_out[name] = str(error)
                print(f"left out: {name}: {error}", flush=True)
                continue
            workers[name] = worker
            samples[name] = {depth: [] for depth in options.depths}
        if not workers:
            raise SystemExit("error: nothing to measure: " + "; ".join(left_out.values()))
        for index in range(options.rounds):
            for depth in options.depths:
                row = Row("depth", "", "decode", depth, steps=options.steps)
                for name, worker in workers.items():
                    if name in left_out:
                        continue
                    try:
                        (value, around), share, _ = quiet(
                            lambda w=worker, r=row: machine.around(  # type: ignore[misc]
                                "read_gb_s", lambda prepared: w.measure(r, prepared)
                            ),
                            options.max_foreign,
                            options.retries,
                            options.pause,
                        )
                    except WorkerError as error:
                        left_out[name] = f"round {index + 1} at {depth:,}: {error}"
                        print(f"left out: {name}: {left_out[name]}", flush=True)
                        continue
                    foreign = max(foreign, share)
                    samples[name][depth].append((1 / value, around))
                    print(
                        f"  round {index + 1}: {name} at {depth:,}: {1000 / value:.1f} ms "
                        f"(read {around[0]:.1f}, then {around[1]:.1f} GB/s)",
                        flush=True,
                    )
        for name, more in machine.samples().items():
            rates[name] += more
        info = {name: worker.info for name, worker in workers.items()}
        version = next(iter(workers.values())).version
    finally:
        for worker in workers.values():
            worker.close()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe(),
        "threads": options.threads,
        "rates": {name: spread(values) for name, values in rates.items()},
        "load": load | {"after": os.getloadavg()[0]},
        "largest_foreign_share": foreign,
        "versions": {"Windlass": version},
        "model": model.file.name,
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
    parser.add_argument("--model", type=Path, help="GGUF file (default: that of `windlass pull qwen2.5-coder-1.5b`)")
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
    if len(options.depths) < 2 or min(options.depths) < 1:
        parser.error("--depths: two or more, each at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    model = open_model(options.model)
    if max(options.depths) > model.context - 256:
        raise SystemExit(f"error: --depths must be at most {model.context - 256} with this model")
    report = measure_curves(options, model)
    save(report, options.out)
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
