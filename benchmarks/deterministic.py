"""The price of `--deterministic`: whole engine steps with the mode on and off, in turn, on random weights.

    python benchmarks/deterministic.py [--threads 2] [--repeats 12] [--steps 60] [--json OUT]

One engine serves both: only the decoder's switch differs between neighbouring steps. Prefill: a prompt of 512 tokens (and one
of 64) in one step. Decode: steps of 1 and of 8 sequences at contexts from 512 tokens on. Medians (minimum to maximum).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.steps import ONE_BY_ONE, step_seconds
from rotary_kernels import summary, take_turns

from windlass import kernels
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, LoadingConfig, SchedulerConfig
from windlass.engine.interface.request import EngineRequest, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def engine(folder: Path, weights: str) -> EngineCore:
    (folder / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": weights}))
    config = EngineConfig(
        model=str(folder),
        compute=ComputeConfig(device="cpu"),
        loading=LoadingConfig(format="dummy"),
        cache=CacheConfig(memory=512 << 20, prefix_caching=False),
        scheduling=SchedulerConfig(max_num_seqs=8, target_step_seconds=0.0, **ONE_BY_ONE),
    )
    return EngineCore(config)


def ask(core: EngineCore, name: str, length: int, max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    core.add(EngineRequest(name, [3 + (31 * j) % 9000 for j in range(length)], sampling))


def both(core: EngineCore, step: Callable[[], object], repeats: int, what: str) -> dict[str, Any]:
    """Time `step` with the mode on and off, in turn, and print it."""

    def under(deterministic: bool) -> Callable[[], object]:
        def call() -> None:
            core.runner.decoder.deterministic = deterministic
            step()

        return call

    seconds = take_turns({"off": under(False), "on": under(True)}, repeats)
    result: dict[str, Any] = {name: summary(values) for name, values in seconds.items()}
    result["on_over_off"] = result["on"]["median_us"] / result["off"]["median_us"]
    figures = "  ".join(
        f"{name} {entry['median_us'] / 1e3:8.1f} ms ({entry['min_us'] / 1e3:.1f} to {entry['max_us'] / 1e3:.1f})"
        for name, entry in ((name, result[name]) for name in seconds)
    )
    print(f"{what:40} {figures}  x {result['on_over_off']:.2f}", flush=True)
    return result


def measure(core: EngineCore, repeats: int, steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for length in (512, 64):

        def prefill(length: int = length) -> None:
            ask(core, "prompt", length, 1)
            core.step()
            if core.has_work():
                raise RuntimeError("the prompt took more than one step")

        results[f"prefill {length}"] = both(core, prefill, repeats, f"prefill of {length} tokens in one step")
    for count in (1, 8):
        for i in range(count):
            ask(core, str(i), 512, 2 * steps + 40)
        for _ in range(8):  # all prompts are through, in any order
            core.step()
        results[f"decode {count}"] = both(
            core, partial(step_seconds, core, count), steps, f"decode step of {count} at 512 tokens on"
        )
        for i in range(count):
            core.abort(str(i))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=12, help="prefills of each kind")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each kind")
    parser.add_argument("--weights", default="bfloat16,float32", help="storage of the matrices; products are float32")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{kernels.bind('cpu').explain()}, {options.threads} threads, torch {torch.__version__}")
    results: dict[str, Any] = {}
    for weights in options.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            core = engine(Path(folder), weights)
        print(f"{core.info.num_parameters / 1e6:.0f} M random parameters stored as {core.info.weight_dtype}")
        results[weights] = measure(core, options.repeats, options.steps)
        del core
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
