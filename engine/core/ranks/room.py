"""The memory for pages where each rank has a device of its own: as much as the fullest of them allows."""

from __future__ import annotations

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import bytes_per_token
from windlass.engine.core.description import draft_bytes_per_token, dtype_name
from windlass.engine.core.device_room import profile_kv_memory
from windlass.engine.core.ranks.messages import AvailableMemory
from windlass.engine.core.ranks.others import RankProcesses
from windlass.engine.model.loading.loader import LoadedModel
from windlass.kernels import RankEndedError


def rank_available_memory(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None = None
) -> AvailableMemory:
    """What the device of one rank has left: see `profile_kv_memory`, which all ranks call at the same time. Raises LoadError."""
    memory = model.decoder.backend.device_memory
    assert memory is not None
    num_bytes = profile_kv_memory(config, model, draft, memory)
    groups, dtype = model.decoder.spec.kv_groups, dtype_name(model.cache_dtype)
    return AvailableMemory(
        num_bytes, sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft)
    )


def group_kv_memory(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, others: RankProcesses | None
) -> int | None:
    """Bytes of the pages of all ranks together, none of which has more than its device has room for. Raises LoadError.

    None where there is nothing to be found out: the operator says it, or there are no devices with memory of their own, or no
    other ranks.
    """
    if others is None or config.cache.memory is not None or model.decoder.backend.device_memory is None:
        return None
    others.profile_memory()
    try:
        own = rank_available_memory(config, model, draft)
    except RankEndedError:
        others.available_memory_of_ranks()  # raises what that rank said of it, if it did
        raise
    groups, dtype = model.spec.kv_groups, dtype_name(model.cache_dtype)
    whole = sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft)
    return min(part.num_bytes * whole // part.bytes_per_kv_token for part in (own, *others.available_memory_of_ranks()))
