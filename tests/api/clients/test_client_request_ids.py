"""Every error has a request id that is also in the server's log, with or without a response."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.live_server import live_server
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_http import Exchange, answer, drop, events, scripted_server, silence

from windlass.clients import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    ResponseError,
    RetryPolicy,
    ServerError,
)
from windlass.engine.errors import DeadlineError

pytestmark = pytest.mark.anyio
DONE = {"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
HEX = re.compile("[0-9a-f]{32}")


async def failure(kind: str, url: str, read: float = 10.0, **options: Any) -> APIError:
    """The error of a completion that must fail. read: read timeout in seconds."""
    timeout = httpx.Timeout(10.0, read=read)
    async with any_client(kind, url, timeout=timeout, retry=RetryPolicy(max_retries=0)) as client:
        with pytest.raises(APIError) as caught:
            await client.completions("x", **options)
    return caught.value


async def test_each_call_has_one_id_for_all_retries(kind: str) -> None:
    busy = answer({"error": {"message": "busy"}}, "503 Unavailable")
    async with scripted_client(
        kind, busy, answer(DONE), answer(DONE), answer({"status": "ready"}), retry=RetryPolicy(first_delay=0.01)
    ) as (server, client):
        await client.completions("x")
        await client.completions("x")
        await client.health()
    first, again, second, third = (request.headers["x-request-id"] for request in server.requests)
    assert first == again and len({first, second, third}) == 3
    assert all(HEX.fullmatch(name) for name in (first, second, third))


async def test_request_ids_of_the_caller_are_sent(kind: str) -> None:
    async with scripted_client(kind, answer(DONE), headers={"X-Request-Id": "all"}) as (server, client):
        await client.completions("x")
        await client.completions("x", request_id="mine-1")
        await client.completions("x", request_id="no spaces")  # the server refuses it
    first, second, third = server.requests
    assert [request.headers["x-request-id"] for request in server.requests] == ["all", "mine-1", "all"]
    assert (second.json["request_id"], third.json["request_id"]) == ("mine-1", "no spaces")
    assert "request_id" not in first.json


async def test_request_id_of_the_response_takes_precedence(kind: str) -> None:
    with scripted_server(answer({"error": {"message": "no"}}, "400 Bad", x_request_id="theirs")) as server:
        error = await failure(kind, server.url, request_id="mine")
    assert isinstance(error, APIStatusError) and error.request_id == "theirs"


async def anonymous(exchange: Exchange) -> None:
    """An error of a server without request ids."""
    await exchange.send(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")


async def nothing(exchange: Exchange) -> None:
    """An incomplete response without a request id."""
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{")
    exchange.writer.close()


@pytest.mark.parametrize(
    ("script", "kind_of_error", "read"),
    [
        (drop, APIConnectionError, 10.0),
        (silence, APITimeoutError, 0.3),
        (nothing, APIConnectionError, 10.0),
        (anonymous, ServerError, 10.0),
    ],
    ids=["dropped", "silent", "incomplete response", "error of a proxy"],
)
async def test_errors_without_a_response_have_the_sent_id(
    kind: str, script: Any, kind_of_error: type[APIError], read: float
) -> None:
    with scripted_server(script) as server:
        error = await failure(kind, server.url, read=read)
        while not server.requests:
            await asyncio.sleep(0.01)
    assert type(error) is kind_of_error
    assert error.request_id == server.requests[0].headers["x-request-id"] and str(error.request_id) in str(error)


async def test_connection_refused(kind: str) -> None:
    error = await failure(kind, "http://127.0.0.1:1", request_id="mine")
    assert type(error) is APIConnectionError and error.request_id == "mine"


async def test_errors_of_streams_have_the_id(kind: str) -> None:
    async with scripted_client(kind, events({"id": "c", "choices": []}, end=False)) as (server, client):
        stream = await client.completions("x", stream=True)
        with pytest.raises(APIConnectionError, match="broke") as caught:
            await stream.until_done()
    assert caught.value.request_id == stream.request_id == "req-1"  # the id of the response
    with scripted_server(answer(b"no stream", content_type="text/plain", x_request_id="")) as server:
        error = await failure(kind, server.url, stream=True)
    assert isinstance(error, ResponseError) and error.request_id == server.requests[0].headers["x-request-id"]


async def test_pool_timeout_is_explained() -> None:
    with scripted_server(silence) as server:
        timeout = httpx.Timeout(30, pool=0.1)
        async with AsyncClient(server.url, max_connections=1, timeout=timeout) as client:
            first = asyncio.create_task(client.completions("x"))
            while not server.requests:
                await asyncio.sleep(0.01)
            with pytest.raises(APITimeoutError, match="max_connections") as caught:
                await client.completions("x", request_id="second")
            first.cancel()
    assert caught.value.request_id == "second" and len(server.requests) == 1


async def test_keepalive_options(kind: str) -> None:
    with scripted_server(answer({"status": "ready"})) as server:
        for options, connections in (({}, 1), ({"keepalive_expiry": 0.0}, 3), ({"max_keepalive_connections": 0}, 3)):
            before = server.connections
            async with any_client(kind, server.url, **options) as client:
                for _ in range(3):
                    await client.health()
            assert server.connections - before == connections


# ---- the log of the server -------------------------------------------------------------------------------------------
@pytest.fixture
async def lines(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Any]:
    """A function that waits for a line of the server's log and returns it."""
    caplog.set_level(logging.INFO, logger="windlass.server")

    async def find(text: str) -> str:
        for _ in range(500):
            found = [record.getMessage() for record in caplog.records if text in record.getMessage()]
            if found:
                return found[0]
            await asyncio.sleep(0.01)
        raise AssertionError(f"no line has {text!r}")

    yield find


@pytest.mark.quick_cases(1)
async def test_id_of_a_timeout_is_in_the_server_log(kind: str, lines: Any) -> None:
    with live_server(ScriptedEngine(first_delay=20.0)) as live:
        error = await failure(kind, live.url, read=1.0)
        assert isinstance(error, APITimeoutError)
        assert "the client disconnected" in await lines(str(error.request_id))


async def test_id_of_a_closed_stream_is_in_the_server_log(kind: str, lines: Any) -> None:
    with live_server(ScriptedEngine(delay=0.05)) as live:
        async with any_client(kind, live.url) as client:
            stream = await client.completions("x", max_tokens=200, stream=True)
            await anext(stream)
            await stream.aclose()
            assert "the client disconnected" in await lines(stream.request_id)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_server_errors_are_in_the_server_log(kind: str, lines: Any, stream: bool) -> None:
    failures = [
        (RuntimeError("a defect"), 500, "failed"),
        (DeadlineError("too late"), 504, "answered 504: too late"),
    ]
    for raised, status, says in failures:
        with live_server(ScriptedEngine(refuse=lambda request, raised=raised: raised)) as live:
            error = await failure(kind, live.url, stream=stream)
            assert isinstance(error, ServerError) and error.status == status
            assert says in await lines(str(error.request_id))


async def test_client_errors_are_not_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live_server() as live:
        error = await failure(kind, live.url, temperature=-1)
        async with any_client(kind, live.url) as client:
            await client.completions("x", max_tokens=1)
    assert error.status == 400 and not [record for record in caplog.records if record.name == "windlass.server"]
