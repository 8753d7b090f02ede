"""An answer that costs the engine something, made for all who ask within a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MOMENT = 0.2  # seconds that an answer is good for
_REST = 20.0  # times as long as it took: it may take a twentieth of the time


class Recent(Generic[T]):
    """The last answer and when it was made. For one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._answer: T | None = None
        self._good_until = 0.0

    async def get(self, make: Callable[[], Awaitable[T]]) -> T:
        """The last answer while it is recent, else a new one; whatever making it raises is for the one who asked."""
        async with self._turn:
            if self._answer is None or time.monotonic() >= self._good_until:
                began = time.monotonic()
                self._answer = await make()
                ended = time.monotonic()
                self._good_until = ended + max(MOMENT, _REST * (ended - began))
            return self._answer
