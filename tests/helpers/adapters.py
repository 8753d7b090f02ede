"""Random adapters in PEFT's format, and models with merged weights as their reference."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + FEED_FORWARD


def save_adapter(
    directory: Path,
    model: Path,
    targets: Sequence[str] = ALL,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    strength: float = 0.1,
    **config: Any,
) -> Path:
    """Write an adapter for the model in `model`. ranks: of module types with a rank of their own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        if kind not in targets or not name.endswith(".weight"):
            continue
        r = (ranks or {}).get(kind, rank)
        rows, columns = weight.shape
        for which, shape in (("A", (r, columns)), ("B", (rows, r))):
            tensor = torch.randn(shape, generator=generator) * strength
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = tensor.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    written |= {"rank_pattern": dict(ranks)} if ranks else {}
    (directory / "adapter_config.json").write_text(json.dumps(written | config))
    return directory


def merged(model: Path, adapter: Path, target: Path) -> Path:
    """Return the model in float32, where each adapted weight W is W + s B A, computed in float64."""
    shutil.copytree(model, target)
    weights = {name: weight.float() for name, weight in load_file(model / "model.safetensors").items()}
    changes = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    changed = 0
    for name in weights:
        module = name.removesuffix(".weight")
        down = changes.get(f"base_model.model.{module}.lora_A.weight")
        if down is None:
            continue
        up = changes[f"base_model.model.{module}.lora_B.weight"]
        kind, rank = module.rpartition(".")[2], down.shape[0]
        alpha = config.get("alpha_pattern", {}).get(kind, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weights[name] = (weights[name].double() + scale * (up.double() @ down.double())).float()
        changed += 1
    assert 2 * changed == len(changes)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target
