"""Questions of people who look on, on their way to an engine and back. Shared by the clients."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

from windlass.engine.api.looks import A, EngineQuestion
from windlass.engine.core.wire import Look, Message, Seen
from windlass.engine.errors import EngineError


class LookCalls:
    """send, require_engine: see `RequestRouter`."""

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send, self._require_engine = send, require_engine
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def waiting(self) -> int:
        """Questions that the engine has not answered."""
        return len(self._waiting)

    async def look(self, question: EngineQuestion[A]) -> A:
        """See `EngineClient.look`."""
        self._require_engine()
        look_id = next(self._ids)
        waiter = self._waiting[look_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Look(look_id, question))
            return cast(A, await waiter)
        finally:
            self._waiting.pop(look_id, None)

    def deliver(self, message: Message) -> bool:
        """Take an answer; False if the message is about something else."""
        if not isinstance(message, Seen):
            return False
        waiter = self._waiting.pop(message.look_id, None)
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
