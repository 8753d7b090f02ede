"""gpt-oss checkpoints with MXFP4 experts, written from the description of the format,
one number at a time, independent of the reader."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32


def _nearest(value: float) -> int:
    """Return the 4 bits of a number in units of its block, with the sign first."""
    code = min(range(8), key=lambda i: abs(FLOATS[i] - abs(value)))
    return code | (8 if value < 0 else 0)


def as_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows [..., columns] as blocks uint8 [..., columns / 32, 16] and exponents uint8 [..., columns / 32]."""
    groups = weight.double().numpy().reshape(-1, BLOCK)
    blocks, scales = np.zeros((len(groups), 16), np.uint8), np.zeros(len(groups), np.uint8)
    for i, group in enumerate(groups):
        most = float(np.abs(group).max())
        exponent = 127 + (math.floor(math.log2(most)) - 2 if most else -127)
        codes = [_nearest(float(x) * 2.0 ** (127 - exponent)) if most else 0 for x in group]
        scales[i] = exponent
        blocks[i] = [codes[2 * j] | (codes[2 * j + 1] << 4) for j in range(16)]
    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    return torch.from_numpy(blocks).view(*shape, 16), torch.from_numpy(scales).view(shape)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks and exponents, float32 [..., columns]."""
    signed = torch.tensor([*FLOATS, *(-x for x in FLOATS)], dtype=torch.float64)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., groups, 32]
    found = signed[pairs.long()] * 2.0 ** (scales.double() - 127)[..., None]
    return found.flatten(-2).float()


def publish(source: Path, folder: Path) -> tuple[Path, Path]:
    """Save the model `source` with MXFP4 experts, and a model of the same plain numbers."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = plain[name] = tensor
            continue
        blocks, scales = as_blocks(tensor.transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = numbers(blocks, scales).transpose(1, 2)
    for made_of, directory in ((stored, folder / "published"), (plain, folder / "plain")):
        shutil.copytree(source, directory)
        save_file({n: t.contiguous() for n, t in made_of.items()}, directory / "model.safetensors", {"format": "pt"})
    path = folder / "published" / "config.json"
    told = {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "experts_per_token": 2,
        "initial_context_length": 4096,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return folder / "published", folder / "plain"
