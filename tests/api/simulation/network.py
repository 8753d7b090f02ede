"""A simulated network: bytes arrive in pieces and late, in order on each connection.

A connection has two ends, both asyncio transports. Bytes that were written and not read yet fill a window, like the buffers of
two kernels. Further bytes wait in the buffer of the writer, whose protocol is paused as by asyncio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.loop import SimulatedLoop

HIGH_WATER = 64 * 1024  # bytes in a write buffer above which its protocol is paused, as in asyncio


@dataclass
class Weather:
    """Properties of a connection. latency, piece: draw the delay in seconds and the size of the next piece."""

    latency: Callable[[], float]
    piece: Callable[[], int]
    window: int = 64 * 1024  # bytes that were sent and not read


class End(asyncio.Transport):
    """One end of a connection; `sock` replaces its socket."""

    def __init__(self, loop: SimulatedLoop, weather: Weather, address: tuple[str, int]) -> None:
        super().__init__({"peername": address, "sockname": ("10.0.0.1", 80)})
        self._loop = loop
        self._weather = weather
        self.other: End
        self.sock = SimulatedSocket(self, address)
        self._extra["socket"] = self.sock  # type: ignore[attr-defined]
        self._protocol: Any = None
        self._buffer: deque[bytes] = deque()
        self._buffered = 0
        self.most_buffered = self.largest_write = 0
        self._on_the_way = 0  # bytes that were sent and not read by the other end
        self._last_arrival = 0.0
        self._arrived: deque[bytes] = deque()
        self._reading = True
        self._paused = False
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._closing = self._eof_sent = self._lost = False
        self._eof_arrived = False

    # ---- methods of asyncio.Transport ---------------------------------------------------------------------------------------
    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._hand_over)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof_sent = True
        self._push()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._lost or not data:
            return
        self._buffer.append(bytes(data))
        self._buffered += len(data)
        self.largest_write = max(self.largest_write, len(data))
        self._push()
        self.most_buffered = max(self.most_buffered, self._buffered)
        if self._buffered > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """Close after the buffered bytes were sent."""
        if not self._closing:
            self._closing = self._eof_sent = True
            self._push()

    def abort(self) -> None:
        """Close immediately; the other end is reset."""
        self._closing = True
        if not self._lost:
            self._lose(None)
            self._loop.call_later(self._weather.latency(), self.other._be_reset)

    def cut_off(self) -> None:
        """End with its process: buffered bytes are lost, and sent ones arrive before the end."""
        self._buffer.clear()
        self._buffered = 0
        self.close()

    # ---- connecting and resetting ----------------------------------------------------------------------------------
    def open(self, protocol: Any) -> None:
        """Set the protocol, and pass it the bytes that have arrived already."""
        self._protocol = protocol
        protocol.connection_made(self)
        if self._lost:
            protocol.connection_lost(None)
            return
        self._loop.call_soon(self._hand_over)

    def reset(self) -> None:
        """Reset both ends."""
        self._be_reset()
        self.other._be_reset()

    @property
    def lost(self) -> bool:
        return self._lost

    # ---- transfer ------------------------------------------------------------------------------------------------------
    def _push(self) -> None:
        """Send as many bytes as fit into the window."""
        while self._buffer and self._on_the_way < self._weather.window and not self._lost:
            data = self._buffer.popleft()
            size = max(1, min(len(data), self._weather.piece(), self._weather.window - self._on_the_way))
            if size < len(data):
                self._buffer.appendleft(data[size:])
            self._buffered -= size
            self._on_the_way += size
            self._send(self.other._arrive, data[:size])
        if self._paused and self._buffered <= self._low and not self._lost:
            self._paused = False
            self._protocol.resume_writing()
        if self._eof_sent and not self._buffer and not self._lost:
            self._eof_sent = False
            self._send(self.other._arrive_eof)
            if self._closing:
                self._lose(None)

    def _send(self, arrive: Callable[..., None], *args: Any) -> None:
        """Deliver in order. asyncio does not preserve the order of timers with equal times."""
        self._last_arrival = max(self._last_arrival + 1e-6, self._loop.time() + self._weather.latency())
        self._loop.call_at(self._last_arrival, arrive, *args)

    def _arrive(self, data: bytes) -> None:
        if self._lost:  # as a kernel answers data for a closed socket
            self._loop.call_later(self._weather.latency(), self.other._be_reset)
            return
        self._arrived.append(data)
        self._hand_over()

    def _arrive_eof(self) -> None:
        self._eof_arrived = True
        self._hand_over()

    def _hand_over(self) -> None:
        while self._arrived and self._reading and self._protocol is not None and not self._lost:
            data = self._arrived.popleft()
            self.other._taken(len(data))
            self._protocol.data_received(data)
        if self._eof_arrived and not self._arrived and self._protocol is not None and not self._lost:
            self._eof_arrived = False
            if not self._protocol.eof_received():
                self.close()

    def _taken(self, size: int) -> None:
        self._on_the_way -= size
        self._push()

    def _be_reset(self) -> None:
        self._closing = True
        if not self._lost:
            self._lose(ConnectionResetError("the connection was reset"))

    def _lose(self, error: Exception | None) -> None:
        self._lost = self._closing = True
        self._buffer.clear()
        self._arrived.clear()
        self._buffered = 0
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)


class SimulatedSocket:
    """Methods of a socket other than reading and writing."""

    def __init__(self, end: End, address: tuple[str, int]) -> None:
        self.end = end
        self._address = address

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *args: Any) -> None:
        pass

    def fileno(self) -> int:
        raise OSError("no descriptor: it is simulated")

    def getpeername(self) -> tuple[str, int]:
        return self._address

    def getsockname(self) -> tuple[str, int]:
        return ("10.0.0.1", 80)

    def send(self, data: bytes) -> int:
        self.end.open(asyncio.Protocol())
        self.end.write(data)
        return len(data)

    def close(self) -> None:
        self.end.close()

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connection(loop: SimulatedLoop, weather: Weather, address: tuple[str, int]) -> tuple[End, End]:
    """Return two connected ends. address: of the first, as seen by the second."""
    near, far = End(loop, weather, ("10.0.0.1", 80)), End(loop, weather, address)
    near.other, far.other = far, near
    return near, far


@dataclass
class Listener:
    """A listening socket."""

    loop: SimulatedLoop
    waiting: deque[End] = field(default_factory=deque)
    closed: bool = False

    def dial(self, weather: Weather, address: tuple[str, int]) -> End:
        """Return the client's end of a new connection."""
        near, far = connection(self.loop, weather, address)
        if self.closed:
            self.loop.call_soon(near._be_reset)
        else:
            self.waiting.append(far)
            self.loop.call_later(weather.latency(), self.loop.readable, self)
        return near

    # ---- methods of a socket ----------------------------------------------------------------------------------------------
    def accept(self) -> tuple[SimulatedSocket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        end = self.waiting.popleft()
        return end.sock, end.sock.getpeername()

    def fileno(self) -> int:
        return -1 if self.closed else 3

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        for end in self.waiting:
            end.abort()

    def __hash__(self) -> int:
        return id(self)
