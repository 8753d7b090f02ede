"""The connections of one server: whether another may come, which of them keeps the server waiting for too long.

It holds them, counts them by address and closes them; it knows neither sockets nor HTTP. All times are those of its
clock, and nothing happens by itself: whoever owns it calls `sweep` now and then.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from windlass.server.http.occasional import Occasional
from windlass.server.options.connection_settings import ConnectionSettings, holder

_logger = logging.getLogger("windlass.server")


class Refusal(enum.Enum):
    """Why a connection is not let in."""

    SERVER_FULL = enum.auto()
    ADDRESS_FULL = enum.auto()


class Connection(Protocol):
    """What is asked of a connection."""

    @property
    def bytes_pending(self) -> int:
        """Bytes of answers that wait to be taken by the client."""
        ...

    @property
    def bytes_taken(self) -> int:
        """Bytes of answers taken so far."""
        ...

    def close_late(self) -> None:
        """End it because its request, or its next one, did not come in time."""
        ...

    def abort(self) -> None:
        """End it at once; what is not sent is lost."""
        ...


class Connections:
    """Each connection owes the head of a request, is idle between two requests, or is busy with one.

    Both kinds of waiting are kept in the order in which they began, so what is overdue stands in front.
    """

    def __init__(self, settings: ConnectionSettings, *, clock: Callable[[], float] | None = None) -> None:
        self._settings = settings
        self._clock = clock = clock or time.monotonic
        self._holders: dict[Connection, str] = {}
        self._held: Counter[str] = Counter()
        self._owing: dict[Connection, float] = {}  # since when
        self._idle: dict[Connection, float] = {}
        self._waiting_of: dict[str, dict[Connection, None]] = {}  # both kinds, by holder
        self._sending: dict[Connection, tuple[int, float]] = {}  # bytes taken, and when that was seen first
        self._said = {reason: Occasional(_logger, logging.WARNING, clock=clock) for reason in Refusal}
        self._said_evicted = Occasional(_logger, logging.WARNING, clock=clock)
        self._said_stalled = Occasional(_logger, logging.INFO, clock=clock)

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._holders

    @property
    def sweep_seconds(self) -> float:
        """How often `sweep` should be called."""
        shortest = min(self._settings.header_seconds, self._settings.idle_seconds, self._settings.write_seconds)
        return min(1.0, shortest / 4)

    # ---- letting in --------------------------------------------------------------------------------------------------
    def refuse(self, address: str) -> Refusal | None:
        """Why nobody more may come from this address, None if a connection may: `add` it then.

        Where all places are taken, one that waits loses its place to the newcomer, so half-open connections never lock
        others out: the oldest of the newcomer's own address, so that a flood from one address closes only its own;
        else whoever has owed the head of a request for longest; else whoever has been idle for longest.
        """
        if self._held[holder(address)] >= self._settings.max_per_address and not self._settings.trusts(address):
            self._said[Refusal.ADDRESS_FULL].say(
                f"{address} holds {self._settings.max_per_address} connections, the most of one address "
                "(--max-connections-per-address): another was refused"
            )
            return Refusal.ADDRESS_FULL
        if len(self._holders) < self._settings.max_connections:
            return None
        for waiting in (self._waiting_of.get(holder(address), {}), self._owing, self._idle):
            for loser in waiting:
                if loser.bytes_pending:  # the last of its answer is still on the way
                    continue
                self._said_evicted.say(
                    f"{self._settings.max_connections} connections are open (--max-connections): one that waited without "
                    "a request was closed for another"
                )
                self.remove(loser)
                loser.abort()
                return None
        self._said[Refusal.SERVER_FULL].say(
            f"all of {self._settings.max_connections} connections are at work (--max-connections): another was refused"
        )
        return Refusal.SERVER_FULL

    def add(self, connection: Connection, address: str) -> None:
        """Count a connection from now on; it owes the head of its first request."""
        self._holders[connection] = holder(address)
        self._held[self._holders[connection]] += 1
        self.owes_head(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection; unknown ones are ignored."""
        if connection not in self._holders:
            return
        self.is_busy(connection)
        self._sending.pop(connection, None)
        of = self._holders.pop(connection)
        self._held[of] -= 1
        if self._held[of] == 0:
            del self._held[of]

    # ---- what each is doing ------------------------------------------------------------------------------------------
    def owes_head(self, connection: Connection) -> None:
        """A request may begin, or has begun, to come; saying it again changes nothing."""
        self._wait(connection, self._owing)

    def is_idle(self, connection: Connection) -> None:
        """It has had its answer; saying it again changes nothing."""
        self._wait(connection, self._idle)

    def is_busy(self, connection: Connection) -> None:
        """The head of its request is there: what follows has bounds of its own."""
        for waiting in (self._owing, self._idle):
            waiting.pop(connection, None)
        of = self._holders.get(connection, "")
        own = self._waiting_of.get(of, {})
        own.pop(connection, None)
        if not own:
            self._waiting_of.pop(of, None)

    def _wait(self, connection: Connection, waiting: dict[Connection, float]) -> None:
        if connection not in self._holders or connection in waiting:
            return
        self.is_busy(connection)
        waiting[connection] = self._clock()
        self._waiting_of.setdefault(self._holders[connection], {})[connection] = None

    def is_sending(self, connection: Connection) -> None:
        """Something waits to be taken by the client."""
        if connection in self._holders and connection not in self._sending:
            self._sending[connection] = (connection.bytes_taken, self._clock())

    # ---- ending ------------------------------------------------------------------------------------------------------
    def sweep(self) -> None:
        """Close whatever is overdue."""
        now = self._clock()
        for waiting, seconds in (
            (self._owing, self._settings.header_seconds),
            (self._idle, self._settings.idle_seconds),
        ):
            overdue = []
            for connection, since in waiting.items():
                if now - since < seconds:
                    break
                overdue.append(connection)
            for connection in overdue:
                connection.close_late()
        for connection, (taken, since) in list(self._sending.items()):
            if not connection.bytes_pending:
                del self._sending[connection]
            elif connection.bytes_taken != taken:
                self._sending[connection] = (connection.bytes_taken, now)
            elif now - since >= self._settings.write_seconds:
                self._said_stalled.say(
                    f"a client of {self._holders[connection]} took no byte of its answer for "
                    f"{self._settings.write_seconds:g} s and was dropped"
                )
                connection.abort()

    def abort_all(self) -> None:
        """End every connection at once."""
        for connection in list(self._holders):
            connection.abort()
