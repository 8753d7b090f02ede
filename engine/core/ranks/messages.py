"""What the first rank says to the others, and they to it. Frames are pickled between processes of one program, as in `wire`."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import CachePlan


@dataclass(frozen=True, slots=True)
class LoadShard:
    """The first message: which part of what to load. Answered by `ShardLoaded` or `ShardFailed`."""

    config: EngineConfig
    rank: int


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """weight_bytes: of this rank's weights."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """Why it cannot be loaded, one line."""

    message: str


@dataclass(frozen=True, slots=True)
class ProfileMemory:
    """Find out, by the largest step that all ranks compute together, what is left for pages. Answered by `AvailableMemory` or
    `ShardFailed`; sent where each rank has a device with memory of its own."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that are left for pages, and what a token takes of them on this rank."""

    num_bytes: int
    bytes_per_kv_token: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    """How many pages there are, and how many rows of the rotary tables. Answered by `ShardLoaded` or `ShardFailed`.

    After it come the orders of `windlass.engine.execution.runner`, which are not answered.
    """

    plan: CachePlan
    rotary_rows: int
