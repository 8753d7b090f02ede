"""HTTP/1.1 server on a raw socket with scripted responses, which records requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Request:
    """Received request. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    time: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Exchange:
    """Connection and request, for scripts."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: ScriptedServer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def client_gone(self, seconds: float = 60.0) -> bool:
        """Return whether the client closes its side within this time."""
        try:
            return await asyncio.wait_for(self.reader.read(1), seconds) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


@dataclass
class ScriptedServer:
    """`scripts` answer the requests in order; the last one answers all further requests too."""

    scripts: list[Script]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    disconnects: threading.Event = field(default_factory=threading.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
                try:
                    await script(Exchange(request, reader, writer, self))
                except ConnectionError:  # the client disconnected while the script was sending
                    self.disconnects.set()
                    raise
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, asyncio.get_running_loop().time())


@contextmanager
def scripted_server(*scripts: Script) -> Iterator[ScriptedServer]:
    """Run the server on 127.0.0.1 in a thread."""
    server = ScriptedServer(list(scripts))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.handle, "127.0.0.1", 0), loop).result(10)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def shut_down() -> None:
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(shut_down(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def answer(payload: Any, status: str = "200 OK", **headers: str) -> Script:
    """Send a JSON response, or bytes unchanged. Header names are given with underscores."""

    async def script(exchange: Exchange) -> None:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        fields = {"content_type": "application/json", "x_request_id": "req-1", **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        head = "\r\n".join([f"HTTP/1.1 {status}", *lines, f"content-length: {len(body)}"])
        await exchange.send(head.encode() + b"\r\n\r\n" + body)

    return script


def events(
    *payloads: Any,
    end: bool = True,
    taken: threading.Semaphore | None = None,
    hang: bool = False,
    cut: int | None = None,
) -> Script:
    """Send a stream of events; strings and bytes are sent unchanged as data.

    taken: released by the test for each received event, before which the next one is not sent.
    end: complete the chunked body. hang: then wait for the client to disconnect, and record it in `disconnects`.
    cut: size of the sent pieces in bytes.
    """

    async def script(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"x-request-id: req-1\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for number, payload in enumerate(payloads):
            if taken is not None and number:
                assert await asyncio.to_thread(taken.acquire, timeout=30), "what was sent did not arrive"
            data = payload.encode() if isinstance(payload, str) else payload
            data = data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()
            event = b"data: " + data + b"\n\n"
            for start in range(0, len(event), cut or len(event)):
                await exchange.chunk(event[start : start + (cut or len(event))])
        if hang and await exchange.client_gone():
            exchange.server.disconnects.set()
        elif end:
            await exchange.send(b"0\r\n\r\n")
        else:
            exchange.writer.close()

    return script


async def drop(exchange: Exchange) -> None:
    """Close the connection without a response."""
    exchange.writer.close()


async def silence(exchange: Exchange) -> None:
    """Send nothing until the client disconnects."""
    if await exchange.client_gone():
        exchange.server.disconnects.set()
