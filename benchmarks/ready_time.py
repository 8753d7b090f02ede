"""Time from command to ready, and peak memory, of a 1B Llama shape with random bfloat16 weights.

    python benchmarks/ready_time.py [--folder work/llama-1b] [--repeats 5] [-- further options of `windlass serve`]

The checkpoint (2.1 GB) is written once. Every run starts `windlass serve` as a person would, asks /health until it says
ready, and reads the engine's peak memory (VmHWM). The bound on memory is weights + KV budget + 400 MB; the files are
mapped, and what the page cache holds of them is counted against the process only while it has it mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
_KV_BYTES = 256 << 20
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    """Random weights of the 1B shape, beside the bundled model's tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        bound = (3 / columns) ** 0.5
        return torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)

    hidden, inner, vocab = 2048, 8192, 32_000
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(16):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{layer}self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}self_attn.k_proj.weight": matrix(512, hidden),
            f"{layer}self_attn.v_proj.weight": matrix(512, hidden),
            f"{layer}self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors.part")
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((_DEMO / name).read_bytes())


def run_once(folder: Path, extra: list[str]) -> tuple[float, int, int]:
    """Seconds to ready, and peak bytes of the engine and of the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--port={port}", f"--kv-cache-memory={_KV_BYTES}", *extra]
    begin = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "windlass.server.cli.main", "serve", str(folder), *options], stderr=subprocess.DEVNULL
    )
    try:
        while not _ready(port):
            if server.poll() is not None or time.monotonic() - begin > 300:
                raise SystemExit("the server did not become ready")
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        engine = max(
            _peak(child) for child in _children(server.pid)
        )  # beside it: the text processes' server, far smaller
        return seconds, engine, _peak(server.pid)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("work/llama-1b"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("extra", nargs="*", help="options for `windlass serve`, after --")
    options = parser.parse_args(argv)
    if not (options.folder / "model.safetensors").exists():
        write_checkpoint(options.folder)
    weights = (options.folder / "model.safetensors").stat().st_size
    runs = [run_once(options.folder, options.extra) for _ in range(options.repeats)]
    seconds = [run[0] for run in runs]
    peak = max(run[1] for run in runs)
    bound = weights + _KV_BYTES + (400 << 20)
    print(
        f"ready after {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"engine's peak {peak / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB; server's {max(r[2] for r in runs) / 1e6:.0f} MB"
    )
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "peak_bytes": peak, "bound_bytes": bound}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
