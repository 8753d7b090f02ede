"""Shutdown of a server within a bounded time: drain, abort, close, and as a last resort exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from windlass.clients.terminal import print_status
from windlass.server.startup.engines import SupervisedEngine

if TYPE_CHECKING:
    from windlass.server.app.state import ServerState
    from windlass.server.http.server import HttpServer


AFTER_GRACE_SECONDS = 2.0  # after the grace period, at most, until the process has ended; of these:

ABORT_SECONDS = 0.6  # for streams to send their error event

HTTP_SECONDS = 0.7  # for uvicorn's own steps once no client is connected

INTERPRETER_EXIT_SECONDS = 0.5  # for the interpreter to end, and for a busy machine

CLOSE_SECONDS = 5.0  # for requests other than generation, if the grace period is that long

_UNLIMITED_SECONDS = 1e8  # three years: means no limit


class Shutdown:
    """Shutdown of a server. Create it in the main thread while the server runs, and call `begin` once.

    grace_seconds: time for running generation requests.
    """

    def __init__(self, client: SupervisedEngine, grace_seconds: float) -> None:
        self._client = client
        self._grace_seconds = grace_seconds
        self._grace_ends = self._exit_at = 0.0
        self._deadline_enforced = threading.Event()
        self.started = False
        # It waits from the start, since a thread cannot be started safely in a signal handler.
        threading.Thread(target=self._exit_on_deadline, name="ending", daemon=True).start()

    def begin(self) -> None:
        """Start the grace period. Called by a signal handler, so that it starts even if the event loop is busy."""
        self.started = True
        self._grace_ends = time.monotonic() + self._grace_seconds
        self._exit_at = self._grace_ends + AFTER_GRACE_SECONDS - INTERPRETER_EXIT_SECONDS

    def enforce_deadline(self) -> None:
        """Make the process exit in time, with code 0, even while threads do work that no request waits for.

        Python joins threads before it exits, and one that tokenizes a long text cannot be interrupted.
        """
        self._deadline_enforced.set()

    async def drain(self, state: ServerState) -> None:
        """Refuse new work, wait the grace period for running requests, then end them with an error."""
        state.draining = True
        if state.in_flight:
            left = describe_time_left(state.in_flight, self._grace_ends - time.monotonic())
            print_status(f"draining: {left}; send the signal again to stop now")
        if not await _idle(state, self._grace_ends):
            print_status(f"the grace period has ended: {state.in_flight} requests are aborted")
            state.abort_all()
            await _idle(state, time.monotonic() + ABORT_SECONDS)
        print_status("stopped")

    async def close(self, server: HttpServer, http: asyncio.Task[None]) -> None:
        """End the HTTP server, which the task `http` runs, and the engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left()):
                await asyncio.gather(self._close_http(server, http), self._client.close())

    async def _close_http(self, server: HttpServer, http: asyncio.Task[None]) -> None:
        await server.stop(min(CLOSE_SECONDS, self._left() - HTTP_SECONDS))
        await asyncio.wait({http}, timeout=self._left())

    def _left(self) -> float:
        return max(0.0, self._exit_at - time.monotonic())

    def _exit_on_deadline(self) -> None:
        self._deadline_enforced.wait()
        time.sleep(self._left())
        self._client.kill(reap=False)
        os._exit(0)


def describe_time_left(requests: int, seconds: float) -> str:
    """The remaining time of running requests, in words."""
    who = "1 request has" if requests == 1 else f"{requests:,} requests have"
    if seconds > _UNLIMITED_SECONDS:
        return f"{who} unlimited time to finish"
    return f"{who} {max(0.0, seconds):,.{0 if seconds >= 10 else 1}f} s to finish"


async def _idle(state: ServerState, deadline: float) -> bool:
    while state.in_flight and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return not state.in_flight
