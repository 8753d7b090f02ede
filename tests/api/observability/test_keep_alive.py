"""Keep-alive comments that are due in the turn in which a response ends: nothing is sent after the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.server.errors import ApiError
from windlass.server.serving.streaming import DONE, KEEP_ALIVE, Exchange

pytestmark = pytest.mark.anyio

EVENT = b"data: {}\n\n"


class Connection:
    """A server's handling of messages: in order, each once the client has read enough, none after the last."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.takes_more = asyncio.Event()
        self.takes_more.set()
        self.most = 10**9  # messages that it accepts before it pauses

    async def send(self, message: Any) -> None:
        if not self.takes_more.is_set():
            await self.takes_more.wait()
        ended = bool(self.sent) and not self.sent[-1].get("more_body", True)
        begins = message["type"] == "http.response.start"
        if ended or begins == bool(self.sent):
            raise RuntimeError(f"Unexpected ASGI message {message}")
        self.sent.append(message)
        if len(self.sent) == self.most:
            self.takes_more.clear()
            asyncio.get_running_loop().call_later(0.01, self.takes_more.set)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def answer(connection: Connection, work: Callable[[Exchange], Awaitable[None]]) -> None:
    """Run an exchange and check that all of its tasks end."""
    state: Any = SimpleNamespace(
        settings=SimpleNamespace(stream_comment_seconds=100.0, retry_after_seconds=1),
        callers=SimpleNamespace(running=lambda caller: nullcontext()),
        metrics=SimpleNamespace(count_error=lambda code: None),
        register=lambda exchange: None,
        unregister=lambda exchange: None,
    )
    exchange, before = Exchange(state, work), asyncio.all_tasks()
    scope: Any = {"type": "http", "path": "/", "headers": [], "windlass.request_id": "r"}
    await exchange(scope, connection.receive, connection.send)
    found: list[object] = await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)
    task = exchange._keep_alive_task
    found.append(task.exception() if task is not None and task.done() and not task.cancelled() else None)
    assert not [error for error in found if isinstance(error, Exception)]
    assert connection.sent[-1]["more_body"] is False


async def test_a_comment_is_due_with_the_last_output() -> None:
    async def work(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange._tick()
        await exchange.finish(EVENT)

    connection = Connection()
    await answer(connection, work)
    assert connection.body == EVENT + DONE


async def test_a_comment_is_due_when_the_request_fails() -> None:
    async def work(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange._tick()
        raise ApiError(503, "no")

    connection = Connection()
    await answer(connection, work)
    assert connection.sent[0]["status"] == 503 and b'"no"' in connection.body


@pytest.mark.parametrize("most", [1, 2])
async def test_a_comment_waits_for_the_client_when_the_response_ends(most: int) -> None:
    """Whether the headers or the comment had to wait: both are complete, and before the end."""

    async def work(exchange: Exchange) -> None:
        exchange.begin_stream()
        connection.takes_more.clear()
        asyncio.get_running_loop().call_later(0.01, connection.takes_more.set)
        exchange._tick()
        await asyncio.sleep(0)  # the comment has begun
        connection.most = most
        await exchange.finish(EVENT)

    connection = Connection()
    await answer(connection, work)
    assert connection.body.replace(KEEP_ALIVE, b"") == EVENT + DONE


async def test_a_due_comment_is_sent() -> None:
    async def work(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange._tick()
        await asyncio.sleep(0.01)
        await exchange.finish(EVENT)

    connection = Connection()
    await answer(connection, work)
    assert connection.body == KEEP_ALIVE + EVENT + DONE


async def test_a_keep_alive_that_waited_for_the_client_precedes_later_events() -> None:
    """Some APIs render numbered events as keep-alives."""
    later = b"data: 2\n\n"

    async def work(exchange: Exchange) -> None:
        exchange.begin_stream()
        await exchange.send_events(EVENT)
        connection.takes_more.clear()
        exchange._tick()  # an event was sent since the last tick
        exchange._tick()
        await asyncio.sleep(0)  # the keep-alive has begun
        connection.takes_more.set()
        await exchange.send_events(later)
        await exchange.finish()

    connection = Connection()
    await answer(connection, work)
    assert connection.body == EVENT + KEEP_ALIVE + later + DONE
