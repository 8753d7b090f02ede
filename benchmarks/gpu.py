"""Figures of a GPU with their bounds, measured in one run, and the list of those that miss their goals.

    python benchmarks/gpu.py [--device cuda] [--shapes 1b,8b,30b-a3b] [--parts agreement,attention,streams,growth,tier,peer]
                             [--cases dynamic,shift] [--out gpu.json] [--plot gpu.png] [--tiny]

Run it on a machine whose GPU is idle. Weights are random and created on the device; the 30B shape needs 61 GB. `--tiny` uses
small shapes, also on a CPU, whose numbers mean nothing. `--cases` selects cases of the part agreement by a fragment of their
names.

A failed measurement is recorded, and the others continue. --out is saved after every figure. The exit code is 1 if a figure
misses its goal, otherwise 3 if a measurement failed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import machine
from harness.charts import BOUND, COLOURS, new_figure, style
from harness.gpu_agreement import agreement, chosen
from harness.gpu_attention import attention_figures
from harness.gpu_figures import Bounds, Figure, Growing
from harness.gpu_streams import Streams, growth, seconds_of_token, step_figures, stream_figures
from harness.gpu_tier import tier_figures

PARTS = ("agreement", "attention", "streams", "growth", "tier", "peer")
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131_200,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    | {"intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True},
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    | {"intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False},
    "30b-a3b": _LLAMA
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151_936}
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    | {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SMALL |= {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
WANTED = {"1b": 0.5, "8b": 0.75}  # of what the bytes of a decode step of one stream allow


def write_config(name: str, directory: Path, *, tiny: bool) -> Path:
    """A directory with config.json alone. tiny: of the same kind and small."""
    config = SHAPES[name]
    if tiny:
        config = config | {key: value for key, value in _SMALL.items() if key in config}
    found = directory / name
    found.mkdir(parents=True, exist_ok=True)
    (found / "config.json").write_text(json.dumps(config))
    return found


def measure(options: argparse.Namespace) -> Growing:
    """Measure the requested parts. Failures are recorded, and the other parts continue."""
    device, tiny = torch.device(options.device), options.tiny
    if device.index is not None:
        torch.cuda.set_device(device)  # work is captured on the current device
    bounds = Bounds.measure(device, torch.float32 if device.type == "cpu" else torch.bfloat16, tiny=tiny)
    head: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tiny": tiny,
        "copy_bytes_per_second": bounds.bandwidth,
        "matrix_operations_per_second": bounds.matrix,
    }
    report = Growing(head, options.out)
    print(
        f"{head['device']}: a copy {bounds.bandwidth / 1e9:,.0f} GB/s, a product {bounds.matrix / 1e12:,.2f} TFLOP/s\n"
    )
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        if "agreement" in options.parts:
            with report.guarded("agreement"):
                for case in agreement(device, directory, options.cases):
                    report.agreed(case)
        print("\n| figure | measured | bound | share | wanted | |\n|---|--:|--:|--:|--:|---|")
        if "attention" in options.parts:
            with report.guarded("attention"):
                report.add(attention_figures(bounds, tiny=tiny))
        for name in options.shapes:
            _of_shape(name, write_config(name, directory, tiny=tiny), bounds, options, report)
    return report


def _of_shape(name: str, model: Path, bounds: Bounds, options: argparse.Namespace, report: Growing) -> None:
    tiny = options.tiny
    prompt, far, steps, many = (8, 64, 8, 8) if tiny else (128, 8192, 256, 64)
    contexts = [16, 64, 256] if tiny else [1024 << i for i in range(8)]
    counts = [1, 4] if tiny else [1 << i for i in range(9)]
    grows = "growth" in options.parts and name == options.shapes[0]
    longest = (contexts[-1] if grows else far) + steps + 128
    sizes: dict[str, Any] = {"max_model_len": longest, "shift_context": 2 * far if 2 * far < longest else far}
    sizes |= {"max_num_seqs": counts[-1] * 2 if tiny else 256, "max_num_batched_tokens": 64 if tiny else 8192}
    if tiny:
        sizes["kv_cache_memory"] = 8 << 20

    def streams() -> None:
        engine = Streams(model, bounds, **sizes)
        if "streams" in options.parts:
            with report.guarded(f"{name}: streams"):
                figures = stream_figures(name, engine, WANTED.get(name), many=many, prompt=prompt, far=far, steps=steps)
                report.add(figures)
        if grows:
            cases = [(1, length) for length in contexts]
            for count, length in cases + [(count, prompt if tiny else 1024) for count in counts]:
                with report.guarded(f"{name}: growth, {count} stream(s) behind {length:,} tokens"):
                    report.grew(growth(engine, count, length, steps))

    def steps_alone() -> None:
        """Figures with one step per token, which show the time outside the graph."""
        report.add(step_figures(name, Streams(model, bounds, **sizes, burst_seconds=0.0), prompt=prompt, steps=steps))

    def peer() -> None:
        seconds = seconds_of_token(model, bounds, prompt, steps)
        report.add([Figure(f"{name}: transformers, static cache, compiled where it does that: a token", seconds)])

    works: dict[str, Callable[[], None]] = {}
    if grows or "streams" in options.parts:
        works["streams and growth"] = streams
    if "streams" in options.parts:
        works["steps"] = steps_alone
    if "tier" in options.parts:
        works["tier"] = lambda: report.add(tier_figures(name, model, bounds, far=far, tiny=tiny))
    if "peer" in options.parts:
        works["peer, transformers"] = peer
    for part, work in works.items():
        with report.guarded(f"{name}: {part}"):
            work()
        _give_back(bounds.device)


def _give_back(device: torch.device) -> None:
    gc.collect()  # engines hold themselves
    if device.type == "cuda":
        torch.cuda.empty_cache()


def draw(report: dict[str, Any], path: Path) -> None:
    """Seconds of a token over contexts and over streams, each with its bound. Needs matplotlib."""
    figure = new_figure(10, 3.6)
    panels = figure.subplots(1, 2)
    for axes, kind in zip(panels, ("context", "streams"), strict=True):
        rows = [row for row in report["growth"] if kind == "streams" or row["streams"] == 1]
        shortest = min((row["context"] for row in rows), default=0)
        rows = [row for row in rows if kind == "context" or row["context"] == shortest]
        rows.sort(key=lambda row: row[kind])
        x = [row[kind] for row in rows]
        axes.plot(x, [1e3 * row["seconds"] for row in rows], marker=".", color=COLOURS["Windlass"], label="measured")
        axes.plot(x, [1e3 * row["bound"] for row in rows], linestyle="--", color=BOUND, label="bound")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context" if kind == "context" else "streams", fontsize=8)
        axes.set_ylabel("ms a token", fontsize=8)
        axes.legend(frameon=False, fontsize=8)
        style(axes)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=lambda x: x.split(","), default=list(SHAPES))
    parser.add_argument("--parts", type=lambda x: x.split(","), default=list(PARTS))
    parser.add_argument(
        "--cases", type=lambda x: x.split(","), default=[], help="words of names: only these of the part agreement"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes: to see that it runs, on a CPU too")
    options = parser.parse_args()
    for given, known in ((options.shapes, SHAPES), (options.parts, PARTS)):
        if wrong := [one for one in given if one not in known]:
            parser.error(f"no shape {', '.join(wrong)}: choose from {', '.join(known)}")
    if not chosen(options.cases):
        parser.error(f"no case of the part agreement has {' or '.join(options.cases)} in its name")
    report = measure(options)
    if options.plot is not None and report.data.get("growth"):
        draw(report.data, options.plot)
    names = report.missed()
    if report.failed:
        print(f"\nnot measured: {'; '.join(report.failed)}")
    print(f"\nmissed: {'; '.join(names) or 'nothing'}")
    return 1 if names else 3 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
