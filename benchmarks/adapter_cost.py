"""What LoRA adapters cost a step: run `python benchmarks/adapter_cost.py` from a checkout, machine quiet.

One engine with random weights of a known shape holds eight adapters that change every projection. Streams decode without
one, all with the same, and each with its own, step by step in turn, so that a machine that slows down does so for all three:
their adapters are exchanged between steps, which makes their text nobody's and costs what it would. A figure is the median,
and what adapters add is the median of the ratios of neighbouring steps. Prompts are measured in the same order.
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
from harness.steps import ONE_BY_ONE, step_seconds
from safetensors.torch import save_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import (
    AdapterConfig,
    CacheConfig,
    ComputeConfig,
    EngineConfig,
    LoadingConfig,
    SchedulerConfig,
)
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.request import EngineRequest, SamplingParams

_ADAPTERS = 8
KINDS = ("none", "one", "own")


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
            scheduling=SchedulerConfig(max_num_seqs=_ADAPTERS, target_step_seconds=0, **ONE_BY_ONE),
            adapters=AdapterConfig(sources=sources, max_loaded=_ADAPTERS, max_rank=max(options.rank, 64)),
        )
    )


def adapters_of(kind: str, streams: int) -> list[int | None]:
    if kind == "none":
        return [None] * streams
    return [1] * streams if kind == "one" else [1 + i % _ADAPTERS for i in range(streams)]


def start(core: EngineCore, adapters: list[int | None], context: int) -> float:
    """Streams with these adapters, all of them decoding; returns the seconds that their prompts took."""
    rng = random.Random(context)
    sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    for i, adapter in enumerate(adapters):
        prompt = [rng.randrange(4, core.info.vocab_size) for _ in range(context)]
        core.add(EngineRequest(f"stream-{i}", prompt, sampling, adapter=adapter))
    begin, running = time.perf_counter(), set[str]()
    while len(running) < len(adapters):
        running |= {output.request_id for output in core.step() if output.token_ids}
    return time.perf_counter() - begin


def end(core: EngineCore, streams: int) -> None:
    for i in range(streams):
        core.abort(f"stream-{i}")
    while core.has_work():
        core.step()


def prompts(core: EngineCore, streams: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of computing the streams' prompts, by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.prompts):
        for kind in KINDS:
            found[kind].append(start(core, adapters_of(kind, streams), options.context))
            end(core, streams)
    return found


def steps(core: EngineCore, streams: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step, by kind."""
    start(core, [None] * streams, 24)
    live = core.runner.input_batch.by_id.values()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in range(6 + options.steps):  # the first ones are recorded
        for kind in KINDS:
            for sequence, adapter in zip(live, adapters_of(kind, streams), strict=True):
                sequence.adapter = adapter
            seconds = step_seconds(core, streams)
            if i >= 6:
                found[kind].append(seconds)
    end(core, streams)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--weights", choices=("float32", "bfloat16", "int8", "int4"), default="int8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    parser.add_argument(
        "--prompts", type=int, default=0, help="times that prompts of --context are measured, of each kind"
    )
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
            measured = {"a step": steps(core, streams, options)}
            if options.prompts:
                measured[f"{streams} prompts of {options.context}"] = prompts(core, streams, options)
            for what, found in measured.items():
                medians = {kind: statistics.median(values) for kind, values in found.items()}
                for kind, median in medians.items():
                    # Neighbours in time are compared with each other.
                    ratios = [own / none for own, none in zip(found[kind], found["none"], strict=True)]
                    added = f"{100 * (statistics.median(ratios) - 1):+6.1f} %" if kind != "none" else ""
                    print(f"{streams} streams, adapters: {kind:5} {what:20} {1e3 * median:9.3f} ms {added}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
