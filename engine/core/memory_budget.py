"""Memory budget: KV memory left beside weights and the largest step, and its allocation.

On a device with its own memory the largest step runs once, and CUDA graphs are captured, to measure what they need.
"""

from __future__ import annotations

import torch

from windlass.engine.cache.host_tier import staging_bytes
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.cache.kv_cache_budget import (
    DEVICE_SHARE,
    CachePlan,
    bytes_per_token,
    default_kv_budget,
    device_kv_budget,
    gib,
    plan_cache,
)
from windlass.engine.core.adapter_manager import make_empty_adapters
from windlass.engine.errors import LoadError
from windlass.engine.execution.dummy_runs import profile_graph_memory, profile_largest_step
from windlass.engine.execution.proposers import DraftModel
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.loading.device_selection import free_memory, is_out_of_memory
from windlass.engine.model.loading.loader import LoadedModel
from windlass.engine.model.loading.preflight import kv_cache_too_large
from windlass.engine.rotary.rope_scaling import DraftRotaryMapper
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import DeviceMemory


def dtype_name(dtype: torch.dtype) -> str:
    """As options have it."""
    return str(dtype).removeprefix("torch.")


def draft_bytes_per_token(draft: LoadedModel | None) -> int:
    """Of its pages; 0 where there is none."""
    return 0 if draft is None else cache_bytes_per_token(draft)


def cache_bytes_per_token(model: LoadedModel) -> int:
    """Of its pages, of all KV groups."""
    return sum(bytes_per_token(group, dtype_name(model.cache_dtype)) for group in model.decoder.spec.kv_groups)


_MAX_PROPOSED_ROWS = 512  # what every row makes besides takes memory: its logits are half a megabyte


def largest_decode_step(config: EngineConfig, length: int) -> tuple[int, int]:
    """Its rows, those of proposed tokens among them, and the blocks of a sequence of that length: what captured steps have room
    for."""
    scheduling, rows = config.scheduling, config.scheduling.max_num_seqs
    rows = max(rows, min(rows * (1 + scheduling.speculation.max_proposed_tokens), _MAX_PROPOSED_ROWS))
    return min(rows, scheduling.max_num_batched_tokens), -(-length // config.cache.block_size)


def profile_kv_memory(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, memory: DeviceMemory) -> int:
    """Bytes, found by running the largest step once, and capturing decode steps where that is done. Raises LoadError where
    there is no memory for that, or none is left."""
    decoder, scheduling = model.decoder, config.scheduling
    weights, tokens = gib(decoder.weight_bytes()), scheduling.max_num_batched_tokens
    whole, step = [model], 0
    if draft is not None and draft.spec.mtp_input is None:
        whole.append(draft)
    elif draft is not None:  # behind the model's step: one of its layers, and three rows of states for each token
        step = 3 * tokens * draft.spec.hidden_size * draft.decoder.dtype.itemsize
    lower = "`scheduling.max_num_batched_tokens` or `scheduling.max_num_seqs`"
    try:
        step += max(
            profile_largest_step(
                one.decoder,
                memory,
                cache_dtype=one.cache_dtype,
                block_size=config.cache.block_size,
                max_tokens=tokens,
                max_seqs=scheduling.max_num_seqs,
                length=config.max_model_len or model.spec.trained_len,
            )
            for one in whole  # which compute one after the other
        )
        if config.compute.cuda_graphs and model.prepared.shard is None:  # ranks capture nothing
            max_rows, max_blocks = largest_decode_step(config, config.max_model_len or model.spec.trained_len)
            adapters = make_empty_adapters(config.adapters, model) if config.adapters.sources else None
            for one in whole:
                step += profile_graph_memory(
                    one.decoder,
                    memory,
                    cache_dtype=one.cache_dtype,
                    block_size=config.cache.block_size,
                    max_rows=max_rows,
                    max_blocks=max_blocks,
                    adapters=adapters if one is model else None,  # a draft model knows no adapter
                )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"a step of {tokens} tokens needs more memory than {decoder.device} gives beside {weights} of weights, "
            f"{gib(memory.free())} of {gib(memory.total)} are free: lower {lower}"
        ) from None
    finally:
        memory.release_cached()
    step += decoder.backend.workspace_bytes
    if config.cache.persist is not None or config.cache.host_memory is not None:
        token_bytes = cache_bytes_per_token(model) + draft_bytes_per_token(draft)
        states = model.spec.state_bytes + (0 if draft is None else draft.spec.state_bytes)
        step += staging_bytes(
            max(config.cache.block_size * token_bytes, states), saves=config.cache.host_memory is not None
        )
    share = config.cache.device_share or DEVICE_SHARE
    available = device_kv_budget(memory.total, memory.used_by_process(), memory.free(), share, step)
    if available < 1:
        raise LoadError(
            f"no memory is left for the KV cache: {share:.0%} of the {gib(memory.total)} of {decoder.device} may be used, "
            f"{gib(memory.free())} are free, this engine has taken {gib(memory.used_by_process())} and a step needs {gib(step)}: raise "
            f"`cache.device_share`, lower {lower}, or free some of the device"
        )
    return available


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
