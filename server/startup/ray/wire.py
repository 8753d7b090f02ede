"""Calls and outputs between the HTTP side and the replicas, and the direct connections that carry outputs."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, cast

from windlass._version import __version__
from windlass.engine.core.messages import output_fields
from windlass.engine.errors import EngineError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import ServerOptions


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """What every process of a deployment starts with. model: as it was named. sharing: engines that may be on one machine.

    door: the name of the actor that holds the listening socket; None where Ray's proxies listen.
    """

    model: str | None
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    engines_per_machine: int
    listener_actor: str | None = None
    version: str = __version__

    def check(self) -> None:
        """Raise RuntimeError where another version of Windlass runs than has deployed this."""
        if self.version != __version__:
            raise RuntimeError(version_mismatch(self.version))


@dataclass(frozen=True, slots=True)
class ReceiverAddress:
    """Where an ingress listens for outputs (see `channel`). secret: who connects says it first."""

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A request on its way. seconds: to its deadline, as clocks differ from machine to machine.

    digests: the keys of its prompt's blocks, of which a replica may remember `max_blocks`. avoid: ids of replicas that could
    not take it. adapter: the one that it names. lane, number: where outputs may go, and the call's number there.
    """

    request: EngineRequest
    seconds: float | None
    digests: tuple[bytes, ...] = ()
    max_blocks: int = 1
    avoid: tuple[str, ...] = ()
    adapter: AdapterSource | None = None
    channel: ReceiverAddress | None = None
    number: int = 0
    version: str = __version__

    @classmethod
    def of(cls, request: EngineRequest) -> ReplicaCall:
        deadline = request.deadline
        return cls(replace(request, deadline=None), None if deadline is None else deadline - time.monotonic())

    def to_local_request(self) -> EngineRequest:
        """The request by this machine's clock."""
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        return replace(self.request, deadline=deadline)


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A stream ended by an error, and where."""

    replica: str
    error: EngineError


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more comes this way."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The way by which outputs came is gone. replica: where it led, if that is known."""

    replica: str = ""


Item = list[RequestOutput] | CallFailed


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How one replica is. stats: None where its engine has none now. draining ones report too."""

    replica: str
    state: str
    restarts: int
    stats: EngineStats | None = None


def version_mismatch(theirs: str) -> str:
    """What to say where two versions meet."""
    return (
        f"this machine has Windlass {__version__}, the deployment is of {theirs}: install one version on every machine of the "
        "cluster, or delete the deployment first (windlass ray delete)"
    )


CONNECT_SECONDS = 2.0

FORGET_SECONDS = 30.0  # after which an address that could not be reached is tried again

SECRET_SECONDS = 5.0  # for whoever connects to say the secret

_SECRET = 32

_LENGTH = struct.Struct("!I")

CallEvent = Item | Finished | ConnectionLost


# ---- the ingress's end -----------------------------------------------------------------------------------------------
class OutputReceiver:
    """What comes for each call goes to who waits for it."""

    def __init__(self) -> None:
        self.address: ReceiverAddress | None = None
        self._callbacks: dict[int, Callable[[CallEvent], None]] = {}
        self._incoming: set[_Incoming] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> ReceiverAddress:
        """Begin, at a free port of this address of the machine. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Incoming(self), host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = ReceiverAddress(host, port, secrets.token_bytes(_SECRET))
        return self.address

    @property
    def num_connections(self) -> int:
        """Connections that there are, of whoever has connected."""
        return len(self._incoming)

    def open(self, number: int, callback: Callable[[CallEvent], None]) -> None:
        """Give to `callback` what comes for this call."""
        self._callbacks[number] = callback

    def close(self, number: int) -> None:
        """Drop what still comes for it."""
        self._callbacks.pop(number, None)

    async def stop(self) -> None:
        """Listen no more, and end all lanes."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._incoming):
            connection.abort()

    def check_secret(self, secret: bytes) -> bool:
        return self.address is not None and hmac.compare_digest(secret, self.address.secret)

    def add_connection(self, connection: _Incoming) -> None:
        self._incoming.add(connection)

    def remove_connection(self, connection: _Incoming) -> None:
        self._incoming.discard(connection)

    def deliver(self, number: int, news: CallEvent) -> bool:
        """Whether anybody waits for more of it."""
        if (callback := self._callbacks.get(number)) is not None:
            callback(news)
        return callback is not None


class _Incoming(asyncio.Protocol):
    """One replica's connection."""

    def __init__(self, end: OutputReceiver) -> None:
        self._end = end
        self._buffer = bytearray()
        self._known = False
        self._replica = ""
        self._numbers: set[int] = set()  # of calls that have begun here and not ended
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # those of uvloop, which Ray brings, are no instances of it
        self._timer = asyncio.get_running_loop().call_later(SECRET_SECONDS, self.abort)
        self._end.add_connection(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._known and not self._check_introduction():
            return
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            for one in pickle.loads(self._buffer[start + _LENGTH.size : end]):
                self._received(one)
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end.remove_connection(self)
        for number in self._numbers:
            self._end.deliver(number, ConnectionLost(self._replica))

    def _check_introduction(self) -> bool:
        if len(self._buffer) < _SECRET:
            return False
        self._known = self._end.check_secret(bytes(self._buffer[:_SECRET]))
        if self._known and self._timer is not None:
            self._timer.cancel()
            del self._buffer[:_SECRET]
        else:
            self._buffer.clear()
            self.abort()
        return self._known

    def _received(self, one: Any) -> None:
        if not self._replica:
            self._replica = str(one)
            return
        number, content = one
        if type(content) is not tuple:
            self._end.deliver(number, content)
            self._numbers.discard(number)
        elif self._end.deliver(number, [RequestOutput(*content)]):
            self._numbers.add(number)
        else:
            self._numbers.discard(number)


# ---- the replica's end -----------------------------------------------------------------------------------------------
class OutputChannel(asyncio.Protocol):
    """All that is sent in one turn of the loop goes in one frame. Never blocks: what waits is bounded by what calls ask for."""

    def __init__(self, address: ReceiverAddress, replica: str) -> None:
        self.lost = False
        self._address, self._replica = address, replica
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Any] = []
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._running: set[asyncio.Task[None]] = set()

    def send(self, number: int, content: RequestOutput | CallFailed | Finished) -> None:
        """Have it sent when this turn of the loop ends; dropped where the lane is lost."""
        self._put((number, output_fields(content) if isinstance(content, RequestOutput) else content))

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this to its end, which comes when the lane is lost, or whoever awaits it is cancelled."""
        task = self._loop.create_task(work)
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._address.secret)
        self._put(self._replica)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._waiting.clear()
        for task in self._running:
            task.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def _put(self, one: Any) -> None:
        if self.lost:
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(one)

    def _flush(self) -> None:
        if self._waiting and not self._paused and self._transport is not None:
            body = pickle.dumps(self._waiting, pickle.HIGHEST_PROTOCOL)
            self._waiting = []
            self._transport.write(_LENGTH.pack(len(body)) + body)


class OutputChannels:
    """A replica's lanes to the ingresses that call it. replica: its id."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._channels: dict[ReceiverAddress, asyncio.Task[OutputChannel | None]] = {}
        self._tried: dict[ReceiverAddress, float] = {}

    async def to(self, address: ReceiverAddress | None) -> OutputChannel | None:
        """The lane to an ingress, connected now if need be; None where it cannot be reached."""
        if address is None:
            return None
        task = self._channels.get(address)
        if task is None or (task.done() and self._stale(address, task.result())):
            self._forget()
            self._tried[address] = time.monotonic()
            task = self._channels[address] = asyncio.get_running_loop().create_task(self._connect(address))
        return await asyncio.shield(task)

    def _stale(self, address: ReceiverAddress, channel: OutputChannel | None) -> bool:
        return time.monotonic() - self._tried[address] > FORGET_SECONDS if channel is None else channel.lost

    def _forget(self) -> None:
        """Lanes that are lost: ingresses come and go."""
        for address, task in list(self._channels.items()):
            if task.done() and self._stale(address, task.result()):
                del self._channels[address], self._tried[address]

    async def _connect(self, address: ReceiverAddress) -> OutputChannel | None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, channel = await asyncio.get_running_loop().create_connection(
                    lambda: OutputChannel(address, self._replica), address.host, address.port
                )
                return channel
        return None
