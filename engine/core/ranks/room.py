"""The memory for pages where each rank has a device of its own: as much as the fullest of them allows."""

from __future__ import annotations

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import bytes_per_token
from windlass.engine.core.description import draft_bytes_per_token, dtype_name
from windlass.engine.core.device_room import room_for_pages
from windlass.engine.core.ranks.messages import PartRoom
from windlass.engine.core.ranks.others import OtherRanks
from windlass.engine.model.loading.loader import LoadedModel
from windlass.kernels import RankEndedError


def room_of_part(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None = None) -> PartRoom:
    """What the device of one rank has left: see `room_for_pages`, which all ranks call at the same time. Raises LoadError."""
    memory = model.decoder.backend.device_memory
    assert memory is not None
    room = room_for_pages(config, model, draft, memory)
    groups, dtype = model.decoder.spec.kv_groups, dtype_name(model.cache_dtype)
    return PartRoom(room, sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft))


def room_of_ranks(
    config: EngineConfig, model: LoadedModel, draft: LoadedModel | None, others: OtherRanks | None
) -> int | None:
    """Bytes of the pages of all ranks together, none of which has more than its device has room for. Raises LoadError.

    None where there is nothing to be found out: the operator says it, or there are no devices with memory of their own, or no
    other ranks.
    """
    if others is None or config.cache.memory is not None or model.decoder.backend.device_memory is None:
        return None
    others.find_room()
    try:
        own = room_of_part(config, model, draft)
    except RankEndedError:
        others.rooms()  # raises what that rank said of it, if it did
        raise
    groups, dtype = model.spec.kv_groups, dtype_name(model.cache_dtype)
    whole = sum(bytes_per_token(group, dtype) for group in groups) + draft_bytes_per_token(draft)
    return min(part.room * whole // part.token_bytes for part in (own, *others.rooms()))
