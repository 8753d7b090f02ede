"""Copies of tiny models with other weights or another config.json, and logits of an engine for a fixed prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from helpers.engines import greedy, make_core, run
from safetensors.torch import save_file
from torch import Tensor

from windlass.engine.interface.model_info import AdapterSource

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def rewritten(source: Path, target: Path, weights: dict[str, Tensor]) -> Path:
    """Copy a model with other weights. An earlier copy in `target` is replaced."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    save_file({name: one.contiguous() for name, one in weights.items()}, target / "model.safetensors")
    return target


def reconfigured(source: Path, target: Path, **keys: Any) -> Path:
    """Copy a model with other keys in config.json; None omits one."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | keys
    kept = {key: one for key, one in config.items() if one is not None or key not in keys}
    (target / "config.json").write_text(json.dumps(kept))
    return target


def with_other_theta(source: Path, target: Path) -> Path:
    """Copy a model with other values of rope_theta."""

    def skewed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: one * 1.3 if key == "rope_theta" else skewed(one) for key, one in value.items()}

    rope = json.loads((source / "config.json").read_text()).get("rope_parameters") or {"rope_theta": 10_000.0}
    return reconfigured(source, target, rope_parameters=skewed(rope))


def logits(directory: Path, adapter: Path | None = None, **options: Any) -> Tensor:
    """Return the logits of five tokens after `PROMPT`, [5, V]."""
    lora = () if adapter is None else (AdapterSource(1, "tuned", str(adapter)),)
    request = greedy("a", PROMPT, 5, adapter=None if adapter is None else 1)
    return torch.stack(run(make_core(directory, lora=lora, **options), [request])["a", 0].logits)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest wanted number."""
    return float((found - wanted).abs().max() / wanted.abs().max())
