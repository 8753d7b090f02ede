"""Memory budget: KV memory that weights and the largest step leave, and its allocation.

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
)
from windlass.engine.core.adapter_manager import make_empty_adapters
from windlass.engine.errors import LoadError
from windlass.engine.execution.dummy_runs import profile_graph_memory, profile_largest_step
from windlass.engine.execution.proposers import DraftModel
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.device_selection import free_memory, is_out_of_memory
from windlass.engine.model.loading.loader import LoadedModel
from windlass.engine.model.loading.preflight import kv_cache_too_large
from windlass.engine.rotary.rope_scaling import DraftRotaryMapper
from windlass.engine.rotary.rotary_tables import RotaryTables

_MAX_PROPOSED_ROWS = 512  # every further row needs memory: its logits are half a megabyte


def dtype_name(dtype: torch.dtype) -> str:
    """The name as options have it."""
    return str(dtype).removeprefix("torch.")


def kv_bytes_per_token(model: LoadedModel, draft: LoadedModel | None = None, *, all_ranks: bool = False) -> int:
    """Bytes that a token needs in the KV groups of a model and its draft model, on this rank or on all ranks together."""
    spec, dtype = model.spec if all_ranks else model.decoder.spec, dtype_name(model.cache_dtype)
    num_bytes = sum(bytes_per_token(group, dtype) for group in spec.kv_groups)
    return num_bytes if draft is None else num_bytes + kv_bytes_per_token(draft)


def largest_decode_step(config: EngineConfig, length: int) -> tuple[int, int]:
    """The limits of captured steps: rows, including proposed tokens, and blocks of a sequence of `length` tokens."""
    scheduling, rows = config.scheduling, config.scheduling.max_num_seqs
    rows = max(rows, min(rows * (1 + scheduling.speculation.max_proposed_tokens), _MAX_PROPOSED_ROWS))
    return min(rows, scheduling.max_num_batched_tokens), -(-length // config.cache.block_size)


def profile_kv_memory(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None) -> int:
    """Available KV memory in bytes, measured by running the largest step once and, if enabled, capturing decode steps.

    The device must have its own memory. Raises LoadError if it does not suffice for that, or none is left.
    """
    decoder, scheduling, memory = model.decoder, config.scheduling, model.decoder.backend.device_memory
    assert memory is not None
    weights, tokens = gib(decoder.weight_bytes()), scheduling.max_num_batched_tokens
    length = config.max_model_len or model.spec.trained_len
    models, step = [model], 0
    if draft is not None and draft.spec.mtp_input is None:
        models.append(draft)
    elif draft is not None:  # an MTP layer runs after the model's step, with three rows of hidden states for each token
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
                length=length,
            )
            for one in models  # they compute one after the other
        )
        if config.compute.cuda_graphs and model.prepared.shard is None:  # ranks capture nothing
            max_rows, max_blocks = largest_decode_step(config, length)
            adapters = make_empty_adapters(config.adapters, model) if config.adapters.sources else None
            for one in models:
                step += profile_graph_memory(
                    one.decoder,
                    memory,
                    cache_dtype=one.cache_dtype,
                    block_size=config.cache.block_size,
                    max_rows=max_rows,
                    max_blocks=max_blocks,
                    adapters=adapters if one is model else None,  # a draft model uses no adapters
                )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"a step of {tokens} tokens needs more memory than {decoder.device} has in addition to {weights} of weights: "
            f"{gib(memory.free())} of {gib(memory.total)} are free: lower {lower}"
        ) from None
    finally:
        memory.release_cached()
    step += decoder.backend.workspace_bytes
    if config.cache.persist is not None or config.cache.host_memory is not None:
        states = model.spec.state_bytes + (0 if draft is None else draft.spec.state_bytes)
        block_bytes = max(config.cache.block_size * kv_bytes_per_token(model, draft), states)
        step += staging_bytes(block_bytes, saves=config.cache.host_memory is not None)
    share = config.cache.device_share or DEVICE_SHARE
    available = device_kv_budget(memory.total, memory.used_by_process(), memory.free(), share, step)
    if available < 1:
        raise LoadError(
            f"no memory is left for the KV cache: {share:.0%} of the {gib(memory.total)} of {decoder.device} may be used, "
            f"{gib(memory.free())} are free, this engine has taken {gib(memory.used_by_process())} and a step needs "
            f"{gib(step)}: raise `cache.device_share`, lower {lower}, or free memory on the device"
        )
    return available


def make_draft_model(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel, plan: CachePlan, rows: int
) -> DraftModel:
    """A draft model with as many blocks and rotary rows as the model has."""
    decoder, cache = draft.decoder, allocate_kv_cache(config, model, draft, plan)
    if decoder.backend.device_memory is not None:
        # A cached block may lack its last keys, and uninitialized device memory may hold NaN: one such key would spoil every
        # later proposal. A CPU's system provides zeroed memory.
        for plane in (plane for planes in cache.planes for plane in planes):
            plane.zero_()
    mapper = DraftRotaryMapper(model.rotary_groups, decoder.spec.rotary_groups)
    return DraftModel(decoder, cache, make_rotary_tables(decoder, rows), mapper)


def make_rotary_tables(decoder: Decoder, rows: int) -> RotaryTables:
    """Rotary tables of all rotary groups of a decoder."""
    return RotaryTables(rows, [group.base for group in decoder.spec.rotary_groups], decoder.backend)


def plan_kv_cache(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, available: int | None = None
) -> CachePlan:
    """Blocks per KV group for the memory budget: the operator's, else a share of the free main memory, or what is left of the
    engine's share of a GPU. available: available KV memory of all ranks, if measured already."""
    if config.cache.memory is not None:
        budget = config.cache.memory
    elif model.decoder.backend.device_memory is not None:
        budget = profile_kv_memory(config, model, draft) if available is None else available
    else:
        budget = default_kv_budget(free_memory(model.decoder.device), config.replicas)
    return model.prepared.unsharded.plan_cache(config, budget)


def allocate_kv_cache(config: EngineConfig, model: LoadedModel, owner: LoadedModel, plan: CachePlan) -> KVCache:
    """The KV cache of `owner`, which is the model or its draft model. Raises LoadError if there is not enough memory."""
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
        limit = f"more than {decoder.device} has in addition to {gib(decoder.weight_bytes())} of weights"
        raise LoadError(kv_cache_too_large(limit, plan.num_bytes, dtype_name(model.cache_dtype))) from None
