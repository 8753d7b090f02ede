"""What the first rank says to the others, and they to it. Frames are pickled between processes of one program, as in `wire`."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.api.config import EngineConfig
from windlass.engine.cache.budget import CachePlan


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The first message: which part of what to load. Answered by `PartLoaded` or `PartFailed`."""

    config: EngineConfig
    rank: int


@dataclass(frozen=True, slots=True)
class PartLoaded:
    """weight_bytes: of this rank's weights."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class PartFailed:
    """Why it cannot be loaded, one line."""

    message: str


@dataclass(frozen=True, slots=True)
class FindRoom:
    """Find out, by the largest step that all ranks compute together, what is left for pages. Answered by `PartRoom` or
    `PartFailed`; sent where each rank has a device with memory of its own."""


@dataclass(frozen=True, slots=True)
class PartRoom:
    """Bytes that are left for pages, and what a token takes of them on this rank."""

    room: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class MakePages:
    """How many pages there are, and how many rows of the rotary tables. Answered by `PartLoaded` or `PartFailed`.

    After it come the orders of `windlass.engine.execution.runner`, which are not answered.
    """

    plan: CachePlan
    rotary_rows: int
