"""Attention against what the machine gives: decoding against read bandwidth, prompts against the float32 matrix rate.

    python benchmarks/attention.py [--threads 2] [--repeats 15] [--clock wall|cpu] [--only decode,prefill] [--json OUT]

The shape is that of a 1B Llama: 32 query heads, 8 key heads of 64, blocks of 16 tokens in random order. The bound is
measured in the same run, in turn with the contestants: the sum of a float32 vector in huge pages, larger than the caches,
read by all threads (decode), and torch's product of two square float32 matrices (prefill). Figures are the best of the
repeats, since other work on the machine can only add, with the median beside them; shares are best over best.

decode: one sequence at each context length; bytes are those of keys, values and scales. Pages take turns with copies of
themselves until they outgrow the caches. prefill: whole prompts, and a chunk of 512 at the end of a long one; operations
count the keys that a query sees. The peer is torch's fused attention over gathered pages. On a machine with other work
use --threads 1 --clock cpu, which counts one thread's processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.attention_calls import decode_call
from harness.rates import readable

from windlass.kernels import AttentionCall, KVPages, cpu, page_tensor_shapes, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.device_memory import advise_huge_pages
from windlass.kernels.torch import batched_attention, reference

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 64, 16
OUTGROWS_CACHES = 96 << 20
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
Seconds = dict[str, list[float]]


def take_turns(contestants: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> Seconds:
    seconds: Seconds = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    for i in range(repeats):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            begin = clock()
            contestants[name]()
            seconds[name].append(clock() - begin)
    return seconds


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor)
    advise_huge_pages(copy)
    return copy.copy_(tensor)


def random_pages(tokens: int, kind: torch.dtype) -> KVPages:
    """Pages in the kind of memory in which an engine has them."""
    shape = (-(-tokens // BLOCK), BLOCK, KV_HEADS, DIM)
    if kind != torch.int8:
        return KVPages(*(in_huge_pages(torch.randn(shape).to(kind)) for _ in range(2)))
    shapes = page_tensor_shapes(*shape, DIM, kind)
    pages, slots = KVPages(*(torch.zeros(s, dtype=dtype) for s, dtype in shapes)), torch.arange(shape[0] * BLOCK)
    k, v = (torch.randn(len(slots), KV_HEADS, DIM) for _ in range(2))
    reference.rotate_and_append(k[:, :0], k, v, k[:, 0, :0], k[:, 0, :0], torch.ones(len(slots)), pages, slots)
    scales = (in_huge_pages(scale) for scale in (pages.key_scale, pages.value_scale) if scale is not None)
    return KVPages(in_huge_pages(pages.key), in_huge_pages(pages.value), *scales)


def size_of(pages: KVPages) -> int:
    return sum(t.nbytes for t in (pages.key, pages.value, pages.key_scale, pages.value_scale) if t is not None)


def decode(lengths: list[int], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    vector = readable(OUTGROWS_CACHES)
    found = []
    backend = select_backend("cpu")
    for length in lengths:
        q, lens = torch.randn(1, HEADS, DIM), torch.tensor([length])
        contestants: dict[str, Callable[[], object]] = {"read": lambda: vector.sum()}
        sizes = {"read": vector.nbytes}
        for name, kind in KINDS.items():
            first = random_pages(length, kind)
            sizes[name] = size_of(first)
            copies = [first, *(random_pages(length, kind) for _ in range(OUTGROWS_CACHES // sizes[name]))]
            table = torch.randperm(first.key.shape[0])[None].int()

            call = decode_call(table, lens, torch.ones(1), DIM**-0.5)

            def attend(supply=itertools.cycle(copies), q=q, call=call) -> object:  # type: ignore[no-untyped-def]  # noqa: B008
                return backend.paged_attention(q, next(supply), call)

            contestants[name] = attend
        seconds = take_turns(contestants, repeats, clock)
        bound = sizes["read"] / min(seconds["read"])
        print(f"decode at {length:6} tokens, read bandwidth {bound / 1e9:5.1f} GB/s", flush=True)
        for name in KINDS:
            rate = sizes[name] / min(seconds[name])
            entry = {"context": length, "cache": name, "milliseconds": min(seconds[name]) * 1e3}
            entry |= {"median_milliseconds": statistics.median(seconds[name]) * 1e3, "gigabytes_per_second": rate / 1e9}
            entry |= {"read_bandwidth": bound / 1e9, "share": rate / bound}
            found.append(entry)
            print(
                f"  {name}  {entry['milliseconds']:8.3f} ms (median {entry['median_milliseconds']:8.3f})  "
                f"{rate / 1e9:5.1f} GB/s  {rate / bound:5.0%} of read bandwidth",
                flush=True,
            )
    return found


def prefill(shapes: list[tuple[int, int]], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    square = torch.randn(1024, 1024)
    found = []
    for length, queries in shapes:
        q, table = torch.randn(queries, HEADS, DIM), torch.randperm(-(-length // BLOCK))[None].int()
        start, lens = torch.tensor([0, queries]), torch.tensor([length])
        call = AttentionCall(table, start, lens, torch.ones(queries), DIM**-0.5)
        pages = {name: random_pages(length, kind) for name, kind in KINDS.items()}
        contestants: dict[str, Callable[[], object]] = {"matrix": lambda: square @ square}
        for name, own in pages.items():
            contestants[name] = lambda p=own, q=q, call=call: cpu.paged_attention_prefill(load(), q, p, call)
        contestants["torch, fp32"] = lambda p=pages["fp32"], q=q, call=call: batched_attention.paged_attention(
            q, p, call
        )
        seconds = take_turns(contestants, repeats, clock)
        operations = 4 * DIM * HEADS * sum(range(length - queries + 1, length + 1))
        bound = 2 * 1024**3 / min(seconds["matrix"])
        print(f"prefill of {queries} tokens up to {length}, matrix rate {bound / 1e9:.0f} GFLOP/s", flush=True)
        for name in [*KINDS, "torch, fp32"]:
            rate = operations / min(seconds[name])
            entry = {"context": length, "queries": queries, "kernel": name, "milliseconds": min(seconds[name]) * 1e3}
            entry |= {"median_milliseconds": statistics.median(seconds[name]) * 1e3, "gigaflops": rate / 1e9}
            entry |= {"matrix_rate": bound / 1e9, "share": rate / bound}
            found.append(entry)
            print(
                f"  {name:12} {entry['milliseconds']:9.2f} ms (median {entry['median_milliseconds']:9.2f})  "
                f"{rate / 1e9:6.1f} GFLOP/s  {rate / bound:5.0%} of the matrix rate",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--contexts", default="4096,8192,16384,32768", help="of decode, comma-separated")
    parser.add_argument("--prompts", default="512/512,4096/4096,4096/512,4096/32,4096/4", help="context/queries, …")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    reason = cpu.unavailable_reason()
    if reason is not None:
        parser.error(reason)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    print(f"{cpu.load().isa}, {options.threads} threads, {options.clock} clock, torch {torch.__version__}")
    results: dict[str, Any] = {"isa": cpu.load().isa, "threads": options.threads, "clock": options.clock}
    if "decode" in options.only:
        results["decode"] = decode([int(n) for n in options.contexts.split(",")], options.repeats, clock)
    if "prefill" in options.only:
        shapes = [tuple(int(n) for n in part.split("/")) for part in options.prompts.split(",")]
        results["prefill"] = prefill([(length, queries) for length, queries in shapes], options.repeats, clock)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
