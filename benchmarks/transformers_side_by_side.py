"""Windlass beside transformers `generate` on one random Llama of 1B shape, interleaved in one run.

Both read the same weights. Every figure is a median over rounds, A B A B, with minimum and maximum; the machine's read
bandwidth and matrix rate are measured in the same run, so each figure stands beside its bound.

    python benchmarks/transformers_side_by_side.py [--dtypes float32 bfloat16] [--rounds 3] [--layers 16] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from harness.rates import readable

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.scheduling.chunked_prefill import StepLimiter
from windlass.server.config.option_names import from_flat

SHAPE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
PREFILL, PROMPT, TOKENS, STREAMS = 512, 32, 12, 8


def make_checkpoint(directory: Path, layers: int) -> None:
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def random_prompt(length: int) -> list[int]:
    return torch.randint(10, SHAPE["vocab_size"], (length,)).tolist()


class Windlass:
    def __init__(self, directory: Path, dtype: str) -> None:
        self.core = EngineCore(from_flat(str(directory), {"dtype": dtype, "device": "cpu", "kv_cache_memory": 1 << 30}))
        self.count = 0

    def prefill_unbounded(self) -> float:
        """Prefill as with --target-step-ms 0: the whole prompt in one step."""
        bounded, self.core.scheduler.step_limiter = self.core.scheduler.step_limiter, StepLimiter(0.0, PREFILL)
        try:
            return self.prefill()
        finally:
            self.core.scheduler.step_limiter = bounded

    def prefill(self) -> float:
        start = time.perf_counter()
        self._add(random_prompt(PREFILL), 1)
        while self.core.has_work():
            self.core.step()
        return PREFILL / (time.perf_counter() - start)

    def decode(self, streams: int) -> float:
        """Tokens per second over all streams, once every stream decodes."""
        waiting = {self._add(random_prompt(PROMPT), 4096 - PROMPT) for _ in range(streams)}
        ids = list(waiting)
        while waiting:
            waiting -= {o.request_id for o in self.core.step() if o.token_ids}
        tokens, start = 0, time.perf_counter()
        while tokens < streams * TOKENS:  # a step may give a stream several
            tokens += sum(len(output.token_ids) for output in self.core.step())
        seconds = time.perf_counter() - start
        for request_id in ids:
            self.core.abort(request_id)
        return tokens / seconds

    def greedy(self, prompt: list[int]) -> list[int]:
        self._add(prompt, TOKENS)
        tokens: list[int] = []
        while self.core.has_work():
            for output in self.core.step():
                tokens += output.token_ids
        return tokens

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self.count += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(EngineRequest(str(self.count), prompt, sampling))
        return str(self.count)


class Transformers:
    def __init__(self, directory: Path, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def prefill(self) -> float:
        return PREFILL / self._generate(torch.tensor([random_prompt(PREFILL)]), 1)[1]

    def decode(self, streams: int) -> float:
        prompts = torch.tensor([random_prompt(PROMPT) for _ in range(streams)])
        first = self._generate(prompts, 1)[1]
        return streams * TOKENS / (self._generate(prompts, TOKENS + 1)[1] - first)

    def greedy(self, prompt: list[int]) -> list[int]:
        return self._generate(torch.tensor([prompt]), TOKENS)[0][0, len(prompt) :].tolist()

    def _generate(self, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out, time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes per second of summing a tensor far larger than any cache."""
    data = readable(1 << 30)
    return data.nbytes / min(_timed(data.sum) for _ in range(4))


def matrix_rate() -> float:
    """float32 operations per second of a large matrix product."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / min(_timed(lambda: a @ b) for _ in range(4))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(directory: Path, dtype: str, rounds: int) -> dict[str, Any]:
    ours, theirs = Windlass(directory, dtype), Transformers(directory, dtype)
    prompt = random_prompt(PROMPT)
    agree = ours.greedy(prompt) == theirs.greedy(prompt)  # also the warm-up of both
    work: dict[str, Callable[[], float]] = {
        "windlass decode, 1 stream": lambda: ours.decode(1),
        "transformers decode, 1 stream": lambda: theirs.decode(1),
        f"windlass decode, {STREAMS} streams": lambda: ours.decode(STREAMS),
        f"transformers decode, {STREAMS} streams": lambda: theirs.decode(STREAMS),
        f"windlass prefill {PREFILL}": ours.prefill,
        f"windlass prefill {PREFILL}, one step": ours.prefill_unbounded,
        f"transformers prefill {PREFILL}": theirs.prefill,
    }
    samples: dict[str, list[float]] = {name: [] for name in work}
    for index in range(rounds):
        for name, run in work.items():
            samples[name].append(run())
            print(f"  round {index + 1}/{rounds}  {name}: {samples[name][-1]:.2f} tokens/s", flush=True)
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "greedy_tokens_agree": agree,
        "weight_bytes": ours.core.info.weight_bytes,
        "num_parameters": ours.core.info.num_parameters,
        "tokens_per_second": {n: {"median": median[n], "min": min(v), "max": max(v)} for n, v in samples.items()},
        "ratios": {
            "decode, 1 stream, over transformers": median["windlass decode, 1 stream"]
            / median["transformers decode, 1 stream"],
            f"decode, {STREAMS} streams over 1 stream": median[f"windlass decode, {STREAMS} streams"]
            / median["windlass decode, 1 stream"],
            f"prefill {PREFILL} in one step, over transformers": median[f"windlass prefill {PREFILL}, one step"]
            / median[f"transformers prefill {PREFILL}"],
            f"prefill {PREFILL}, over transformers": median[f"windlass prefill {PREFILL}"]
            / median[f"transformers prefill {PREFILL}"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": next(
            (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
            platform.processor(),
        ),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "layers": args.layers,
        "read_bandwidth_gb_s": read_bandwidth() / 1e9,
        "fp32_matrix_gflop_s": matrix_rate() / 1e9,
    }
    print(json.dumps(report, indent=2), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.layers)
        for dtype in args.dtypes:
            print(dtype, flush=True)
            report[dtype] = compare(Path(folder), dtype, args.rounds)
    report["load_after"] = os.getloadavg()[0]
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
