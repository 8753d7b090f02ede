"""Watches the load generator itself, so that its own limits are never taken for the server's.

It measures how much of the time the event loop was at work, how late its timers ran, and how late requests were sent
for reasons of its own. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

from windlass.clients.loadtest.results import percentile

TICK_SECONDS = 0.02

# Above these the figures say more about the generator than about the server.
BUSY_LIMIT = 0.9
LAG_LIMIT_MS = 25.0


class IdleSelector(selectors.DefaultSelector):
    """A selector that adds up the seconds it waited. The rest of the time the loop was at work, or had no processor."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        begin = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited += time.perf_counter() - begin


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop whose idle time can be read."""

    def __init__(self) -> None:
        self.idle = IdleSelector()
        super().__init__(self.idle)


class GeneratorHealth:
    """Start it with the measured part of a run, stop it at its end, then ask for `report`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._selector = self._loop.idle if isinstance(self._loop, MeasuredLoop) else None
        self._lags: list[float] = []
        self._sends: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._begin = self._cpu = self._waited = 0.0
        self._taken: tuple[float, float, float] | None = None
        self._unsent = 0

    def start(self) -> None:
        """Begin to watch."""
        self._begin, self._cpu = time.perf_counter(), time.process_time()
        self._waited = self._selector.waited if self._selector else 0.0
        self._schedule()

    def sent(self, late_seconds: float) -> None:
        """A request went out this many seconds later than it could have."""
        self._sends.append(late_seconds)

    def out_of_files(self) -> None:
        """A request did not go out, as there was no file left for its connection."""
        self._unsent += 1

    def stop(self) -> None:
        """The measured part is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waited = (self._selector.waited if self._selector else 0.0) - self._waited
        self._taken = (time.perf_counter() - self._begin, time.process_time() - self._cpu, waited)

    def _schedule(self) -> None:
        due = self._loop.time() + TICK_SECONDS
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._lags.append(self._loop.time() - due)
        self._schedule()

    def report(self, chunks: int) -> dict[str, Any]:
        """What the run's `generator` holds. chunks: how many were received."""
        assert self._taken is not None, "stop comes first"
        wall, cpu, waited = self._taken
        wall = max(wall, 1e-9)
        busy = 1 - waited / wall if self._selector else None
        lag, sends = _spread(self._lags), _spread(self._sends)
        reasons = []
        if self._unsent:
            reasons.append(f"it had no file left for {self._unsent} connections: lower the load, or raise `ulimit -Hn`")
        # The first tick of a very short run says nothing about its share of the time.
        if max(cpu / wall, busy or 0.0) > BUSY_LIMIT and wall > 10 * TICK_SECONDS:
            reasons.append("its event loop was at work nearly all the time: lower the load, or run several generators")
        if lag["p99"] > LAG_LIMIT_MS:
            reasons.append(
                "its event loop ran late, so arrival times are late too: give it a processor core of its own"
            )
        elif sends["p99"] > LAG_LIMIT_MS:
            reasons.append("it sent requests late: lower the load, or give it a processor core of its own")
        return {
            "limited": bool(reasons),
            "reasons": reasons,
            "cpu_share": cpu / wall,
            "busy_share": busy,
            "loop_lag_ms": lag,
            "send_lag_ms": sends,
            "chunks_per_second": chunks / wall,
        }


def _spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds; zeros for nothing measured."""
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(value * 1000 for value in seconds)
    return {"p50": percentile(ordered, 50), "p99": percentile(ordered, 99), "max": ordered[-1]}
