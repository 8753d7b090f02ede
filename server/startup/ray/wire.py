"""Messages between the HTTP side and the replicas, and output channels: direct connections that carry outputs."""

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

CONNECT_SECONDS = 2.0
RETRY_SECONDS = 30.0  # until an address that could not be reached is tried again
SECRET_SECONDS = 5.0  # for a new connection to send the secret
_SECRET_BYTES = 32
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """Options of a deployment for each of its processes. model: as the operator named it.

    engines_per_machine: engines that may share a machine. listener_actor: the name of the actor that holds the listening
    socket; None if Ray's proxies listen.
    """

    model: str | None
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    engines_per_machine: int
    listener_actor: str | None = None
    version: str = __version__

    def check(self) -> None:
        """Raise RuntimeError if another version of Windlass created the deployment."""
        if self.version != __version__:
            raise RuntimeError(version_mismatch(self.version))


@dataclass(frozen=True, slots=True)
class ReceiverAddress:
    """The address at which an ingress receives outputs. secret: sent first by each connection."""

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A request for a replica. seconds: until its deadline, since clocks differ between machines.

    digests: keys of the prompt's blocks, of which a replica may hold `max_blocks`. avoid: ids of replicas that could not take
    the call. adapter: the one that the request names. channel, number: receiver of the outputs, and the call's number there.
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
    def from_request(cls, request: EngineRequest) -> ReplicaCall:
        deadline = request.deadline
        return cls(replace(request, deadline=None), None if deadline is None else deadline - time.monotonic())

    def to_local_request(self) -> EngineRequest:
        """The request with its deadline on this machine's clock."""
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        return replace(self.request, deadline=deadline)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """State of one replica, including a draining one. name: its id. stats: None if its engine has none now."""

    name: str
    state: str
    restarts: int
    stats: EngineStats | None = None


class CallFailedError(Exception):
    """A replica ended a call with an error."""

    def __init__(self, replica: str, error: EngineError) -> None:
        super().__init__(replica, error)
        self.replica, self.error = replica, error


class CallLostError(Exception):
    """A replica, or the connection to it, was lost. replica: its id, if known."""

    def __init__(self, replica: str = "") -> None:
        super().__init__(replica)
        self.replica = replica


# An event of a call. None: no more outputs this way.
CallEvent = list[RequestOutput] | CallFailedError | CallLostError | None


def version_mismatch(theirs: str) -> str:
    """The error message if two versions meet."""
    return (
        f"this machine has Windlass {__version__}, the deployment is of {theirs}: install one version on every machine of the "
        "cluster, or delete the deployment first (windlass ray delete)"
    )


# ---- the ingress's end -----------------------------------------------------------------------------------------------
class OutputReceiver:
    """Receives the outputs of replicas and passes them to the callback of each call."""

    def __init__(self) -> None:
        self.address: ReceiverAddress | None = None
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.connections: set[_Incoming] = set()
        self._callbacks: dict[int, Callable[[CallEvent], None]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> ReceiverAddress:
        """Listen at a free port of this address of the machine. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Incoming(self), host, 0)
        self.address = ReceiverAddress(host, self._server.sockets[0].getsockname()[1], self.secret)
        return self.address

    async def stop(self) -> None:
        """Stop listening and close all channels."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()

    def open(self, number: int, callback: Callable[[CallEvent], None]) -> None:
        """Pass the events of this call to `callback`."""
        self._callbacks[number] = callback

    def close(self, number: int) -> None:
        """Drop further events of this call."""
        self._callbacks.pop(number, None)

    def deliver(self, number: int, event: CallEvent) -> bool:
        """Pass on an event. Returns whether the call is open."""
        if (callback := self._callbacks.get(number)) is not None:
            callback(event)
        return callback is not None


class _Incoming(asyncio.Protocol):
    """The connection of one replica."""

    def __init__(self, receiver: OutputReceiver) -> None:
        self._receiver = receiver
        self._buffer = bytearray()
        self._trusted = False
        self._replica = ""
        self._numbers: set[int] = set()  # of calls that have begun here and not ended
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which Ray uses, does not inherit from it
        self._timer = asyncio.get_running_loop().call_later(SECRET_SECONDS, self.abort)
        self._receiver.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._trusted and not self._check_secret():
            return
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            for message in pickle.loads(self._buffer[start + _LENGTH.size : end]):
                self._handle(message)
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._receiver.connections.discard(self)
        for number in self._numbers:
            self._receiver.deliver(number, CallLostError(self._replica))

    def _check_secret(self) -> bool:
        if len(self._buffer) < _SECRET_BYTES:
            return False
        self._trusted = hmac.compare_digest(bytes(self._buffer[:_SECRET_BYTES]), self._receiver.secret)
        if self._trusted and self._timer is not None:
            self._timer.cancel()
            del self._buffer[:_SECRET_BYTES]
        else:
            self._buffer.clear()
            self.abort()
        return self._trusted

    def _handle(self, message: Any) -> None:
        if not self._replica:
            self._replica = str(message)
            return
        number, content = message
        if type(content) is not tuple:
            self._receiver.deliver(number, content)
            self._numbers.discard(number)
        elif self._receiver.deliver(number, [RequestOutput(*content)]):
            self._numbers.add(number)
        else:
            self._numbers.discard(number)


# ---- the replica's end -----------------------------------------------------------------------------------------------
class OutputChannel(asyncio.Protocol):
    """A connection to an ingress. Messages of one turn of the event loop share a frame.

    Sending never blocks: the size of unsent data is limited by the requests of the calls.
    """

    def __init__(self, address: ReceiverAddress, replica: str) -> None:
        self.lost = False
        self._address, self._replica = address, replica
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Any] = []
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._running: set[asyncio.Task[None]] = set()

    def send(self, number: int, content: RequestOutput | CallFailedError | None) -> None:
        """Send it at the end of this turn of the loop; dropped if the connection is lost. None: the call has ended."""
        self._put((number, output_fields(content) if isinstance(content, RequestOutput) else content))

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work to its end. It is cancelled if the connection is lost or the caller is cancelled."""
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

    def _put(self, message: Any) -> None:
        if self.lost:
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(message)

    def _flush(self) -> None:
        if self._waiting and not self._paused and self._transport is not None:
            body = pickle.dumps(self._waiting, pickle.HIGHEST_PROTOCOL)
            self._waiting = []
            self._transport.write(_LENGTH.pack(len(body)) + body)


class OutputChannels:
    """The channels of a replica to the ingresses that call it. replica: its id."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._channels: dict[ReceiverAddress, asyncio.Task[OutputChannel | None]] = {}
        self._tried: dict[ReceiverAddress, float] = {}

    async def to(self, address: ReceiverAddress | None) -> OutputChannel | None:
        """The channel to an ingress, connected if necessary; None if the address cannot be reached."""
        if address is None:
            return None
        task = self._channels.get(address)
        if task is None or self._is_stale(address, task):
            for other, connecting in list(self._channels.items()):  # ingresses come and go
                if self._is_stale(other, connecting):
                    del self._channels[other], self._tried[other]
            self._tried[address] = time.monotonic()
            task = self._channels[address] = asyncio.get_running_loop().create_task(self._connect(address))
        return await asyncio.shield(task)

    def _is_stale(self, address: ReceiverAddress, task: asyncio.Task[OutputChannel | None]) -> bool:
        if not task.done():
            return False
        channel = task.result()
        return time.monotonic() - self._tried[address] > RETRY_SECONDS if channel is None else channel.lost

    async def _connect(self, address: ReceiverAddress) -> OutputChannel | None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, channel = await asyncio.get_running_loop().create_connection(
                    lambda: OutputChannel(address, self._replica), address.host, address.port
                )
                return channel
        return None
