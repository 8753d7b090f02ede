"""CPU kernels on the shapes of a 1B Llama, compared with torch and with the rates of the machine.

    python benchmarks/kernels.py linear      # products with float32 and bfloat16 weights
    python benchmarks/kernels.py blocks      # products with quantized weights
    python benchmarks/kernels.py decode      # attention of a decode step
    python benchmarks/kernels.py prefill     # attention of a prompt
    python benchmarks/kernels.py pointwise   # rotation, norm, activation

The contestants of a measure take turns, and a figure is the minimum over the repeats, because other work on the machine can
only add time. Operands alternate between copies that together exceed the caches, so each call reads its weights or pages from
memory. Bounds are measured in the same turns: the read bandwidth of a sum over huge pages, and torch's float32 matrix
product. On a busy machine use --clock cpu --threads 1, which counts the processor time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.attention_calls import decode_call
from harness.rates import readable
from torch import Tensor

from windlass.kernels import FORMS, AttentionCall, BlockWeight, KVPages, cpu, page_tensor_shapes, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.device_memory import WeightMemory, advise_huge_pages
from windlass.kernels.layouts.weight_layouts import randomize
from windlass.kernels.torch import batched_attention
from windlass.kernels.torch.reference import gated_activation, rms_norm, rotate_and_append

LAYERS = {
    "qkv 3072x2048": (3072, 2048),
    "o 2048x2048": (2048, 2048),
    "gate_up 16384x2048": (16384, 2048),
    "down 2048x8192": (2048, 8192),
    "head 32000x2048": (32000, 2048),
}
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 64, 16
CACHES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
LARGER_THAN_CACHES = 96 << 20  # bytes

Calls = dict[str, Callable[[], object]]
Figure = dict[str, Any]


class Stopwatch:
    """Takes turns with the calls of a measure. clock: seconds."""

    def __init__(self, repeats: int, clock: Callable[[], float]) -> None:
        self.repeats, self._clock = repeats, clock

    def fastest(self, calls: Calls, repeats: int | None = None) -> dict[str, float]:
        """Seconds of each call: the minimum over interleaved repeats."""
        best = dict.fromkeys(calls, float("inf"))
        for call in calls.values():
            call()
        for _ in range(repeats or self.repeats):
            for name, call in calls.items():
                begin = self._clock()
                call()
                best[name] = min(best[name], self._clock() - begin)
        return best


def report(name: str, seconds: float, **rates: tuple[float, float]) -> Figure:
    """Print a figure. rates: by unit, the rate and the bound of the machine, in 1e9 per second."""
    shares = "".join(f"  {rate:7.1f} {unit}/s ({rate / bound:4.0%})" for unit, (rate, bound) in rates.items())
    print(f"{name:48} {seconds * 1e3:9.3f} ms{shares}", flush=True)
    return {"name": name, "milliseconds": seconds * 1e3} | {f"{unit}/s": rate for unit, (rate, _) in rates.items()}


def alternating(function: Callable[..., object], operands: Sequence[Any]) -> Callable[[], object]:
    """A call of `function` with the next operand each time."""
    supply = itertools.cycle(operands)
    return lambda: function(next(supply))


def copies(size: int) -> int:
    """Number of copies of an operand of `size` bytes that together exceed the caches."""
    return max(2, -(-LARGER_THAN_CACHES // size))


def bounds(watch: Stopwatch) -> tuple[float, float]:
    """Read bandwidth in GB/s and float32 matrix rate in Gflop/s."""
    block, a, b = readable(256 << 20), torch.randn(1024, 2048), torch.randn(2048, 2048)
    best = watch.fastest({"read": block.sum, "matrix": lambda: a @ b})
    return block.nbytes / best["read"] / 1e9, 2 * 1024 * 2048 * 2048 / best["matrix"] / 1e9


def linear(watch: Stopwatch, rows: list[int], layers: list[str]) -> list[Figure]:
    kinds = {
        "fp32": (torch.float32, torch.float32),
        "fp32 x, bf16 w": (torch.float32, torch.bfloat16),
        "bf16": (torch.bfloat16, torch.bfloat16),
    }
    bandwidth, rate = bounds(watch)
    found = []
    for layer, (kind, (x_type, w_type)), count in itertools.product(layers, kinds.items(), rows):
        columns, inner = LAYERS[layer]
        size = columns * inner * w_type.itemsize
        weights = [torch.randn(columns, inner).to(w_type) for _ in range(copies(size))]
        x = torch.randn(count, inner).to(x_type)
        calls: Calls = {"Windlass": alternating(partial(cpu.linear_small, load(), x), weights)}
        if x_type == w_type:
            calls["F.linear"] = alternating(partial(F.linear, x), weights)
        for who, seconds in watch.fastest(calls).items():
            rates = {"GB": (size / seconds / 1e9, bandwidth), "Gflop": (2e-9 * count * columns * inner / seconds, rate)}
            found.append(report(f"{layer} {kind}, {count} rows, {who}", seconds, **rates))
    return found


def blocks(watch: Stopwatch, rows: list[int], layers: list[str]) -> list[Figure]:
    bandwidth, rate = bounds(watch)
    found = []
    for layer in layers:
        columns, inner = LAYERS[layer]
        memory, weights = WeightMemory(torch.device("cpu")), dict[str, list[BlockWeight]]()
        for form in ("q8_0", "q4_0", "q4_k", "q6_k"):
            weights[form] = [BlockWeight.empty(columns, inner, FORMS[form], memory.empty)]
            while len(weights[form]) < copies(weights[form][0].nbytes):
                weights[form].append(BlockWeight.empty(columns, inner, FORMS[form], memory.empty))
            for weight in weights[form]:
                randomize(weight, torch.Generator().manual_seed(0))
        for count in rows:
            x = torch.randn(count, inner)
            calls: Calls = {form: alternating(partial(cpu.linear_blocks, load(), x), w) for form, w in weights.items()}
            for form, seconds in watch.fastest(calls, watch.repeats if count < 100 else 5).items():
                read, done = weights[form][0].nbytes / seconds / 1e9, 2e-9 * count * columns * inner / seconds
                rates = {"GB": (read, bandwidth), "Gflop": (done, rate)}
                found.append(report(f"{layer} {form}, {count} rows", seconds, **rates))
    return found


def random_pages(tokens: int, dtype: torch.dtype) -> KVPages:
    """Random keys and values in huge pages, as an engine stores them."""

    def in_huge_pages(tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor)
        advise_huge_pages(copy)
        return copy.copy_(tensor)

    shape = (-(-tokens // BLOCK), BLOCK, KV_HEADS, DIM)
    if dtype != torch.int8:
        return KVPages(*(in_huge_pages(torch.randn(shape).to(dtype)) for _ in range(2)))
    shapes = page_tensor_shapes(*shape, DIM, dtype)
    pages, slots = KVPages(*(torch.zeros(s, dtype=kind) for s, kind in shapes)), torch.arange(shape[0] * BLOCK)
    k, v = (torch.randn(len(slots), KV_HEADS, DIM) for _ in range(2))
    rotate_and_append(k[:, :0], k, v, k[:, 0, :0], k[:, 0, :0], torch.ones(len(slots)), pages, slots)
    scales = (in_huge_pages(scale) for scale in (pages.key_scale, pages.value_scale) if scale is not None)
    return KVPages(in_huge_pages(pages.key), in_huge_pages(pages.value), *scales)


def size_of(pages: KVPages) -> int:
    return sum(t.nbytes for t in (pages.key, pages.value, pages.key_scale, pages.value_scale) if t is not None)


def decode(watch: Stopwatch, contexts: list[int]) -> list[Figure]:
    """One sequence at each context length."""
    vector, backend, found = readable(LARGER_THAN_CACHES), select_backend("cpu"), []
    for context in contexts:
        calls: Calls = {"read": vector.sum}
        sizes = {"read": vector.nbytes}
        q = torch.randn(1, HEADS, DIM)
        table = torch.randperm(-(-context // BLOCK))[None].int()
        call = decode_call(table, torch.tensor([context]), torch.ones(1), DIM**-0.5)
        for name, dtype in CACHES.items():
            pages = [random_pages(context, dtype)]
            sizes[name] = size_of(pages[0])
            pages += [random_pages(context, dtype) for _ in range(LARGER_THAN_CACHES // sizes[name])]
            calls[name] = alternating(lambda p, q=q, call=call: backend.paged_attention(q, p, call), pages)
        best = watch.fastest(calls)
        bound = sizes["read"] / best.pop("read") / 1e9
        for name, seconds in best.items():
            rates = {"GB": (sizes[name] / seconds / 1e9, bound)}
            found.append(report(f"decode at {context:,} tokens, {name}", seconds, **rates))
    return found


def prefill(watch: Stopwatch, shapes: list[tuple[int, int]]) -> list[Figure]:
    """The last `queries` tokens of a prompt of `context` tokens, for each pair of `shapes`."""
    square, found = torch.randn(1024, 1024), []
    for context, queries in shapes:
        q, table = torch.randn(queries, HEADS, DIM), torch.randperm(-(-context // BLOCK))[None].int()
        start, lens = torch.tensor([0, queries]), torch.tensor([context])
        call = AttentionCall(table, start, lens, torch.ones(queries), DIM**-0.5)
        pages = {name: random_pages(context, dtype) for name, dtype in CACHES.items()}
        calls: Calls = {"matrix": lambda: square @ square}
        for name, own in pages.items():
            calls[name] = partial(cpu.paged_attention_prefill, load(), q, own, call)
        calls["torch, fp32"] = partial(batched_attention.paged_attention, q, pages["fp32"], call)
        best = watch.fastest(calls)
        bound = 2e-9 * 1024**3 / best.pop("matrix")
        operations = 4e-9 * DIM * HEADS * sum(range(context - queries + 1, context + 1))
        for name, seconds in best.items():
            rates = {"Gflop": (operations / seconds, bound)}
            found.append(report(f"prefill of {queries} tokens up to {context:,}, {name}", seconds, **rates))
    return found


def pointwise(watch: Stopwatch) -> list[Figure]:
    hidden, ffn, found = 2048, 8192, []
    for tokens in (1, 8, 512):
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
        q, k, v = (part.view(tokens, -1, DIM) for part in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1))
        angle = torch.rand(tokens, DIM // 2)
        pages = KVPages(torch.zeros(64, 16, KV_HEADS, DIM), torch.zeros(64, 16, KV_HEADS, DIM))
        appended = (q, k, v, angle.cos(), angle.sin(), torch.ones(tokens), pages, torch.arange(tokens))
        x, weight, gate_up = torch.randn(tokens, hidden), torch.ones(hidden), torch.randn(tokens, 2 * ffn)
        pairs: dict[str, Calls] = {
            "rotate_and_append": {
                "Windlass": partial(cpu.rotate_and_append, load(), *appended),
                "torch": partial(rotate_and_append, *appended),
            },
            "rms_norm": {
                "Windlass": partial(cpu.rms_norm, load(), x, weight, 1e-5),
                "torch": partial(rms_norm, x, weight, 1e-5),
            },
            "silu_and_mul": {
                "Windlass": partial(cpu.gated_activation, load(), gate_up, "silu"),
                "torch": partial(gated_activation, gate_up, "silu"),
            },
        }
        for name, calls in pairs.items():
            best = watch.fastest(calls, watch.repeats * 5)
            found += [report(f"{name}, {tokens} tokens, {who}", seconds) for who, seconds in best.items()]
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("linear", "blocks", "decode", "prefill", "pointwise"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rows", type=numbers, default="1,2,4,8,16,64,512", help="of linear and blocks")
    parser.add_argument("--layers", default=",".join(LAYERS), help="of linear and blocks, by the start of their names")
    parser.add_argument("--contexts", type=numbers, default="4096,8192,16384,32768", help="of decode")
    parser.add_argument(
        "--prompts", default="512/512,4096/4096,4096/512,4096/32,4096/4", help="context/queries of prefill"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if (reason := cpu.unavailable_reason()) is not None:
        parser.error(reason)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    watch = Stopwatch(options.repeats, time.perf_counter if options.clock == "wall" else time.thread_time)
    print(f"{load().isa}, {options.threads} threads, {options.clock} clock, minimum of {options.repeats}")
    layers = [name for name in LAYERS if any(name.startswith(start) for start in options.layers.split(","))]
    if options.measure == "decode":
        figures = decode(watch, options.contexts)
    elif options.measure == "prefill":
        shapes = [
            (int(context), int(queries))
            for context, _, queries in (p.partition("/") for p in options.prompts.split(","))
        ]
        figures = prefill(watch, shapes)
    elif options.measure == "pointwise":
        figures = pointwise(watch)
    else:
        figures = {"linear": linear, "blocks": blocks}[options.measure](watch, options.rows, layers)
    if options.json:
        head = {"isa": load().isa, "threads": options.threads, "clock": options.clock}
        options.json.write_text(json.dumps(head | {"figures": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
