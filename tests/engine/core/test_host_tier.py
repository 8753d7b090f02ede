"""Blocks of a device that come back from the host's memory, and from files: the bits of a run that never lost them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import Finished, greedy, make_core, run
from helpers.eventually import eventually
from helpers.persisting import keeping, written
from helpers.played_copies import PlayedCopies
from helpers.played_engines import graphed, played_device
from helpers.tiny_models import make_model

from windlass.engine.api.context import ContextRule, PassageReuse
from windlass.engine.api.request import PersistStats
from windlass.engine.cache.persist import device_pages
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.rotary.scaling import RopeScaling

__all__ = ["played_device"]
_NUMBERS = random.Random(5)
_BLOCKS = 20  # of each KV group on the device


def tokens(count: int) -> list[int]:
    return [_NUMBERS.randrange(3, 128) for _ in range(count)]


PROMPT = tokens(103)
FULL = 96  # tokens of its whole blocks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "gemma3", "smollm3", "deepseek_v3")
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in names}


def block_bytes(model: Path, **options: Any) -> int:
    """Of all KV groups."""
    core = make_core(model, **options)
    return core.info.kv_bytes_per_token * core.info.block_size


def small(model: Path, blocks: int = _BLOCKS, host: int = 200, **options: Any) -> dict[str, Any]:
    """Options of an engine with so many blocks on the device and so many in the host's memory."""
    size = block_bytes(model, **options)
    sizes: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 2, "deterministic": True}
    return {**sizes, "kv_cache_memory": blocks * size, "kv_host_memory": host * size, **options}


def ask(core: EngineCore, prompt: list[int] = PROMPT, max_tokens: int = 12, **fields: Any) -> Finished:
    return run(core, [greedy("a", prompt, max_tokens, **fields)], every_logit=False)["a", 0]


def cached(got: Finished) -> int:
    return got.outputs[-1].cached_tokens


def same(one: Finished, other: Finished) -> bool:
    return one.token_ids == other.token_ids and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )


def push_out(core: EngineCore, times: int = 4) -> None:
    """Have the cache of the device filled with other texts."""
    for _ in range(times):
        ask(core, tokens(150), 4)


def stats(core: EngineCore) -> PersistStats:
    return core.stats().persist


@pytest.fixture
def ended() -> Iterator[list[EngineCore]]:
    """Engines that are closed behind a test."""
    cores: list[EngineCore] = []
    yield cores
    for core in cores:
        core.close()


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {}),
    "bfloat16": ("llama", {"kv_cache_dtype": "bfloat16"}, {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}, {}),
    "windows": ("gemma3", {}, {}),
    "windows, int8": ("gemma3", {"kv_cache_dtype": "int8"}, {}),
    "layers without rotation": ("smollm3", {}, {}),
    "latent": ("deepseek_v3", {}, {}),
    "latent, int8": ("deepseek_v3", {"kv_cache_dtype": "int8"}, {}),
    "larger blocks": ("llama", {"block_size": 32}, {}),
    "salt": ("llama", {}, {"cache_salt": "one"}),
    "scaling": ("llama", {}, {"rope_scaling": RopeScaling.from_dict({"rope_type": "yarn", "factor": 4})}),
    "window of the request": ("llama", {}, {"context": ContextRule(attention_window=40, attention_sinks=4)}),
    "drafting": ("llama", {"speculative_model": "itself", "speculative_adaptive": False}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_from_the_host_and_from_files(
    kind: str, models: dict[str, Path], tmp_path: Path, ended: list[EngineCore]
) -> None:
    family, options, fields = KINDS[kind]
    model = models[family]
    options = {name: str(model) if value == "itself" else value for name, value in options.items()}
    right = ask(make_core(model, deterministic=True, **options), **fields)
    given = small(model, 60 if family == "gemma3" else _BLOCKS, **options)
    with keeping(model, tmp_path, **given) as core:
        first = ask(core, **fields)
        push_out(core, 8)
        before = stats(core)
        again = ask(core, **fields)
        after = stats(core)
        assert cached(first) == 0 and cached(again) == FULL
        assert after.host_read_blocks > before.host_read_blocks and after.read_blocks == 0
        assert after.host_lost_blocks == 0 and after.host_blocks <= after.host_saved_blocks
    with keeping(model, tmp_path, **{**given, "kv_host_memory": None}) as core:
        restarted = ask(core, **fields)
        assert cached(restarted) == FULL and stats(core).read_blocks > 0
    for got in (first, again, restarted):
        assert got.token_ids == right.token_ids
        assert kind == "drafting" or same(got, right)
