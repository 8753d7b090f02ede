"""Engines with a disk or host tier, their prompts, and the kinds of keys that both tiers store."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers.engines import Finished, greedy, make_core, run
from helpers.eventually import eventually

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.rotary.rope_scaling import RopeScaling

RANDOM = random.Random(5)
FULL = 96  # tokens of the full blocks of PROMPT


def tokens(count: int) -> list[int]:
    return [RANDOM.randrange(3, 128) for _ in range(count)]


PROMPT = tokens(103)
YARN, DYNAMIC = (RopeScaling.from_dict({"rope_type": kind, "factor": 4}) for kind in ("yarn", "dynamic"))
REROPE = RopeScaling.from_dict({"rope_type": "rerope", "window": 12, "factor": 3.5})
# Family, engine options ("itself" is the model's directory), request fields.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {}),
    "bfloat16": ("llama", {"kv_cache_dtype": "bfloat16"}, {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}, {}),
    "bfloat16 weights": ("llama", {"dtype": "bfloat16"}, {}),
    "quantized": ("llama", {"quantization": "int8"}, {}),
    "windows": ("gemma3", {}, {}),
    "windows, int8": ("gemma3", {"kv_cache_dtype": "int8"}, {}),
    "layers without rotation": ("smollm3", {}, {}),
    "latent": ("deepseek_v3", {}, {}),
    "latent, int8": ("deepseek_v3", {"kv_cache_dtype": "int8"}, {}),
    "larger blocks": ("llama", {"block_size": 32}, {}),
    "salt": ("llama", {}, {"cache_salt": "one"}),
    "scaling": ("llama", {}, {"rope_scaling": YARN}),
    "far keys": ("llama", {}, {"rope_scaling": REROPE}),
    "window of the request": ("llama", {}, {"context": ContextRule(attention_window=40, attention_sinks=4)}),
    "rotate": ("llama", {"max_model_len": 512}, {"rope_scaling": DYNAMIC, "rope_update": "rotate"}),
    "draft model": ("llama", {"speculative_model": "itself", "speculative_adaptive": False}, {}),
}


def kind_of_keys(kind: str, models: dict[str, Path]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Model directory, engine options and request fields of a row of KINDS."""
    family, options, fields = KINDS[kind]
    model = models[family]
    return model, {name: str(model) if value == "itself" else value for name, value in options.items()}, fields


def ask(core: EngineCore, prompt: list[int] = PROMPT, max_tokens: int = 12, **fields: Any) -> Finished:
    return run(core, [greedy("a", prompt, max_tokens, **fields)], every_logit=core.runner.graphs is None)["a", 0]


def cached(got: Finished) -> int:
    """Number of prompt tokens from the cache."""
    return got.outputs[-1].cached_tokens


def same_bits(one: Finished, other: Finished) -> bool:
    logits = zip(one.logits, other.logits, strict=True)
    return one.token_ids == other.token_ids and all(torch.equal(a, b) for a, b in logits)


def files_in(folder: Path) -> list[Path]:
    """Block files in the folder."""
    return sorted(folder.glob("*/*.safetensors"))


@contextlib.contextmanager
def keeping(model: Path, folder: Path, **options: Any) -> Iterator[EngineCore]:
    """An engine with a disk tier: it has read the names of its files at the start, and written its blocks at the end."""
    core = make_core(model, **{"deterministic": True, "kv_persist": str(folder), **options})
    try:
        assert core._store is not None
        core._store.wait_scanned(30)
        yield core
        written(core)
    finally:
        core.close()


def written(core: EngineCore) -> None:
    """Wait until every block is in a file, or its file cannot be written."""
    eventually(lambda: not core.stats().persist.waiting_blocks or core.stats().persist.failures, 30)
