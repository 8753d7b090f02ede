"""Tiny models with replaced weights, and logits of an engine for a fixed prompt."""

from __future__ import annotations

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
    """Copy a model with other weights."""
    shutil.copytree(source, target)
    save_file({name: one.contiguous() for name, one in weights.items()}, target / "model.safetensors")
    return target


def logits(directory: Path, adapter: Path | None = None, **options: Any) -> Tensor:
    """Return the logits of five tokens after `PROMPT`, [5, V]."""
    lora = () if adapter is None else (AdapterSource(1, "tuned", str(adapter)),)
    request = greedy("a", PROMPT, 5, adapter=None if adapter is None else 1)
    return torch.stack(run(make_core(directory, lora=lora, **options), [request])["a", 0].logits)
