"""What the rotation costs: the rotate-and-append kernel against a plain copy, and eight rotary scalings in a step against one.

    python benchmarks/rotary_kernels.py [--threads 2] [--repeats 60] [--steps 300] [--only append,angles,mixing] [--json OUT]

append: q, k and v of 4,096 tokens by 16 heads of 64, float32 (each a (4096, 1024) tensor): q is turned in place, k and v
go to the cache's pages. Bandwidth counts every byte that must be read and written once. The copy it is held against moves as
many bytes, by torch and by the C library's memmove on each thread; the quicker one counts.
mixing: whole engine steps of eight decoding sequences, under eight scalings and under one, in turn. Both engines share
one set of weights. Medians, and the median of the differences of neighbouring steps.
Contestants take turns; figures are medians (minimum to maximum).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness.steps import ONE_BY_ONE, step_seconds

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import cpu
from windlass.kernels.cpu import load
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.torch import reference
from windlass.server.config.option_names import from_flat

TOKENS, HEADS, DIM = 4096, 16, 64
RANDOM_MODEL = {  # 162 million parameters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def scalings(pairs: int) -> list[dict[str, Any]]:
    """Eight that differ, for a model that rotates so many pairs."""
    longrope = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64}
    return [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "ntk", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "default", "rope_theta": 50_000.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        longrope | {"short_factor": [1.5] * pairs, "long_factor": [2.0 + 0.1 * i for i in range(pairs)]},
    ]


def take_turns(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call; the order turns round with each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    for i in range(repeats):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return {"median_us": median * 1e6, "min_us": low * 1e6, "max_us": high * 1e6}


def memmove_on(threads: int, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """A copy by the C library, cut over threads (ctypes lets go of the interpreter's lock)."""
    size = source.numel() * source.element_size() // threads
    pool = ThreadPoolExecutor(threads)
    places = [(target.data_ptr() + i * size, source.data_ptr() + i * size, size) for i in range(threads)]
    return lambda: list(pool.map(lambda place: ctypes.memmove(*place), places))


def append(repeats: int, threads: int) -> dict[str, Any]:
    q, k, v = (torch.randn(TOKENS, HEADS, DIM) for _ in range(3))
    pages = KVPages(*(torch.zeros(TOKENS // 16, 16, HEADS, DIM) for _ in range(2)))
    angle = torch.rand(TOKENS, DIM // 2)
    cos, sin, ones, slots = angle.cos(), angle.sin(), torch.ones(TOKENS), torch.arange(TOKENS)
    source, target = torch.randn(3 * TOKENS, HEADS * DIM), torch.zeros(3 * TOKENS, HEADS * DIM)
    copied = 2 * source.numel() * 4
    moved = copied + 2 * cos.numel() * 4
    seconds = take_turns(
        {
            "rotate_and_append": lambda: cpu.rotate_and_append(load(), q, k, v, cos, sin, ones, pages, slots),
            "plain torch": lambda: reference.rotate_and_append(q, k, v, cos, sin, ones, pages, slots),
            "torch copy_": lambda: target.copy_(source),
            "memmove": memmove_on(threads, target, source),
        },
        repeats,
    )
    print(f"rotate and append: q, k, v ({TOKENS}, {HEADS * DIM}) float32 as {HEADS} heads of {DIM}, {threads} threads")
    result: dict[str, Any] = {}
    for name, values in seconds.items():
        entry = summary(values)
        size = copied if name in ("torch copy_", "memmove") else moved
        entry["gigabytes_per_second"] = size / statistics.median(values) / 1e9
        result[name] = entry
        span = f"({entry['min_us']:.0f} to {entry['max_us']:.0f})"
        print(f"  {name:18} {entry['median_us']:8.0f} us {span:18} {entry['gigabytes_per_second']:6.2f} GB/s")
    best = max(result["torch copy_"]["gigabytes_per_second"], result["memmove"]["gigabytes_per_second"])
    result["share_of_copy_bandwidth"] = result["rotate_and_append"]["gigabytes_per_second"] / best
    print(f"  share of the copy bandwidth: {100 * result['share_of_copy_bandwidth']:.0f} %")
    return result


def angles(repeats: int) -> dict[str, Any]:
    inv_freq = 1e4 ** -(torch.arange(64, dtype=torch.float64) / 64).repeat(1, 8, 1)
    result: dict[str, Any] = {}
    for tokens in (1, 8, 512):
        rows, positions = torch.arange(tokens) % 8, torch.randint(0, 10**7, (tokens,))
        seconds = take_turns(
            {
                "compiled": lambda r=rows, p=positions: cpu.rotary_angles(load(), inv_freq, r, p),
                "torch, float64": lambda r=rows, p=positions: reference.rotary_angles(inv_freq, r, p),
            },
            repeats * 10,
        )
        result[str(tokens)] = {name: summary(values) for name, values in seconds.items()}
        figures = "  ".join(f"{name} {entry['median_us']:.1f} us" for name, entry in result[str(tokens)].items())
        print(f"cos and sin of 64 pairs, {tokens} tokens: {figures}")
    return result


def decoding(core: EngineCore, kinds: list[dict[str, Any]], steps: int) -> None:
    """Eight sequences that decode from now on."""
    for i, kind in enumerate(kinds):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + 40)
        prompt = [3 + (7 * i + j) % 100 for j in range(40)]
        core.add(EngineRequest(str(i), prompt, sampling, rope_scaling=RopeScaling.from_dict(kind)))
    while core.stats().generation_tokens < 2 * len(kinds):
        core.step()


def mixing(directory: Path, name: str, steps: int, pairs: int, **options: Any) -> dict[str, Any]:
    config = from_flat(
        str(directory), {"device": "cpu", "max_num_seqs": 8, "prefix_caching": False, **ONE_BY_ONE, **options}
    )
    cores = {"one scaling": EngineCore(config), "eight scalings": EngineCore(config)}
    first, second = cores.values()
    second.runner.decoder = first.runner.decoder
    kinds = scalings(pairs)
    decoding(first, [kinds[3]] * 8, steps)
    decoding(second, kinds, steps)
    specs = [core.stats().rotary_specs_live for core in cores.values()]
    if specs != [1, 8]:
        raise RuntimeError(f"{specs} live scalings, not 1 and 8")
    seconds = take_turns({name: lambda c=core: step_seconds(c, 8) for name, core in cores.items()}, steps)
    result: dict[str, Any] = {name: summary(values) for name, values in seconds.items()}
    differences = [b - a for a, b in zip(*seconds.values(), strict=True)]
    result["added_us"] = statistics.median(differences) * 1e6
    result["parameters"] = first.info.num_parameters
    print(f"decode step of 8 sequences, {name}, {first.info.num_parameters / 1e6:.1f} M parameters, {steps} steps each")
    for what in seconds:
        entry = result[what]
        print(f"  {what:15} {entry['median_us']:8.0f} us ({entry['min_us']:.0f} to {entry['max_us']:.0f})")
    print(f"  eight add {result['added_us']:.0f} us (median of the differences of neighbours)")
    return result


def random_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(RANDOM_MODEL))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="append,angles,mixing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    reason = cpu.unavailable_reason()
    if reason is not None:
        parser.error(reason)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{cpu.load().isa}, {options.threads} threads, torch {torch.__version__}")
    chosen = options.only.split(",")
    results: dict[str, Any] = {}
    if "append" in chosen:
        results["append"] = append(options.repeats, options.threads)
    if "angles" in chosen:
        results["angles"] = angles(options.repeats)
    if "mixing" in chosen:
        demo = Path(windlass.__file__).parent / "models" / "demo"
        results["mixing demo"] = mixing(demo, "the bundled model", options.steps, 16)
        with tempfile.TemporaryDirectory() as folder:
            model, memory = random_model(Path(folder)), 512 << 20
            results["mixing random"] = mixing(
                model, "random weights", options.steps, 32, load_format="dummy", kv_cache_memory=memory
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
