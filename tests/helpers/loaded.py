"""transformers models of folders that several tests ask for."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers


def loaded(directory: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """The causal model of a folder, to be changed at will: a copy, which takes a fifth of the time that loading it does."""
    files = sorted((file.name, file.stat().st_mtime_ns) for file in directory.iterdir())
    return copy.deepcopy(_load(directory, attention, dtype, tuple(files)))


@functools.lru_cache(maxsize=4)
def _load(directory: Path, attention: str, dtype: torch.dtype, files: tuple[tuple[str, int], ...]) -> Any:
    """files: with when they were written, since tests change them."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention
    ).eval()
