"""What LoRA adapters cost a step: run `python benchmarks/adapter_cost.py` from a checkout, machine quiet.

One engine with random weights of a known shape holds eight adapters that change every projection. Streams decode without
one, all with the same, and each with its own, turn by turn, so that a machine that slows down does so for all three.
A turn is so many steps after some that are not counted; a figure is the median step of all turns, and next to it is what
the adapters add. Prompts are measured the same way: the time of the steps that compute one, per kind.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness.checkpoint import make_config
from harness.shape import SHAPES, ModelShape
from safetensors.torch import save_file

from windlass.engine.api.adapters import AdapterSource
from windlass.engine.api.config import (
    AdapterConfig,
    CacheConfig,
    ComputeConfig,
    EngineConfig,
    LoadingConfig,
    SchedulerConfig,
)
from windlass.engine.api.request import EngineRequest, SamplingParams
from windlass.engine.core.engine_core import EngineCore

_ADAPTERS = 8


def save_adapter(directory: Path, shape: ModelShape, rank: int, dtype: torch.dtype, seed: int) -> None:
    """A random adapter as PEFT writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for name, (rows, columns) in shape.layer_matrices().items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for which, size in (("A", (rank, columns)), ("B", (rows, rank))):
                tensor = torch.randn(size, generator=generator) * 0.01
                tensors[f"{module}.lora_{which}.weight"] = tensor.to(dtype)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def make_engine(folder: Path, options: argparse.Namespace) -> EngineCore:
    shape = SHAPES[options.shape]
    make_config(folder / "model", shape)
    dtype = getattr(torch, options.adapter_dtype)
    for i in range(_ADAPTERS):
        save_adapter(folder / str(i), shape, options.rank, dtype, seed=i)
    sources = tuple(AdapterSource(i + 1, f"adapter-{i}", str(folder / str(i))) for i in range(_ADAPTERS))
    weights = {"float32": {"dtype": "float32"}, "bfloat16": {}}.get(options.weights, {"quantization": options.weights})
    return EngineCore(
        EngineConfig(
            model=str(folder / "model"),
            max_model_len=8192,
            compute=ComputeConfig(threads=options.threads, **weights),
            loading=LoadingConfig(format="dummy"),
            cache=CacheConfig(memory=1 << 30, prefix_caching=False),
            scheduling=SchedulerConfig(max_num_seqs=_ADAPTERS, target_step_seconds=0),
            adapters=AdapterConfig(sources=sources, max_loaded=_ADAPTERS, max_rank=max(options.rank, 64)),
        )
    )


def adapters_of(kind: str, streams: int) -> list[int | None]:
    if kind == "none":
        return [None] * streams
    return [1] * streams if kind == "one" else [1 + i % _ADAPTERS for i in range(streams)]


def turn(core: EngineCore, kind: str, options: argparse.Namespace, streams: int) -> tuple[list[float], float]:
    """Seconds of each counted step, and of computing the prompts."""
    rng = random.Random(streams)
    sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    names = []
    for i, adapter in enumerate(adapters_of(kind, streams)):
        prompt = [rng.randrange(4, core.info.vocab_size) for _ in range(options.context)]
        core.add(EngineRequest(f"{kind}-{i}", prompt, sampling, adapter=adapter))
        names.append(f"{kind}-{i}")
    begin, running = time.perf_counter(), set[str]()
    while len(running) < streams:
        running |= {output.request_id for output in core.step() if output.token_ids}
    prompts = time.perf_counter() - begin
    for _ in range(6):
        core.step()
    seconds = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
    for name in names:
        core.abort(name)
    while core.has_work():
        core.step()
    return seconds, prompts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--weights", choices=("float32", "bfloat16", "int8", "int4"), default="int8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="counted in each turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        core = make_engine(Path(folder), options)
        size = core.adapters.loaded.num_bytes / _ADAPTERS / 1e6
        print(
            f"{options.shape}, {options.weights} weights, {options.threads} threads; an adapter of rank {options.rank}",
            end="",
        )
        print(f" in {options.adapter_dtype} has {size:.1f} MB")
        for streams in options.streams:
            steps: dict[str, list[float]] = {kind: [] for kind in ("none", "one", "own")}
            prompts: dict[str, list[float]] = {kind: [] for kind in steps}
            for _ in range(options.turns):
                for kind in steps:
                    seconds, prompt = turn(core, kind, options, streams)
                    steps[kind] += seconds
                    prompts[kind].append(prompt)
            for what, found in (("a step", steps), (f"{streams} prompts of {options.context}", prompts)):
                median = {kind: statistics.median(values) for kind, values in found.items()}
                for kind, value in median.items():
                    added = f"{100 * (value / median['none'] - 1):+6.1f} %" if kind != "none" else ""
                    print(f"{streams} streams, adapters: {kind:5} {what:20} {1e3 * value:9.3f} ms {added}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
