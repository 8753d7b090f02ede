"""The pages of an engine: how many there are, of which models, and the memory for them."""

from __future__ import annotations

import torch

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import CachePlan, plan_cache
from windlass.engine.cache.memory import default_kv_budget, gib
from windlass.engine.cache.storage import KVCache
from windlass.engine.core.description import draft_bytes_per_token, dtype_name
from windlass.engine.core.device_room import profile_kv_memory
from windlass.engine.errors import LoadError
from windlass.engine.execution.draft_pages import DraftModel
from windlass.engine.model.loading.chosen_device import free_memory, is_out_of_memory
from windlass.engine.model.loading.fitting import kv_cache_too_large
from windlass.engine.model.loading.loader import LoadedModel
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.rotary.transfer import DraftRotaryMapper


def make_draft_model(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel, plan: CachePlan, rows: int
) -> DraftModel:
    """Pages and rotary tables of a draft model: as many blocks and rows as the model has."""
    decoder = draft.decoder
    groups, cache = decoder.spec.rotary_groups, allocate_kv_storage(config, model, draft, plan)
    if decoder.backend.device_memory is not None:
        # A cached block may lack its last keys, and memory that was another's may hold what is no number: one such key would
        # spoil all that is proposed behind it. What a CPU's system gives is zeros.
        for plane in (plane for planes in cache.planes for plane in planes):
            plane.zero_()
    return DraftModel(
        decoder,
        cache,
        RotaryTables(rows, [group.base for group in groups], decoder.backend),
        DraftRotaryMapper(model.rotary_groups, groups),
    )


def plan_kv_cache(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, available: int | None = None
) -> CachePlan:
    """Blocks per KV group for the budget: the operator's, else a share of what the weights have left free, or all of a GPU
    that is left to the engine. room: what that is, where others have found it out."""
    spec, memory = model.spec, model.decoder.backend.device_memory
    if config.cache.memory is not None:
        budget = config.cache.memory
    elif memory is not None:
        budget = profile_kv_memory(config, model, draft, memory) if available is None else available
    else:
        budget = default_kv_budget(free_memory(model.decoder.device), config.replicas)
    draft_token_bytes = draft_bytes_per_token(draft)
    return plan_cache(
        config,
        spec.kv_groups,
        spec.trained_len,
        dtype_name(model.cache_dtype),
        budget,
        draft_token_bytes=draft_token_bytes,
        whole_prompts=spec.is_bidirectional,
        states=spec.state_group,
        draft_state_bytes=0 if draft is None else draft.spec.state_bytes,
    )


def allocate_kv_storage(config: EngineConfig, model: LoadedModel, owner: LoadedModel, plan: CachePlan) -> KVCache:
    """The pages of `owner`, the model itself or its draft model. LoadError where the system does not give the memory."""
    decoder, backend = model.decoder, owner.decoder.backend
    try:
        spec, size = owner.decoder.spec, config.cache.block_size
        return KVCache(
            spec.kv_groups,
            plan.num_blocks,
            size,
            owner.cache_dtype,
            backend,
            states=spec.state_group,
            num_states=plan.num_states,
        )
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        there = f"more than {decoder.device} gives beside {gib(decoder.weight_bytes())} of weights"
        raise LoadError(kv_cache_too_large(there, plan.num_bytes, dtype_name(model.cache_dtype))) from None
