"""A simulated network: connections whose bytes come in pieces and late, in order on each and in any order between them.

A connection has two ends, both asyncio transports. What an end has written and the other has not taken yet fills a window, as the
buffers of two kernels do; what does not fit waits in the writer's own buffer, and its protocol is told to pause, as asyncio does.
It knows bytes and nothing of what they mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.loop import SimulatedLoop

HIGH_WATER = 64 * 1024  # bytes in a writer's buffer above which it is told to pause: asyncio's own number


@dataclass
class Weather:
    """How bytes travel on a connection. latency, piece: draw the seconds and the size of the next piece."""

    latency: Callable[[], float]
    piece: Callable[[], int]
    window: int = 64 * 1024  # bytes on the way, or with a reader that does not read


class End(asyncio.Transport):
    """One end of a connection; `sock` stands for its socket."""

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
        self._on_the_way = 0  # bytes written that the other end has not taken
        self._last_arrival = 0.0
        self._arrived: deque[bytes] = deque()
        self._reading = True
        self._told_to_pause = False
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._closing = self._eof_sent = self._lost = False
        self._eof_arrived = False

    # ---- what protocols call -------------------------------------------------------------------------------------------
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
        if self._buffered > self._high and not self._told_to_pause:
            self._told_to_pause = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """What is written still goes out."""
        if not self._closing:
            self._closing = self._eof_sent = True
            self._push()

    def abort(self) -> None:
        """Away with it; the other end hears of a reset."""
        self._closing = True
        if not self._lost:
            self._lose(None)
            self._loop.call_later(self._weather.latency(), self.other._be_reset)

    def cut_off(self) -> None:
        """Its process has died: what was not sent is lost, what was sent still arrives, and then the end."""
        self._buffer.clear()
        self._buffered = 0
        self.close()

    # ---- for those who make connections ----------------------------------------------------------------------------------
    def open(self, protocol: Any) -> None:
        """Whose end this is. What has arrived already is handed over."""
        self._protocol = protocol
        protocol.connection_made(self)
        if self._lost:
            protocol.connection_lost(None)
            return
        self._loop.call_soon(self._hand_over)

    def reset(self) -> None:
        """The network cuts the connection: both ends hear of it."""
        self._be_reset()
        self.other._be_reset()

    @property
    def lost(self) -> bool:
        return self._lost

    # ---- on the way ------------------------------------------------------------------------------------------------------
    def _push(self) -> None:
        """Send what the window has room for."""
        while self._buffer and self._on_the_way < self._weather.window and not self._lost:
            data = self._buffer.popleft()
            size = max(1, min(len(data), self._weather.piece(), self._weather.window - self._on_the_way))
            if size < len(data):
                self._buffer.appendleft(data[size:])
            self._buffered -= size
            self._on_the_way += size
            self._send(self.other._arrive, data[:size])
        if self._told_to_pause and self._buffered <= self._low and not self._lost:
            self._told_to_pause = False
            self._protocol.resume_writing()
        if self._eof_sent and not self._buffer and not self._lost:
            self._eof_sent = False
            self._send(self.other._arrive_eof)
            if self._closing:
                self._lose(None)

    def _send(self, arrive: Callable[..., None], *args: Any) -> None:
        """Nothing overtakes on one connection; asyncio keeps no order among timers of one moment."""
        self._last_arrival = max(self._last_arrival + 1e-6, self._loop.time() + self._weather.latency())
        self._loop.call_at(self._last_arrival, arrive, *args)

    def _arrive(self, data: bytes) -> None:
        if self._lost:  # as a system answers bytes for a socket that is closed
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
    """What servers and clients do with a socket beside reading and writing."""

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
    """Two ends that are connected. address: of the first, as the second sees it."""
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
        """A client's end of a new connection."""
        near, far = connection(self.loop, weather, address)
        if self.closed:
            self.loop.call_soon(near._be_reset)
        else:
            self.waiting.append(far)
            self.loop.call_later(weather.latency(), self.loop.readable, self)
        return near

    # ---- as sockets have it ----------------------------------------------------------------------------------------------
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
