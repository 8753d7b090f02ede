"""Decode and prompt speed of experts and latent attention, from GGUF files of random weights, in Windlass and llama.cpp.

    python benchmarks/experts_and_latent.py [--only moe mla] [--rounds 5]
        [--llama-bench work/peers/llama.cpp-build/bin/llama-bench]

--llama-bench, --llama-name and --llama-options may be repeated for forks and other settings.

Two shapes with about a billion active weights per token, in Q8_0: `moe`, Qwen 3 MoE with 8 of 32 experts, and `mla`, DeepSeek
V2 with 6 of 16 experts and two shared ones. The files are written once, under --work, and both programs read them, in turns.
The bound of one stream is the bytes that a token reads (all weights but the embedding table, of the experts only the chosen
ones) over the read bandwidth before and after each sample. Several streams choose several experts and have no such bound.
Random routers choose evenly; trained ones repeat themselves more, which helps caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from harness.machine import describe
from harness.rates import Rates
from harness.report import spread, three_digits

from windlass.engine.engine_benchmark import run_engine_benchmark
from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
from windlass.engine.model.gguf.gguf_description import describe_gguf

_BLOCK, _BLOCK_BYTES = 32, 34  # of Q8_0
_PLAIN = ("norm", "ffn_gate_inp")  # tensors in float32
_PROMPT, _STEPS, _STREAMS = 512, 64, 8


@dataclass(frozen=True)
class Shape:
    """A model as its GGUF file names it. keys: metadata without the architecture's prefix. layer: shapes of its tensors."""

    architecture: str
    keys: dict[str, Any]
    layer: dict[str, tuple[int, ...]]
    vocab: int
    hidden: int

    @property
    def layers(self) -> int:
        return int(self.keys["block_count"])

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the file and its shape."""
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            found |= {f"blk.{i}.{name}.weight": shape for name, shape in self.layer.items()}
        return found | {"output_norm.weight": (self.hidden,), "output.weight": (self.vocab, self.hidden)}

    def bytes_of(self, name: str, shape: tuple[int, ...]) -> int:
        plain = len(shape) == 1 or any(part in name for part in _PLAIN)
        return prod(shape) * 4 if plain else prod(shape) // _BLOCK * _BLOCK_BYTES

    def active_bytes(self) -> float:
        """Of weights that one decoded token has to read."""
        share = self.keys["expert_used_count"] / self.keys["expert_count"]
        sizes = {
            name: self.bytes_of(name, shape) for name, shape in self.tensors().items() if name != "token_embd.weight"
        }
        return sum(size * (share if "_exps." in name else 1) for name, size in sizes.items())


def _experts(hidden: int, width: int, count: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, width, hidden),
        "ffn_up_exps": (count, width, hidden),
        "ffn_down_exps": (count, hidden, width),
    }


def moe_shape(layers: int = 16, hidden: int = 2048, width: int = 1024, experts: int = 32, vocab: int = 50_304) -> Shape:
    """Qwen 3 MoE; 16 heads of queries and 4 of keys, as wide together as the hidden state."""
    head = hidden // 16
    keys = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": width,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": experts,
        "expert_used_count": 8,
        "expert_feed_forward_length": width,
    }
    layer = {
        **{"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (head,), "attn_k_norm": (head,)},
        **{"attn_q": (hidden, hidden), "attn_k": (4 * head, hidden), "attn_v": (4 * head, hidden)},
        "attn_output": (hidden, hidden),
        **_experts(hidden, width, experts),
    }
    return Shape("qwen3moe", keys, layer, vocab, hidden)


def mla_shape(layers: int = 16, hidden: int = 2048, width: int = 1408, rank: int = 512, vocab: int = 50_304) -> Shape:
    """DeepSeek V2's layers as wide as its Lite model's, with 16 experts. llama.cpp refuses queries without a narrower state in
    between, but for the numbers of layers that it knows."""
    heads, plain, rotated, experts, shared = 16, hidden // 16, hidden // 32, 16, 2
    queries = 3 * hidden // 8  # width of the state that queries are made of
    keys = {
        "block_count": layers,
        "context_length": 8192,
        "embedding_length": hidden,
        "feed_forward_length": 4 * width,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": queries,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + rotated,
        "attention.value_length_mla": plain,
        "rope.freq_base": 1e4,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": 0,
        "expert_count": experts,
        "expert_used_count": 6,
        "expert_feed_forward_length": width,
        "expert_shared_count": shared,
        "expert_weights_scale": 1.0,
    }
    layer = {
        **{"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_a_norm": (queries,), "attn_kv_a_norm": (rank,)},
        **{"attn_q_a": (queries, hidden), "attn_q_b": (heads * (plain + rotated), queries)},
        "attn_kv_a_mqa": (rank + rotated, hidden),
        "attn_k_b": (heads, rank, plain),
        "attn_v_b": (heads, plain, rank),
        "attn_output": (hidden, heads * plain),
        **_experts(hidden, width, experts),
        **{"ffn_gate_shexp": (shared * width, hidden), "ffn_up_shexp": (shared * width, hidden)},
        "ffn_down_shexp": (hidden, shared * width),
    }
    return Shape("deepseek2", keys, layer, vocab, hidden)


SHAPES = {"moe": moe_shape, "mla": mla_shape}


def write_file(shape: Shape, file: Path) -> None:
    """Random weights, a tensor at a time; the file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, value in {**shape.keys, "vocab_size": shape.vocab}.items():
        key = f"{shape.architecture}.{name}"
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for name, size in shape.tensors().items():
        blocks = shape.bytes_of(name, size) < 2 * prod(size)
        stored = (*size[:-1], size[-1] // _BLOCK * _BLOCK_BYTES) if blocks else size
        dtype, kind = (np.uint8, GGMLQuantizationType.Q8_0) if blocks else (np.float32, None)
        writer.add_tensor_info(name, stored, np.dtype(dtype), shape.bytes_of(name, size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, size in shape.tensors().items():
        spread_of = float(size[-1]) ** -0.5
        if shape.bytes_of(name, size) < 2 * prod(size):
            data = rng.integers(0, 256, (prod(size) // _BLOCK, _BLOCK_BYTES), dtype=np.uint8)
            data[:, :2] = np.array([spread_of / 74], np.float16).view(np.uint8)  # bytes have a deviation of 74
            writer.write_tensor_data(data)
        else:
            numbers = rng.standard_normal(size, dtype=np.float32)
            writer.write_tensor_data(1 + 0.1 * numbers if len(size) == 1 else numbers * spread_of)
    writer.close()
    partial.replace(file)


def derive(file: Path, directory: Path) -> Path:
    """What the server makes of a GGUF file before an engine starts."""
    described = describe_gguf([file])
    (directory / "config.json").write_text(json.dumps(described.config))
    (directory / "gguf.json").write_text(json.dumps(described.index))
    return directory


def our_samples(
    directory: Path, streams: int, prompt: int, steps: int, threads: int, cache: int = 1 << 30
) -> tuple[float, float | None]:
    """Tokens of prompts, and decoded tokens, per second."""
    config = EngineConfig(
        model=str(directory),
        compute=ComputeConfig(device="cpu", threads=threads),
        cache=CacheConfig(memory=cache),
        scheduling=SchedulerConfig(max_num_seqs=max(streams, 1)),
        max_model_len=prompt + steps + 16,
    )
    found = run_engine_benchmark(config, batch_size=streams, input_len=prompt, output_len=steps)
    return found["prefill_tokens_per_second"], found["decode_tokens_per_second"]


def their_samples(
    tool: Path, file: Path, prompt: int, steps: int, threads: int, options: Sequence[str] = ()
) -> dict[str, float]:
    """Tokens per second of llama-bench, by what it measured. options: more of its own."""
    asked = {"-m": file, "-t": threads, "-p": prompt, "-n": steps, "-r": 1, "-o": "json"}
    command = [str(tool), *options, *(str(part) for pair in asked.items() for part in pair)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if ended.returncode:
            raise ValueError((ended.stderr.strip().splitlines() or ["it says nothing"])[-1])
        rows = json.loads(ended.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # the others' rows are kept
        print(f"{tool.name} cannot: {error}", flush=True)
        return {}
    return {"prefill" if row["n_prompt"] else "decode 1": float(row["avg_ts"]) for row in rows}


def measure(shape: Shape, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by program and measure, and the bandwidth around each sample of one stream by program."""
    rates = Rates(options.threads)
    samples: dict[str, dict[str, list[float]]] = {}
    bandwidth: dict[str, list[float]] = {}

    def note(program: str, name: str, value: float | None) -> None:
        if value is not None:
            samples.setdefault(program, {}).setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        directory = derive(file, Path(folder))
        for _ in range(options.rounds):
            for streams, prompt in ((1, 32), (_STREAMS, 32), (1, options.prompt)):
                before = rates.now("read_gb_s")
                filled, decoded = our_samples(
                    directory, streams, prompt, options.steps if prompt == 32 else 2, options.threads
                )
                if prompt == 32:
                    note("Windlass Q8_0", f"decode {streams}", decoded)
                else:
                    note("Windlass Q8_0", "prefill", filled)
                if streams == 1 and prompt == 32:
                    bandwidth.setdefault("Windlass Q8_0", []).append((before + rates.now("read_gb_s")) / 2)
            for tool, called, more in peers_of(options):
                before = rates.now("read_gb_s")
                found = their_samples(tool, file, options.prompt, options.steps, options.threads, more.split())
                for name, value in found.items():
                    note(f"{called} Q8_0", name, value)
                if "decode 1" in found:
                    bandwidth.setdefault(f"{called} Q8_0", []).append((before + rates.now("read_gb_s")) / 2)
    return {"active_bytes": shape.active_bytes(), "read_gb_s": bandwidth, "samples": samples}


def peers_of(options: argparse.Namespace) -> list[tuple[Path, str, str]]:
    """Of each peer its tool, what to call it, and options of its own."""
    tools = options.llama_bench or []
    names, more = options.llama_name or ["llama.cpp"], options.llama_options or []
    if len(names) < len(tools):
        raise SystemExit("give --llama-name for each --llama-bench")
    return list(zip(tools, names, [*more, *[""] * len(tools)], strict=False))


def share_of_bound(result: dict[str, Any], program: str) -> float | None:
    """Of what the active bytes allow one stream: the median of each sample over its own bound."""
    taken = result["samples"].get(program, {}).get("decode 1")
    if not taken:
        return None
    pairs = zip(taken, result["read_gb_s"][program], strict=True)
    return statistics.median(rate * result["active_bytes"] / (read * 1e9) for rate, read in pairs)


def table(name: str, result: dict[str, Any]) -> str:
    measures = ("decode 1", f"decode {_STREAMS}", "prefill")
    lines = [f"| {name} | one stream | {_STREAMS} streams | prompt | of its bound |", "|---|---|---|---|---|"]
    for program, samples in result["samples"].items():
        cells = []
        for one in measures:
            found = spread(samples[one]) if one in samples else None
            cells.append(
                "–"
                if found is None
                else f"{three_digits(found['median'])} ({three_digits(found['min'])}–{three_digits(found['max'])})"
            )
        share = share_of_bound(result, program)
        lines.append(f"| {program} | {' | '.join(cells)} | {'–' if share is None else f'{share:.2f}'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=_PROMPT, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=_STEPS, help="decoded tokens of a sample")
    parser.add_argument(
        "--llama-bench", type=Path, action="append", help="llama.cpp's tool; without it Windlass has the only rows"
    )
    parser.add_argument("--llama-options", action="append", help="more of the tool's own, such as '-rtr 1 -fmoe 1'")
    parser.add_argument("--llama-name", action="append", help="what to call it: a fork has another name")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--out", type=Path, default=Path("work/experts_and_latent.json"))
    options = parser.parse_args()
    for tool, *_ in peers_of(options):
        if not os.access(tool, os.X_OK):
            parser.error(f"--llama-bench: no program {tool}")
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe(),
        "threads": options.threads,
        "results": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        shape, file = SHAPES[name](), options.work / "bench-experts" / f"{name}-q8_0.gguf"
        if not file.exists():
            print(f"writing {file}", flush=True)
            write_file(shape, file)
        result = report["results"][name] = measure(shape, file, options)
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(
            f"{shape.active_bytes() / 1e9:.2f} GB of weights are read for a token\n\n{table(name, result)}\n",
            flush=True,
        )
    if not options.llama_bench:
        print("llama.cpp: not measured, give --llama-bench")


if __name__ == "__main__":
    main()
