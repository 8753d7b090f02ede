"""How a server talks to an engine: the `EngineClient` protocol and its two implementations, inline and process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.looks import A, EngineQuestion
from windlass.engine.api.request import EngineRequest, EngineStats, ModelInfo, RequestOutput


def engines_of(client: EngineClient) -> tuple[EngineClient, ...]:
    """Each engine behind a client, for those who show them one by one: the client itself where it is the only one."""
    found: tuple[EngineClient, ...] = getattr(client, "engines", (client,))
    return found


def is_several(client: EngineClient) -> bool:
    """Whether there are several engines behind a client, or can be."""
    return hasattr(client, "engines")


def name_of(engine: EngineClient, number: int) -> str:
    """What one of several engines is called: its number among them, where it has no name of its own."""
    return str(getattr(engine, "name", number))


class EngineClient(Protocol):
    """The whole interface between server and engine. Keep it this small.

    `generate` is an async generator: it yields outputs of all samples of the request as they come and ends after every
    sample has finished. Closing it early (`aclose()`, or cancelling the task that iterates) aborts the request and
    frees its blocks within one step. It raises RequestError, QueueFullError, DeadlineError or EngineDeadError.
    """

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None until loading has finished."""
        ...

    @property
    def state(self) -> str:
        """One of "starting", "ready", "restarting", "failed", "closed"."""
        ...

    @property
    def restarts(self) -> int:
        """How many times the engine was restarted after it died."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]: ...

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request that runs, as if it had finished, and free its blocks within one step.

        Returns at once. Its outputs that are under way already may still come. Unknown samples are ignored.
        """
        ...

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """Have an adapter read and checked, beside what runs; requests may use it from then on.

        Raises RequestError that says what is wrong with it, and EngineDeadError.
        """
        ...

    def drop_adapter(self, adapter_id: int) -> None:
        """Take no further requests for an adapter; it goes when none runs. Returns at once; unknown ids are ignored."""
        ...

    async def look(self, question: EngineQuestion[A]) -> A:
        """What the engine answers somebody who looks on, between two steps; raises RequestError and EngineDeadError."""
        ...

    async def stats(self) -> EngineStats:
        """The latest statistics; raises EngineDeadError while there is no engine."""
        ...

    async def close(self) -> None:
        """Abort what runs and end the engine. Safe to call twice."""
        ...
