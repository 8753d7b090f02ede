"""A peer on the same device: transformers with a static cache, which it compiles there."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from harness.gpu_figures import Bounds, wait


def seconds_of_token(model: Path, bounds: Bounds, prompt: int, steps: int) -> float:
    """Of one greedy stream with random weights, by the difference of two runs. Raises ImportError without transformers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device(bounds.device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=bounds.dtype).eval()
    ids = torch.randint(10, config.vocab_size, (1, prompt), device=bounds.device)

    def run(tokens: int) -> float:
        wait(bounds.device)
        begin = time.perf_counter()
        made.generate(
            ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, cache_implementation="static",
            attention_mask=torch.ones_like(ids), pad_token_id=0,
        )  # fmt: skip
        wait(bounds.device)
        return time.perf_counter() - begin

    run(4 + steps)  # compiles
    few, many = (min(run(tokens) for _ in range(3)) for tokens in (4, 4 + steps))
    return max(many - few, 1e-9) / steps
