"""Questions of people who look on, on their way to an engine and back. Shared by the clients."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from windlass.engine.api.looks import A, IntrospectionQuery
from windlass.engine.core.wire import InspectRequest, InspectResult, Message
from windlass.engine.errors import EngineError


class InspectionCalls:
    """send, require_engine: see `RequestRouter`."""

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send, self._require_engine = send, require_engine
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def waiting(self) -> int:
        """Questions that the engine has not answered."""
        return len(self._waiting)

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """See `EngineClient.inspect`."""
        self._require_engine()
        inspection_id = next(self._ids)
        waiter = self._waiting[inspection_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(InspectRequest(inspection_id, question))
            return cast(A, await waiter)
        finally:
            self._waiting.pop(inspection_id, None)

    def deliver(self, message: Message) -> bool:
        """Take an answer; False if the message is about something else."""
        if not isinstance(message, InspectResult):
            return False
        waiter = self._waiting.pop(message.inspection_id, None)
        if waiter is not None and not waiter.done():
            if isinstance(message.result, EngineError):
                waiter.set_exception(message.result)
            else:
                waiter.set_result(message.result)
        return True

    def fail_all(self, make_error: Callable[[], EngineError]) -> None:
        """The engine is gone, and with it the answers."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(make_error())
