"""Engine client protocol: one engine, or several behind one interface.

Implemented by `ProcessClient`, `ReplicatedClient` and the server's Ray client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest


class EngineStatus(Protocol):
    """Status of one engine behind a client."""

    @property
    def name(self) -> str:
        """Its own name; empty if it is named by its number."""
        return ""

    @property
    def state(self) -> str:
        """One of "starting", "ready", "restarting", "failed", "closed"."""

    @property
    def restarts(self) -> int:
        """How many times the engine was restarted after it died."""


def engine_name(engine: EngineStatus, number: int) -> str:
    """The displayed name of one of several engines. number: its index."""
    return engine.name or str(number)


class EngineClient(EngineStatus, Protocol):
    """The interface between server and engine. The defaults are those of a single engine.

    `generate` is an async generator: it yields the outputs of all samples of the request and ends after every sample has
    finished. Closing it early (`aclose()`, or cancelling the task that iterates) aborts the request and frees its blocks within
    one step. It raises RequestError, QueueFullError, DeadlineError or EngineDeadError.
    """

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None until loading has finished."""

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """The status of each engine."""
        return (self,)

    @property
    def has_replicas(self) -> bool:
        """Whether there are or can be several engines."""
        return False

    @property
    def crash_report(self) -> Path | None:
        """The report of the last crash, if any."""
        return None

    @property
    def adapter_ids(self) -> frozenset[int] | None:
        """Ids of the available adapters; a restarted engine may lose some. None: unknown."""
        return None

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]: ...

    def end_sample(self, request_id: str, index: int) -> None:
        """Finish one sample of a running request early, and free its blocks within one step.

        Returns at once. Outputs that are in flight may still arrive. Unknown samples are ignored.
        """

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Read and check an adapter in the background; requests may use it from then on.

        Raises RequestError that states what is wrong with it, DeviceMemoryError and EngineDeadError.
        """

    def drop_adapter(self, adapter_id: int) -> None:
        """Refuse further requests for an adapter and unload it once none runs. Returns at once; unknown ids are ignored."""

    async def inspect(self, query: IntrospectionQuery[A]) -> A:
        """Answer a query between two steps. Raises RequestError, DeviceMemoryError and EngineDeadError."""

    async def stats(self) -> EngineStats:
        """The latest statistics. Raises EngineDeadError while no engine is available."""

    async def close(self) -> None:
        """Abort all requests and end the engine. Safe to call twice."""
