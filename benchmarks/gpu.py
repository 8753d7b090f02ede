"""Every figure that is asked of a GPU, each beside its bound measured in the same run, and which of them are missed.

    python benchmarks/gpu.py [--device cuda] [--shapes 1b,8b,30b-a3b] [--parts agreement,attention,streams,growth,tier,peer]
                             [--out gpu.json] [--plot gpu.png] [--tiny]

From a checkout on a machine with a GPU that nothing else uses. Weights are random and made on the device; the 30B shape takes
61 GB. `--tiny` runs the same on small shapes, on a CPU too: its numbers mean nothing. Ends with 1 where a figure is missed.
Tests on the GPU are not part of it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import machine
from harness.charts import BOUND, COLOURS, new_figure, style
from harness.gpu_agreement import agreement
from harness.gpu_attention import attention_figures
from harness.gpu_figures import Bounds, Figure
from harness.gpu_peer import seconds_of_token
from harness.gpu_streams import Streams, growth, step_figures, stream_figures
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is asked for, as plain data; prints each figure when it is there."""
    device, tiny = torch.device(options.device), options.tiny
    bounds = Bounds.measure(device, torch.float32 if device.type == "cpu" else torch.bfloat16, tiny=tiny)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tiny": tiny,
        "copy_bytes_per_second": bounds.bandwidth,
        "matrix_operations_per_second": bounds.matrix,
        "figures": [],
    }
    print(
        f"{report['device']}: a copy {bounds.bandwidth / 1e9:,.0f} GB/s, a product {bounds.matrix / 1e12:,.2f} TFLOP/s\n"
    )

    def add(figures: list[Figure]) -> None:
        for figure in figures:
            print(figure.line(), flush=True)
            report["figures"].append(figure.as_dict())

    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        if "agreement" in options.parts:
            report["agreement"] = agreement(device, directory, ["llama"] if tiny else None)
            for case in report["agreement"]:
                print(
                    f"| {case['name']}: as on the CPU | {case['nats']:.2g} nats | {case['bound']:g} | {case['verdict']} |"
                )
        print("\n| figure | measured | bound | share | wanted | |\n|---|--:|--:|--:|--:|---|")
        if "attention" in options.parts:
            add(attention_figures(bounds, tiny=tiny))
        for name in options.shapes:
            model = write_config(name, directory, tiny=tiny)
            _of_shape(name, model, bounds, options, report, add)
    return report


def _of_shape(
    name: str, model: Path, bounds: Bounds, options: argparse.Namespace, report: dict[str, Any], add: Any
) -> None:
    tiny = options.tiny
    prompt, far, steps, many = (8, 64, 8, 8) if tiny else (128, 8192, 256, 64)
    contexts = [16, 64, 256] if tiny else [1024 << i for i in range(8)]
    counts = [1, 4] if tiny else [1 << i for i in range(9)]
    longest = (contexts[-1] if "growth" in options.parts and name == options.shapes[0] else far) + steps + 128
    sizes: dict[str, Any] = {"max_model_len": longest, "shift_context": 2 * far if 2 * far < longest else far}
    sizes |= {"max_num_seqs": counts[-1] * 2 if tiny else 256, "max_num_batched_tokens": 64 if tiny else 8192}
    if tiny:
        sizes["kv_cache_memory"] = 8 << 20
    if {"streams", "growth"} & set(options.parts):
        streams = Streams(model, bounds, **sizes)
        if "streams" in options.parts:
            add(stream_figures(name, streams, WANTED.get(name), many=many, prompt=prompt, far=far, steps=steps))
        if "growth" in options.parts and name == options.shapes[0]:
            report["growth"] = growth(streams, contexts, counts, 1024 if not tiny else prompt, steps)
        del streams
        _give_back(bounds.device)
        if "streams" in options.parts:
            # With a step for each token: what is beside the graph shows.
            add(step_figures(name, Streams(model, bounds, **sizes, burst_seconds=0.0), prompt=prompt, steps=steps))
            _give_back(bounds.device)
    if "tier" in options.parts:
        add(tier_figures(name, model, bounds, far=far, tiny=tiny))
        _give_back(bounds.device)
    if "peer" in options.parts:
        try:
            seconds, note = seconds_of_token(model, bounds, prompt, steps), ""
        except (ImportError, RuntimeError, ValueError) as error:
            seconds, note = None, str(error).splitlines()[0]
        add([Figure(f"{name}: transformers, static cache, compiled where it does that: a token", seconds, note=note)])
        _give_back(bounds.device)


def _give_back(device: torch.device) -> None:
    gc.collect()  # engines hold themselves
    if device.type == "cuda":
        torch.cuda.empty_cache()


def missed(report: dict[str, Any]) -> list[str]:
    """The names of what was missed."""
    return [one["name"] for one in [*report.get("agreement", []), *report["figures"]] if one["verdict"] == "missed"]


def draw(report: dict[str, Any], path: Path) -> None:
    """Seconds of a token over contexts and over streams, each with its bound. Needs matplotlib."""
    figure = new_figure(10, 3.6)
    panels = figure.subplots(1, 2)
    for axes, kind in zip(panels, ("context", "streams"), strict=True):
        rows = [row for row in report["growth"] if kind == "streams" or row["streams"] == 1]
        shortest = min(row["context"] for row in rows)
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes: to see that it runs, on a CPU too")
    options = parser.parse_args()
    for given, known in ((options.shapes, SHAPES), (options.parts, PARTS)):
        if wrong := [one for one in given if one not in known]:
            parser.error(f"there is no {', '.join(wrong)}: choose from {', '.join(known)}")
    report = measure(options)
    names = missed(report)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot is not None and "growth" in report:
        draw(report, options.plot)
    print(f"\nmissed: {'; '.join(names) or 'nothing'}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
