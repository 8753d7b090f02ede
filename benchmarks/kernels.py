"""Times the CPU kernels against torch's own operations on the shapes of a 1B Llama.

    python benchmarks/kernels.py [--threads 2] [--repeats 20] [--clock wall|cpu] [--only linear,attention,pointwise]

Weights alternate between copies larger together than the caches, so every call reads its weight from memory. Each figure
is the minimum over the repeats, which alternate between the contestants: other work on the machine can only add. The `cpu`
clock counts one thread's processor time (use it with --threads 1 on a busy machine).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness.attention_calls import decode_call
from torch import Tensor

from windlass.kernels import cpu
from windlass.kernels.cpu import load
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.torch.batched_attention import paged_attention
from windlass.kernels.torch.reference import gated_activation, rms_norm, rotate_and_append

LAYERS = {
    "qkv 3072x2048": (3072, 2048),
    "o 2048x2048": (2048, 2048),
    "gate_up 16384x2048": (16384, 2048),
    "down 2048x8192": (2048, 8192),
    "head 32000x2048": (32000, 2048),
}
CACHE_BYTES = 48 << 20

Timer = Callable[[], float]


def fastest(contestants: dict[str, Callable[[], object]], repeats: int, clock: Timer) -> dict[str, float]:
    """Milliseconds of each contestant: the minimum over interleaved repeats."""
    best = dict.fromkeys(contestants, float("inf"))
    for call in contestants.values():
        call()
    for _ in range(repeats):
        for name, call in contestants.items():
            begin = clock()
            call()
            best[name] = min(best[name], (clock() - begin) * 1e3)
    return best


def alternating(function: Callable[..., Tensor], x: Tensor, weights: list[Tensor]) -> Callable[[], Tensor]:
    """function(x, weight) with the next weight at each call."""
    supply = itertools.cycle(weights)
    return lambda: function(x, next(supply))


def linear(rows: list[int], layers: list[str], repeats: int, clock: Timer) -> None:
    kinds = {
        "fp32": (torch.float32, torch.float32),
        "fp32 x, bf16 w": (torch.float32, torch.bfloat16),
        "bf16": (torch.bfloat16, torch.bfloat16),
    }
    for layer in layers:
        columns, inner = LAYERS[layer]
        for kind, (x_type, w_type) in kinds.items():
            size = columns * inner * w_type.itemsize
            weights = [torch.randn(columns, inner).to(w_type) for _ in range(max(2, -(-CACHE_BYTES // size)))]
            for count in rows:
                x = torch.randn(count, inner).to(x_type)
                contestants = {"ours": alternating(partial(cpu.linear_small, load()), x, weights)}
                if x_type == w_type:
                    contestants["F.linear"] = alternating(F.linear, x, weights)
                best = fastest(contestants, repeats, clock)
                figures = "  ".join(f"{name} {value:8.2f}" for name, value in best.items())
                speed = size / best["ours"] / 1e6
                print(f"{layer:20} {kind:15} M={count:<4} {figures}  ({speed:.1f} GB/s of weight)", flush=True)


def attention(repeats: int, clock: Timer) -> None:
    heads, kv_heads, dim, size = 32, 8, 64, 16
    for batch, length in ((1, 512), (1, 8192), (8, 512), (8, 4096), (24, 1024)):
        per = -(-length // size)
        table = torch.randperm(batch * per).view(batch, per).to(torch.int32)
        lengths = torch.full((batch,), length)
        call = decode_call(table, lengths, torch.ones(batch), dim**-0.5)
        q = torch.randn(batch, heads, dim)
        for kind in (torch.float32, torch.bfloat16):
            pages = KVPages(*(torch.randn(batch * per, size, kv_heads, dim).to(kind) for _ in range(2)))

            def ours(q=q, pages=pages, call=call) -> Tensor:
                return cpu.paged_attention_decode(load(), q, pages, call)

            def batched(q=q, pages=pages, call=call) -> Tensor:
                return paged_attention(q, pages, call)

            best = fastest({"ours": ours, "torch": batched}, repeats, clock)
            speed = 2 * pages.key.numel() * kind.itemsize / best["ours"] / 1e6
            figures = "  ".join(f"{name} {value:8.3f}" for name, value in best.items())
            print(f"attention B={batch} S={length} {kind}  {figures}  ({speed:.1f} GB/s of cache)", flush=True)


def pointwise(repeats: int, clock: Timer) -> None:
    heads, kv_heads, dim, hidden, ffn = 32, 8, 64, 2048, 8192
    for tokens in (1, 8, 512):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
        q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
        angle = torch.rand(tokens, dim // 2)
        cos, sin, ones, slots = angle.cos(), angle.sin(), torch.ones(tokens), torch.arange(tokens)
        pages = KVPages(torch.zeros(64, 16, kv_heads, dim), torch.zeros(64, 16, kv_heads, dim))
        x, weight, gate_up = torch.randn(tokens, hidden), torch.ones(hidden), torch.randn(tokens, 2 * ffn)
        pairs: dict[str, dict[str, Callable[[], object]]] = {
            "rotate_and_append": {
                "ours": lambda q=q, k=k, v=v, c=cos, s=sin, o=ones, p=pages, i=slots: cpu.rotate_and_append(
                    load(), q, k, v, c, s, o, p, i
                ),
                "torch": lambda q=q, k=k, v=v, c=cos, s=sin, o=ones, p=pages, i=slots: rotate_and_append(
                    q, k, v, c, s, o, p, i
                ),
            },
            "rms_norm": {
                "ours": lambda x=x, w=weight: cpu.rms_norm(load(), x, w, 1e-5),
                "torch": lambda x=x, w=weight: rms_norm(x, w, 1e-5),
            },
            "silu_and_mul": {
                "ours": lambda g=gate_up: cpu.gated_activation(load(), g, "silu"),
                "torch": lambda g=gate_up: gated_activation(g, "silu"),
            },
        }
        for name, contestants in pairs.items():
            best = fastest(contestants, repeats * 5, clock)
            figures = "  ".join(f"{who} {value * 1e3:8.1f}" for who, value in best.items())
            print(f"{name:18} T={tokens:<4} us: {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="linear,attention,pointwise")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--layers", default=",".join(LAYERS), help="comma-separated, by name")
    options = parser.parse_args()
    reason = cpu.unavailable_reason()
    if reason is not None:
        parser.error(reason)
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    print(
        f"{cpu.load().isa}, {options.threads} threads, {options.clock} clock, minimum of {options.repeats}, milliseconds"
    )
    chosen = options.only.split(",")
    if "linear" in chosen:
        layers = [name for name in LAYERS if any(name.startswith(wanted) for wanted in options.layers.split(","))]
        linear([int(count) for count in options.rows.split(",")], layers, options.repeats, clock)
    if "attention" in chosen:
        attention(options.repeats, clock)
    if "pointwise" in chosen:
        pointwise(options.repeats, clock)


if __name__ == "__main__":
    main()
