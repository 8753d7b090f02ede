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
    """What is shown of each engine behind a client."""

    @property
    def name(self) -> str:
        """Its own, where it has one; else it goes by its number among them."""
        return ""

    @property
    def state(self) -> str:
        """One of "starting", "ready", "restarting", "failed", "closed"."""
        ...

    @property
    def restarts(self) -> int:
        """How many times the engine was restarted after it died."""
        ...


def engine_name(engine: EngineStatus, number: int) -> str:
    """What one of several engines is called. number: its own among them."""
    return engine.name or str(number)


class EngineClient(EngineStatus, Protocol):
    """The whole interface between server and engine. Keep it this small. Its defaults are those of one engine.

    `generate` is an async generator: it yields outputs of all samples of the request as they come and ends after every
    sample has finished. Closing it early (`aclose()`, or cancelling the task that iterates) aborts the request and
    frees its blocks within one step. It raises RequestError, QueueFullError, DeadlineError or EngineDeadError.
    """

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None until loading has finished."""
        ...

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """Each engine behind it, for those who show them one by one."""
        return (self,)

    @property
    def has_replicas(self) -> bool:
        """Whether there are several, or can be."""
        return False

    @property
    def crash_report(self) -> Path | None:
        """The report of the last death, where there is one."""
        return None

    @property
    def adapter_ids(self) -> frozenset[int] | None:
        """The adapters that requests may name: an engine that is started again may find that one has gone. None: nobody knows."""
        return None

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]: ...

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request that runs, as if it had finished, and free its blocks within one step.

        Returns at once. Its outputs that are under way already may still come. Unknown samples are ignored.
        """
        ...

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Have an adapter read and checked, beside what runs; requests may use it from then on.

        Raises RequestError that says what is wrong with it, DeviceMemoryError and EngineDeadError.
        """
        ...

    def drop_adapter(self, adapter_id: int) -> None:
        """Take no further requests for an adapter; it goes when none runs. Returns at once; unknown ids are ignored."""
        ...

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """What the engine answers somebody who looks on, between two steps; raises RequestError, DeviceMemoryError and
        EngineDeadError."""
        ...

    async def stats(self) -> EngineStats:
        """The latest statistics; raises EngineDeadError while there is no engine."""
        ...

    async def close(self) -> None:
        """Abort what runs and end the engine. Safe to call twice."""
        ...
