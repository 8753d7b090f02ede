"""Whether weights, and cached keys and values, fit into the memory there is, and what to say otherwise. Imports no torch."""

from __future__ import annotations

from typing import Protocol

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import plan_cache
from windlass.engine.cache.memory import default_kv_budget, gib
from windlass.engine.errors import LoadError
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.storage import StoragePlan, plan_bytes, plan_storage


class WeighedModel(Protocol):
    """A model as its files describe it: see `preflight.ModelDescription`."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def is_quantized(self) -> bool: ...


def check_memory(
    config: EngineConfig,
    model: WeighedModel,
    plan: StoragePlan,
    cached: str,
    stored: str,
    device: str,
    free: int | None,
    draft_token_bytes: int = 0,
    draft_state_bytes: int = 0,
) -> None:
    """LoadError where weights, or cached keys and values beside them, plainly do not fit into the memory that is free.

    cached, stored: what keys and values are cached in, and matrices stored in before they are quantized. free: bytes before
    the weights are there, None if nobody knows. beside, draft_state_bytes: bytes of a draft model's per token, and of its states.
    """
    spec = model.spec
    weights = plan_bytes(spec, plan)
    on = "" if device == "cpu" else f" on {device}"
    if free is not None and weights > free:
        smaller = _smaller_options(model, weights, stored, free)
        raise LoadError(f"the weights need {gib(weights)} of memory, {gib(free)} are free{on}: {smaller}")
    left = None if free is None else free - weights
    if config.cache.memory is None and left is None:
        return
    # What a GPU has in all and a step takes of it is known once the weights are there: the engine counts again.
    share = default_kv_budget(left, config.replicas) if left is None or device == "cpu" else left
    budget = config.cache.memory or share
    engines = config.replicas
    most = None if left is None else left // engines
    cache = plan_cache(
        config,
        spec.kv_groups,
        spec.trained_len,
        cached,
        budget,
        most,
        draft_token_bytes,
        whole_prompts=spec.is_bidirectional,
        states=spec.state_group,
        draft_state_bytes=draft_state_bytes,
    )
    if left is not None and cache.num_bytes * engines > left:
        there = f"{gib(free or 0)} are free{on}, {gib(weights)} of it for the weights"
        raise LoadError(kv_cache_too_large(there, cache.num_bytes * engines, cached, engines))


def kv_cache_too_large(there: str, num_bytes: int, cached: str, engines: int = 1) -> str:
    """What to say of the KV caches of so many engines that there is no memory for. there: the memory there is, in words."""
    less = "" if cached == "int8" else ", or use `cache.dtype=int8`"
    lower = f"`cache.memory`, `max_model_len` or `scheduling.max_num_seqs`{less}"
    if engines == 1:
        return f"the KV cache needs {gib(num_bytes)} of memory, {there}: lower {lower}"
    return f"the KV caches of {engines} replicas need {gib(num_bytes)} of memory, {there}: lower `replicas`, {lower}"


def _smaller_options(model: WeighedModel, weights: int, stored: str, free: int) -> str:
    """Options under which the weights fit, each with what they then need."""
    choices: list[tuple[str, int]] = []
    quantized = model.is_quantized
    if stored == "float32" and not quantized:
        choices.append(("`compute.dtype=bfloat16`", plan_bytes(model.spec, plan_storage(model.spec, "bfloat16"))))
    if not quantized:
        choices += [
            (f"`compute.quantization={q}`", plan_bytes(model.spec, plan_storage(model.spec, stored, q)))
            for q in ("int8", "int4")
        ]
    fitting = [f"{option} ({gib(size)})" for option, size in choices if size < min(weights, free)]
    return f"use {', '.join(fitting)} or a smaller model" if fitting else "use a smaller model or free some memory"
