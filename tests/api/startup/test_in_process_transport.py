"""The transport of `windlass.LLM` over toy apps that fail before, within and after their response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from windlass.clients import APIConnectionError, AsyncClient, Client
from windlass.server.startup.in_process import AppTransport, LoopThread, ThreadTransport

EVENT = b'data: {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'


def failing(after: int, *, complete: bool = False) -> Any:
    """An app that raises after some messages of its response. complete: the last of them ends the response."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        messages: list[dict[str, Any]] = [{"type": "http.response.start", "status": 200, "headers": headers}]
        messages += [{"type": "http.response.body", "body": EVENT, "more_body": True}] * 2
        if complete:
            messages[after - 1] = {**messages[after - 1], "more_body": False}
        for message in messages[:after]:
            await send(message)
        raise KeyError("the app broke")

    return app


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    thread.start()
    yield thread
    thread.end(asyncio.sleep(0))
    thread.close()


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_within_the_response_breaks_the_connection(
    after: int, threaded: bool, loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    transport = AppTransport(failing(after))

    async def ask() -> list[str]:
        async with AsyncClient("http://x", transport=transport) as client:
            return [chunk.text async for chunk in await client.completions("a", stream=True)]

    def ask_from_a_thread() -> list[str]:
        with Client("http://x", transport=ThreadTransport(transport, loop.run)) as client:
            return [chunk.text for chunk in client.completions("a", stream=True)]

    with pytest.raises(APIConnectionError, match="the app broke") as caught:
        ask_from_a_thread() if threaded else asyncio.run(ask())
    assert isinstance(caught.value.__cause__, httpx.ReadError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    (line,) = [record for record in caplog.records if record.name == "windlass.server"]
    assert line.exc_info is not None and line.exc_info[0] is KeyError


def test_an_error_after_the_response_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Like Starlette, which has sent a 500 when it raises."""

    async def ask() -> bytes:
        async with httpx.AsyncClient(transport=AppTransport(failing(3, complete=True))) as http:
            return (await http.get("http://x/")).content

    assert asyncio.run(ask()) == EVENT * 2
    assert [record.name for record in caplog.records if record.exc_info] == ["windlass.server"]
