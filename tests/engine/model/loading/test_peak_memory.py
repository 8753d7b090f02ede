"""Peak memory of loading: little more than the weights, for all forms of checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device import ON_A_CPU
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), ON_A_CPU]

HIDDEN, WIDE, VOCABULARY, LAYERS = 1024, 4096, 2048, 12
SHAPES = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
SHAPES |= {"mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}
LARGEST = 4 * WIDE * HIDDEN  # bytes, in float32
FIXED = 72 << 20  # constant part: buffers of reading and decoding, code on its first use
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"all": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}}},
}

LOAD = """
import json, sys
from pathlib import Path
import torch
import windlass.engine.core.engine_core
from windlass import kernels
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.weight_storage import plan_bytes
from windlass.server.config.option_names import from_flat
def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024
config = from_flat(sys.argv[1], {"device": "cpu", **json.loads(sys.argv[2])})
narrow = kernels.reads_16bit_weights(torch.device("cpu"))
prepared = prepare_model(config, DeviceCapabilities("cpu", narrow))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
model = load_model(config)
print(json.dumps([plan_bytes(prepared.model.spec, prepared.plan), memory("VmRSS") - before, memory("VmHWM") - before]))
"""


def parts(kind: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the stored tensors of one matrix, by the end of their names."""
    if kind == "fp8":
        codes = torch.randint(0, 120, (rows, columns), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": torch.full((rows // 128, columns // 128), 1e-3)}
    if kind == "packed":
        words = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), generator=generator).to(torch.int32)
        scales = torch.full((rows, columns // 128), 2e-3, dtype=torch.bfloat16)
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    return {"weight": torch.randn(rows, columns, generator=generator).to(getattr(torch, kind))}


def write(directory: Path, kind: str) -> Path:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, kind, torch.bfloat16)
    tensors = {
        name: torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            for end, tensor in parts(kind, *shape, generator).items():
                tensors[f"model.layers.{layer}.{name}.{end}"] = tensor
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
    save_file(tensors, directory / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if kind in ("fp8", "packed"):
        config["quantization_config"] = {"fp8": BLOCK, "packed": PACKED}[kind]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "fp8", "packed"])
def test_peak_is_little_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    model = write(tmp_path, kind)
    for options in ({}, {"quantization": "int8"}, {"dtype": "float32"}) if kind == "bfloat16" else ({},):
        made = subprocess.run(
            [sys.executable, "-c", LOAD, str(model), json.dumps(options)],
            capture_output=True,
            text=True,
            check=True,
            # Freed memory is returned immediately, so that only held memory counts.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        )
        planned, grown, peak = json.loads(made.stdout.splitlines()[-1])
        assert planned > 40e6 and 0.95 * planned < grown < 1.15 * planned + FIXED, (options, planned, grown)
        assert peak <= 1.15 * planned + LARGEST + FIXED, (options, planned, peak)
