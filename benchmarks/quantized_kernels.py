"""Products with weights in blocks against what the machine allows, on the shapes of a 1B Llama.

    python benchmarks/quantized_kernels.py [--threads 2] [--repeats 20] [--clock wall|cpu] [--rows 1,8,64,512]

Bounds are measured in the same run: the read bandwidth of a sum over 256 MiB in huge pages (best of many), the matrix rate
of torch's float32 product. Weights lie where a model's do and alternate between copies larger together than the caches, so
every call reads its weight from memory; contestants alternate too, and each figure is the minimum over the repeats. `read`
is weight bytes (scales included) over time, as a share of the bandwidth; `rate` is two operations per weight and row over
time, as a multiple of the float32 rate. With --clock cpu and --threads 1 only the thread's own processor time counts, for a
busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from harness.rates import readable
from torch import Tensor

from windlass.kernels import FORMS, BlockWeight, cpu
from windlass.kernels.cpu import load
from windlass.kernels.device_memory import WeightMemory
from windlass.kernels.layouts.weight_layouts import randomize

LAYERS = {
    "qkv 3072x2048": (3072, 2048),
    "o 2048x2048": (2048, 2048),
    "gate_up 16384x2048": (16384, 2048),
    "down 2048x8192": (2048, 8192),
    "head 32000x2048": (32000, 2048),
}
CACHE_BYTES = 64 << 20
Timer = Callable[[], float]


def fastest(calls: dict[str, Callable[[], object]], repeats: int, clock: Timer) -> dict[str, float]:
    """Seconds of each call: the minimum over interleaved repeats."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            begin = clock()
            call()
            best[name] = min(best[name], clock() - begin)
    return best


def bounds(repeats: int, clock: Timer) -> tuple[float, float]:
    """Read bandwidth in bytes/s and float32 matrix rate in operations/s."""
    block, a, b = readable(256 << 20), torch.randn(1024, 2048), torch.randn(2048, 2048)
    best = fastest({"read": block.sum, "matrix": lambda: a @ b}, repeats, clock)
    return block.nbytes / best["read"], 2 * 1024 * 2048 * 2048 / best["matrix"]


def random_weight(columns: int, inner: int, kind: str, memory: WeightMemory) -> Tensor | BlockWeight:
    if kind == "bf16":
        return memory.empty((columns, inner), torch.bfloat16).copy_(torch.randn(columns, inner))
    weight = BlockWeight.empty(columns, inner, FORMS[kind], memory.empty)
    randomize(weight, torch.Generator().manual_seed(0))
    return weight


def product(x: Tensor, weight: Tensor | BlockWeight) -> Tensor:
    return (
        cpu.linear_blocks(load(), x, weight) if isinstance(weight, BlockWeight) else cpu.linear_small(load(), x, weight)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rows", default="1,2,4,8,16,64,512")
    parser.add_argument("--layers", default=",".join(LAYERS), help="comma-separated, by the start of a name")
    parser.add_argument("--kinds", default="bf16,q8_0,q4_0,q4_k,q6_k", help="bf16 and forms of blocks")
    options = parser.parse_args()
    reason = cpu.unavailable_reason()
    if reason is not None:
        parser.error(reason)
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    bandwidth, rate = bounds(options.repeats, clock)
    print(
        f"{cpu.load().isa}, {options.threads} threads, {options.clock} clock, minimum of {options.repeats}; "
        f"read {bandwidth / 1e9:.1f} GB/s, float32 products {rate / 1e9:.0f} GFLOP/s"
    )
    for name, (columns, inner) in LAYERS.items():
        if not any(name.startswith(wanted) for wanted in options.layers.split(",")):
            continue
        sets, memory = {}, WeightMemory(torch.device("cpu"))
        for kind in options.kinds.split(","):
            first = random_weight(columns, inner, kind, memory)
            count = max(2, -(-CACHE_BYTES // first.nbytes))
            sets[kind] = [first, *(random_weight(columns, inner, kind, memory) for _ in range(count - 1))]
        supplies = {kind: itertools.cycle(weights) for kind, weights in sets.items()}
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, inner)
            calls = {kind: lambda x=x, s=supply: product(x, next(s)) for kind, supply in supplies.items()}
            best = fastest(calls, options.repeats if rows < 100 else max(3, options.repeats // 4), clock)
            for kind, seconds in best.items():
                read, done = sets[kind][0].nbytes / seconds, 2 * rows * columns * inner / seconds
                print(
                    f"{name:20} {kind:5} M={rows:<4} {seconds * 1e3:8.2f} ms  read {read / 1e9:5.1f} GB/s "
                    f"({read / bandwidth:4.0%})  rate {done / 1e9:5.0f} GOP/s ({done / rate:4.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
