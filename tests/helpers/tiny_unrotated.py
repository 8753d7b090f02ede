"""Tiny random models without rotation: learned positions and ALiBi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers import tiny_plain

# Names as tests and docs/models.md have them: the class, and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 96}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 4, "n_head": 4}),
    "bloom_six_heads": ("BloomForCausalLM", {"hidden_size": 96, "n_layer": 4, "n_head": 6}),
    "baichuan_13b": ("BaichuanForCausalLM", {}),  # of `tiny_plain`
}


def make_unrotated(family: str, directory: Path, *, head: str | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model; 1-D parameters are random too. head: the end of another class's name."""
    if family in tiny_plain.UNROTATED:
        return tiny_plain.save(family, directory, seed, **overrides)
    name, settings = FAMILIES[family]
    stem = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    config = getattr(transformers, f"{stem}Config")(vocab_size=128, bos_token_id=1, eos_token_id=2, **settings)
    for key, value in overrides.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = getattr(transformers, name if head is None else stem + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() == 1 else parameter.mul_(4.0)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def logits_of(directory: Path, ids: list[int]) -> torch.Tensor:
    """What transformers, or `tiny_plain`, makes of the whole text, [T, V] float32."""
    if json.loads((directory / "config.json").read_text())["architectures"][0] in tiny_plain.ARCHITECTURES:
        return tiny_plain.PlainModel(directory).logits(ids, torch.zeros(1, dtype=torch.float64))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
