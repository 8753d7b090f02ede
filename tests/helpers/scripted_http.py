"""Scripted HTTP/1.1 servers on real sockets: any server, and an OpenAI-compatible one that records times of generations."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

TICK_SECONDS = 0.001

Script = Callable[["Exchange"], Awaitable[None]]
GenerationScript = Callable[["Generation"], Awaitable[None]]


@dataclass
class Request:
    """One request as it arrived. Header names are in lower case."""

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
    """One request and the connection that a script responds on."""

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
    """`scripts` respond to the requests in order; the last one also to all further requests."""

    scripts: list[Script] = field(default_factory=list)
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    disconnects: threading.Event = field(default_factory=threading.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                try:
                    await self.respond(Exchange(request, reader, writer, self))
                except ConnectionError:  # the client left while the script was still sending
                    self.disconnects.set()
                    raise
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def respond(self, exchange: Exchange) -> None:
        await self.scripts[min(len(self.requests), len(self.scripts)) - 1](exchange)


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, asyncio.get_running_loop().time())


@dataclass
class Generation(Exchange):
    """One generation request and its recorded response, in seconds of the monotonic clock.

    sent: send times of the chunks with tokens.
    """

    arrived: float
    sent: list[float] = field(default_factory=list)
    ended: float | None = None
    disconnected: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return self.request.json

    @property
    def chat(self) -> bool:
        return self.request.path.endswith("chat/completions")

    async def head(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: req-7\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def data(self, payload: Any) -> None:
        """Send one event. Strings are sent unchanged."""
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.chunk(b"data: " + text.encode() + b"\n\n")

    async def token(self, text: Any = "word", reason: str | None = None, **fields: Any) -> None:
        """Send one chunk with a token, and record its time."""
        self.sent.append(time.monotonic())
        part: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        await self.data({"id": "x", "choices": [{"index": 0, **part, "finish_reason": reason, **fields}]})

    async def usage(self, prompt: int, completion: int, **details: Any) -> None:
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        await self.data({"id": "x", "choices": [], "usage": {**counts, **details}})

    async def done(self) -> None:
        """Send [DONE] and the end of the body, and record the time."""
        self.ended = time.monotonic()
        await self.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def wait_disconnect(self) -> None:
        self.disconnected = await self.client_gone()


@dataclass
class ScriptedLLM(ScriptedServer):
    """An OpenAI-compatible server whose `generation_scripts` respond to generation requests, as `scripts` do elsewhere.

    paths: scripts of other paths. lag: maximum delay of its event loop in seconds, the precision of recorded times.
    max_running: maximum number of simultaneous generations.
    """

    generation_scripts: tuple[GenerationScript, ...] = ()
    paths: dict[str, Script] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    lag: float = 0.0
    max_running: int = 0

    def __post_init__(self) -> None:
        self._running = 0
        self._numbers = itertools.count()
        self._ticker: asyncio.Task[None] | None = None

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [generation.body for generation in self.generations]

    async def respond(self, exchange: Exchange) -> None:
        arrived = time.monotonic()
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._measure_lag())
        path = exchange.request.path
        if path not in ("/v1/completions", "/v1/chat/completions"):
            await self.paths.get(path, answer({"error": {"message": "no such path"}}, "404 Not Found"))(exchange)
            return
        generation = Generation(exchange.request, exchange.reader, exchange.writer, self, arrived)
        self.generations.append(generation)
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        try:
            await self.generation_scripts[min(next(self._numbers), len(self.generation_scripts) - 1)](generation)
        finally:
            self._running -= 1

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.lag = max(self.lag, time.monotonic() - due)


AnyServer = TypeVar("AnyServer", bound=ScriptedServer)


@contextmanager
def scripted_server(*scripts: Script) -> Iterator[ScriptedServer]:
    """Run the server on 127.0.0.1, in a thread."""
    with _running(ScriptedServer(list(scripts))) as server:
        yield server


@contextmanager
def scripted_llm(
    *scripts: GenerationScript, model: dict[str, Any] | None = None, others: dict[str, Script] | None = None
) -> Iterator[ScriptedLLM]:
    """Run an OpenAI-compatible server. model: further fields of its model. others: scripts of other paths."""
    entry = {"id": "scripted", "object": "model", "owned_by": "tests", **(model or {})}
    paths = {"/v1/models": answer({"object": "list", "data": [entry]}), **(others or {})}
    with _running(ScriptedLLM(generation_scripts=scripts, paths=paths)) as server:
        yield server


@contextmanager
def _running(server: AnyServer) -> Iterator[AnyServer]:
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
    """A complete JSON response (bytes are sent unchanged). Header names are given with underscores."""

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
    """A stream of events. Strings and bytes are sent unchanged as data.

    taken: released by the test for each received event, before which the next one is not sent. end: finish the chunked
    body properly. hang: then wait until the client disconnects, and set `disconnects`. cut: size of the sent pieces in bytes.
    """

    async def script(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"x-request-id: req-1\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for number, payload in enumerate(payloads):
            if taken is not None and number:
                assert await asyncio.to_thread(taken.acquire, timeout=30), "an event did not arrive"
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


def stream(*pauses: float, start: float = 0.0) -> GenerationScript:
    """A complete stream: headers after `start` seconds, a token after each pause, the last with a finish reason."""

    async def script(generation: Generation) -> None:
        await asyncio.sleep(start)
        await generation.head()
        for number, pause in enumerate(pauses, 1):
            await asyncio.sleep(pause)
            await generation.token(f" w{number}", "length" if number == len(pauses) else None)
        await generation.usage(5, len(pauses))
        await generation.done()

    return script


async def full_stream(generation: Generation) -> None:
    """A complete stream with the requested number of tokens."""
    await generation.head()
    count = generation.body["max_tokens"]
    for number in range(1, count + 1):
        await generation.token(f" w{number}", "length" if number == count else None)
    prompt = generation.body.get("prompt")
    await generation.usage(len(prompt) if isinstance(prompt, list) else 1, count)
    await generation.done()
