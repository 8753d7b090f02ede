"""How far a run is, told while it goes on, and its end before its time. Knows no server and no terminal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

_PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class RunProgress:
    """How far a run is. phase: "preparing", "warm-up" or "running". total: conversations to come, None where unknown.

    chunks: of streams, None where a run does not count them.
    """

    phase: str = "preparing"
    seconds: float = 0.0
    total: int | None = None
    begun: int = 0
    ended: int = 0
    completed: int = 0
    failed: int = 0
    running: int = 0
    chunks: int | None = 0


Progress = Callable[[RunProgress], None]


async def tell(progress: Progress | None, snapshot: Callable[[], RunProgress]) -> None:
    """Call it about twice a second, until cancelled."""
    while progress is not None:
        with contextlib.suppress(OSError):  # whoever shows it has lost its terminal or its disk, and the run goes on
            progress(snapshot())
        await asyncio.sleep(_PROGRESS_SECONDS)


async def unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Do the work unless told to stop; whether it was done to its end."""
    if stop.is_set():
        work.close()
        return False
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        return False
    task.result()
    return True
