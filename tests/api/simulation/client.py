"""Simulated clients: each sends its requests one after the other, reads what comes, and writes down how each ended.

A client may be slow, stop reading, leave in the middle or send slowly; what it then sees is written down like everything else. It
knows HTTP and server-sent events, and nothing of what the server should have said.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.network import End
from simulation.workload import Ask

if TYPE_CHECKING:
    from simulation.world import World

NEVER_READS = 200.0  # seconds that a client which stops reading takes before it goes on
# Errors of answers that a connection gets before anybody has read its request, whose id is one of the server's own.
NAMELESS = {"too_many_connections", "header_timeout", "malformed_request"}
READER_LIMIT = 1024  # bytes a client's program holds before it stops its system from taking more


class BrokenError(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


@dataclass
class Record:
    """How one request ended, as its client saw it. Seconds are simulated.

    texts, finishes: by choice. errors: bodies of errors, in an answer or a stream. left: its client went away by itself.
    broken: why the answer is not whole, where nobody left. done: `[DONE]` came. after_done: something came behind it.
    """

    ask: Ask
    sent_at: float
    sent_whole_at: float = 0.0
    ended_at: float = 0.0
    status: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    left: bool = False
    broken: str = ""
    done: bool = False
    after_done: bool = False
    notes: list[str] = field(default_factory=list)  # whatever is wrong with the form of what came
    end: End | None = None

    @property
    def codes(self) -> list[str]:
        return [str(error.get("code")) for error in self.errors]


class SimulatedClient:
    def __init__(self, world: World, name: int) -> None:
        self._world = world
        self._address = (f"10.1.0.{name}", 40_000 + name)
        self._end: End | None = None
        self._reader: asyncio.StreamReader

    async def run(self, asks: list[Ask]) -> list[Record]:
        """Send them one after the other."""
        records = []
        for ask in asks:
            await asyncio.sleep(ask.pause)
            records.append(await self.send(ask))
        if self._end is not None:
            self._end.close()
        return records

    async def send(self, ask: Ask) -> Record:
        """Send one and wait for its end."""
        world, loop = self._world, self._world.loop
        if self._end is None or ask.fresh or self._end.is_closing():
            self._dial()
        assert self._end is not None
        record = Record(ask, loop.time(), end=self._end)
        world.records.append(record)
        exchange = loop.create_task(self._exchange(ask, record))
        try:
            if ask.reader == "leaves":
                done, _ = await asyncio.wait({exchange}, timeout=ask.leaves_after)
                if not done:
                    record.left = True
                    exchange.cancel()
                    await asyncio.wait({exchange})
                    self._end.abort() if world.rng.random() < 0.5 else self._end.close()
                    self._end = None
                    return record
            await exchange
        except (BrokenError, OSError, EOFError) as error:
            record.broken = repr(error)
            self._end.abort()
            self._end = None
        finally:
            record.ended_at = loop.time()
        return record

    def _dial(self) -> None:
        world = self._world
        if self._end is not None:
            self._end.close()
        self._reader = asyncio.StreamReader(READER_LIMIT, world.loop)
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=world.loop)
        self._end = world.listener.dial(world.weather(), self._address)
        self._end.open(protocol)

    async def _exchange(self, ask: Ask, record: Record) -> None:
        await self._send(ask, record)
        await self._receive(ask, record)

    async def _send(self, ask: Ask, record: Record) -> None:
        head, body = ask.head_and_body()
        end = self._end
        assert end is not None
        if ask.sender == "quick":
            end.write(head + body)
        else:
            data, rng = head + body, self._world.rng
            stop_at = rng.randrange(1, len(data)) if ask.sender == "stops" else len(data)
            at = 0
            while at < stop_at:
                size = rng.randint(1, 60)
                end.write(data[at : min(at + size, stop_at)])
                at += size
                await asyncio.sleep(rng.expovariate(4.0))
        record.sent_whole_at = self._world.loop.time()

    async def _receive(self, ask: Ask, record: Record) -> None:
        reader = self._reader
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.rstrip("\r\n").split("\r\n")
        version, status, *_ = status_line.split(" ")
        if version != "HTTP/1.1":
            raise BrokenError(f"not HTTP: {status_line[:100]!r}")
        record.status = int(status)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        events = headers.get("content-type", "").startswith("text/event-stream")
        if events and record.status != 200:
            record.notes.append("a stream that failed before it began")
        kept, begun = b"", False
        async for piece in self._body(headers):
            await self._behave(ask, first=not begun)
            begun = True
            kept += piece
            if events:
                *whole, kept = kept.split(b"\n\n")
                for event in whole:
                    _take_event(event.decode(), record)
        if events:
            if kept:
                record.notes.append(f"half an event at the end: {kept[:100]!r}")
        elif headers.get("content-type", "").startswith("application/json"):
            _take_json(json.loads(kept), record)
        answered = headers.get("x-request-id", ask.request_id)
        nameless = NAMELESS & set(record.codes) and re.fullmatch("[0-9a-f]{32}", answered)
        if answered != ask.request_id and not nameless:
            record.notes.append(f"the answer is that of {answered}")
        if headers.get("connection", "").lower() == "close":
            assert self._end is not None
            self._end.close()

    async def _body(self, headers: dict[str, str]) -> Any:
        reader = self._reader
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield await self._exactly(size)
                if await reader.readexactly(2) != b"\r\n":
                    raise BrokenError("a chunk without its end")
            await reader.readexactly(2)
        elif length := int(headers.get("content-length", "0")):
            yield await self._exactly(length)

    async def _exactly(self, size: int) -> bytes:
        """Reads as it comes, so that a reader with a small buffer holds its system up."""
        data = b""
        while len(data) < size:
            piece = await self._reader.read(min(512, size - len(data)))
            if not piece:
                raise BrokenError("the connection ended in the middle of the body")
            data += piece
        return data

    async def _behave(self, ask: Ask, *, first: bool) -> None:
        rng = self._world.rng
        if ask.reader == "slow" and rng.random() < 0.3:
            await asyncio.sleep(rng.expovariate(1.0))
        elif ask.reader == "stops" and first:
            await asyncio.sleep(NEVER_READS)


def _take_event(event: str, record: Record) -> None:
    if event.startswith(":"):
        return
    data = event.removeprefix("data: ")
    if data == event or "\n" in event:
        record.notes.append(f"no event: {event[:100]!r}")
    if record.done:
        record.after_done = True
    if data == "[DONE]":
        record.done = True
        return
    _take_json(json.loads(data), record)


def _take_json(content: Any, record: Record) -> None:
    if not isinstance(content, dict):
        return
    if "error" in content:
        record.errors.append(content["error"])
        return
    if content.get("usage") is not None:
        record.usage = content["usage"]
    for choice in content.get("choices", ()):
        index = choice["index"]
        if index in record.finishes:
            record.notes.append(f"choice {index} goes on after its end")
        part = choice.get("text")
        if part is None:
            part = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        record.texts[index] = record.texts.get(index, "") + part
        if choice.get("finish_reason") is not None:
            record.finishes.setdefault(index, []).append(choice["finish_reason"])
