"""Scripted OpenAI-compatible server on a socket that records its actions with monotonic times.

Each generation request is answered by the next script (the last one answers all further requests). The server records the
largest delay of its event loop, which is the precision of the times.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers.scripted_http import Exchange, ScriptedServer, answer, scripted_server

Play = Callable[["Performance"], Awaitable[None]]
TICK = 0.001


@dataclass
class Performance:
    """Generation request and its response. sent: time of each chunk with tokens."""

    exchange: Exchange
    arrived: float
    sent: list[float] = field(default_factory=list)
    ended: float | None = None
    client_gone: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return self.exchange.request.json

    @property
    def chat(self) -> bool:
        return self.exchange.request.path.endswith("chat/completions")

    async def head(self, content_type: str = "text/event-stream", extra: bytes = b"") -> None:
        await self.exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: " + content_type.encode() + b"\r\nx-request-id: req-7\r\n"
            b"transfer-encoding: chunked\r\n" + extra + b"\r\n"
        )

    async def data(self, payload: Any) -> None:
        """Send an event; strings are sent unchanged."""
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.exchange.chunk(b"data: " + text.encode() + b"\n\n")

    def chunk_of(self, text: str | None, reason: str | None = None, **fields: Any) -> dict[str, Any]:
        part: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"id": "x", "choices": [{"index": 0, **part, "finish_reason": reason, **fields}]}

    async def token(self, text: str = "word", reason: str | None = None, **fields: Any) -> None:
        """Send a chunk with a token and record it."""
        self.sent.append(time.monotonic())
        await self.data(self.chunk_of(text, reason, **fields))

    async def usage(self, prompt: int, completion: int, **details: Any) -> None:
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        await self.data({"id": "x", "choices": [], "usage": {**counts, **details}})

    async def done(self) -> None:
        """Send [DONE] and the end of the body, and record it."""
        self.ended = time.monotonic()
        await self.exchange.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def wait_gone(self) -> None:
        self.client_gone = await self.exchange.client_gone()


@dataclass
class ScriptedLLM:
    """Running server. lag: largest delay of its event loop in seconds. most: largest number of concurrent requests."""

    server: ScriptedServer
    performances: list[Performance] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    lag: float = 0.0
    now: int = 0
    most: int = 0

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [performance.body for performance in self.performances]


@contextmanager
def scripted_llm(
    *plays: Play,
    model: dict[str, Any] | None = None,
    others: dict[str, Callable[[Exchange], Awaitable[None]]] | None = None,
) -> Iterator[ScriptedLLM]:
    """Run the server. model: further fields of the model object. others: handler of other paths, 404 by default."""
    entry = {"id": "scripted", "object": "model", "owned_by": "tests", **(model or {})}
    paths = {"/v1/models": answer({"object": "list", "data": [entry]}), **(others or {})}
    numbers = itertools.count()
    tickers: list[asyncio.Task[None]] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            llm.lag = max(llm.lag, time.monotonic() - due)

    async def script(exchange: Exchange) -> None:
        arrived = time.monotonic()
        if not tickers:
            tickers.append(asyncio.get_running_loop().create_task(tick()))
        path = exchange.request.path
        if path not in ("/v1/completions", "/v1/chat/completions"):
            llm.control.append(path)
            await paths.get(path, answer({"error": {"message": "no such path"}}, "404 Not Found"))(exchange)
            return
        performance = Performance(exchange, arrived)
        llm.performances.append(performance)
        play = plays[min(next(numbers), len(plays) - 1)]
        llm.now += 1
        llm.most = max(llm.most, llm.now)
        try:
            await play(performance)
        finally:
            llm.now -= 1

    with scripted_server(script) as server:
        llm = ScriptedLLM(server)
        yield llm


def stream(*pauses: float, start: float = 0.0, usage: bool = True, prompt: int = 5) -> Play:
    """Script of a stream: headers after `start`, then a token after each pause, the last with the finish reason."""

    async def play(performance: Performance) -> None:
        await asyncio.sleep(start)
        await performance.head()
        for number, pause in enumerate(pauses, 1):
            await asyncio.sleep(pause)
            await performance.token(f" w{number}", "length" if number == len(pauses) else None)
        if usage:
            await performance.usage(prompt, len(pauses))
        await performance.done()

    return play


def asked() -> Play:
    """Script of a stream with the requested number of tokens, and their usage."""

    async def play(performance: Performance) -> None:
        body = performance.body
        await performance.head()
        count = body["max_tokens"]
        for number in range(1, count + 1):
            await performance.token(f" w{number}", "length" if number == count else None)
        prompt = body.get("prompt")
        await performance.usage(len(prompt) if isinstance(prompt, list) else 1, count)
        await performance.done()

    return play
