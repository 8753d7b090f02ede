"""Connection limits over real sockets: admission, timeouts, eviction, and connections that must not be cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from helpers.eventually import eventually
from helpers.live_server import Live, live_server
from helpers.raw_client import (
    Connect,
    answers_health,
    connector,
    crowd,
    is_open,
    read_answer,
    request,
    until_closed,
)

from windlass.server.http.connection_limits import ConnectionRegistry, ConnectionSettings, client_network
from windlass.server.http.server import HttpServer

HEALTH = request("/health")
LONG = {"prompt": "a", "max_tokens": 50_000_000, "ignore_eos": True}


@pytest.fixture
def connect() -> Iterator[Connect]:
    with connector() as connect:
        yield connect


def settings(**given: object) -> ConnectionSettings:
    return ConnectionSettings(**given)  # type: ignore[arg-type]


def with_long_context(live: Live) -> None:
    assert live.engine.info is not None
    live.engine.info = replace(live.engine.info, max_model_len=100_000_000)


def status_and_error(answer: bytes) -> tuple[int, dict[str, str]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


# ---- timeouts of requests ----------------------------------------------------------------------------------------------
def test_silent_connections_are_closed_and_partial_heads_get_408(connect):
    with live_server(connections=settings(header_seconds=0.3)) as live:
        silent, half, dripping = (connect(live.url) for _ in range(3))
        half.sendall(HEALTH[:-2])
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nx-drip: " + b"d" * 1000:
                dripping.sendall(bytes([byte]))
                time.sleep(0.02)
                if not is_open(dripping):
                    break
        assert time.monotonic() - begin < 5.0, "bytes that drip in must not buy time"
        assert until_closed(silent) == b""
        for connection in (half, dripping):
            status, error = status_and_error(until_closed(connection))
            assert (status, error["code"], error["type"]) == (408, "header_timeout", "invalid_request_error")


@pytest.mark.slow
def test_later_requests_have_the_same_header_timeout(connect):
    with live_server(connections=settings(header_seconds=0.3, idle_seconds=30.0)) as live:
        connection = connect(live.url)
        for _ in range(2):  # idle time has a limit of its own
            connection.sendall(HEALTH)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.6)
            assert is_open(connection)
        connection.sendall(HEALTH[:10])
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed(connect):
    with live_server(connections=settings(idle_seconds=0.3)) as live:
        connection = connect(live.url)
        connection.sendall(HEALTH)
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_an_unused_body_does_not_keep_a_connection_open(connect):
    with live_server(connections=settings(idle_seconds=0.4)) as live:
        connection = connect(live.url)
        connection.sendall(b"POST /no/such/path HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 5.0:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - begin < 5.0


def test_a_malformed_body_after_its_response_is_not_logged_as_an_error(connect, caplog):
    with live_server() as live:
        connection = connect(live.url)
        connection.sendall(b"POST /no/such/path HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"no length of a chunk\r\n")
        assert until_closed(connection) == b""
    assert all(record.exc_info is None for record in caplog.records)


# ---- connections that stay open -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_running_requests_are_not_subject_to_connection_timeouts():
    bounds = settings(header_seconds=0.7, idle_seconds=0.2, write_seconds=0.2)
    with live_server(connections=bounds, stream_comment_seconds=0.0) as live:
        live.engine.first_delay = 1.0
        assert live.complete(max_tokens=2)["choices"][0]["text"] == "bc"
        live.engine.delay = 1.0
        events = live.stream("/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert events[-1] == "[DONE]" and len(events) > 2


@pytest.mark.slow
def test_a_slow_but_steady_upload_succeeds(connect):
    bounds = settings(header_seconds=0.7, idle_seconds=0.2, write_seconds=0.2)
    with live_server(connections=bounds, body_stall_seconds=5.0) as live:
        connection = connect(live.url)
        head, _, body = request("/v1/completions", {"prompt": "slow", "max_tokens": 1}).partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        begin = time.monotonic()
        for byte in body:
            time.sleep(0.03)
            connection.sendall(bytes([byte]))
        assert time.monotonic() - begin > 0.7
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_all_get_responses(connect):
    with live_server(connections=settings(header_seconds=0.3, idle_seconds=0.3)) as live:
        connection = connect(live.url)
        connection.sendall(HEALTH * 3)
        assert until_closed(connection).count(b"HTTP/1.1 200 ") == 3


# ---- admission ---------------------------------------------------------------------------------------------------------
def test_connections_per_address_are_limited_except_for_proxies(connect):
    with (
        live_server(connections=settings(max_per_address=5, header_seconds=300.0)) as live,
        crowd(live.url, 5, "127.0.0.2") as held,
    ):
        eventually(lambda: len(live.registry) == 5)
        assert all(map(is_open, held))
        status, error = status_and_error(until_closed(connect(live.url, "127.0.0.2")))
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "too_many_connections")
        with crowd(live.url, 20, "127.0.0.1") as trusted, crowd(live.url, 5, "127.0.0.3"):
            eventually(lambda: len(live.registry) == 30)
            assert all(map(is_open, trusted))
        held.pop().close()
        eventually(lambda: answers_health(live.url, "127.0.0.2"))


def test_half_open_connections_do_not_lock_out_clients():
    with (
        live_server(connections=settings(max_connections=20, header_seconds=300.0)) as live,
        crowd(live.url, 60, "127.0.0.1") as held,
    ):
        for _ in range(30):
            assert answers_health(live.url, "127.0.0.2")
        eventually(lambda: not any(map(is_open, held[:40])))  # the oldest were evicted


def test_idle_connections_are_evicted_before_any_is_refused(connect):
    with live_server(connections=settings(max_connections=4)) as live:
        idle = [connect(live.url) for _ in range(4)]
        for connection in idle:
            connection.sendall(HEALTH)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert answers_health(live.url, "127.0.0.2")
        assert until_closed(idle[0]) == b""
        assert all(map(is_open, idle[1:]))


@pytest.mark.slow
def test_a_connection_with_unsent_data_is_not_evicted(connect):
    """The response is written but not completely read; until then its connection is not evicted."""
    with live_server(connections=settings(max_connections=2)) as live:
        slow = connect(live.url, receive_buffer=4096)
        body = {"prompt": "hello world " * 4000}
        slow.sendall(request("/tokenize", body))
        eventually(lambda: any(each.bytes_pending for each in live.registry._clients))
        for number in range(4):  # one other connection fits, which is new each time
            new = connect(live.url, f"127.0.0.{number + 2}")
            new.sendall(HEALTH)
            read_answer(new)
        answer = read_answer(slow)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"}")


def test_malformed_requests_are_logged_once(connect, caplog):
    with live_server() as live:
        for _ in range(15):
            connection = connect(live.url)
            connection.sendall(b"nonsense\r\n\r\n")
            head, _, body = until_closed(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and re.search(rb"\r\nx-request-id: [0-9a-f]{32}$", head)
            assert json.loads(body)["error"]["code"] == "malformed_request"
        for _ in range(5):
            connection = connect(live.url)
            connection.sendall(request("/health", None, "connection: Upgrade, close", "upgrade: websocket"))
            until_closed(connection)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_new_connection_gets_503_if_all_are_busy(connect):
    with live_server(connections=settings(max_connections=3)) as live:
        live.engine.first_delay = 300.0
        busy = [connect(live.url) for _ in range(3)]
        for connection in busy:
            connection.sendall(request("/v1/completions", {"prompt": "a"}))
        eventually(lambda: live.engine.running == 3)
        answer = until_closed(connect(live.url))
        status, error = status_and_error(answer)
        assert (status, error["code"]) == (503, "too_many_connections") and b"retry-after: 1\r\n" in answer
        busy.pop().close()
        eventually(lambda: answers_health(live.url, "127.0.0.1"))
        assert all(map(is_open, busy))
        for connection in busy:
            connection.close()


# ---- clients that do not read ------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole answer"])
def test_a_client_that_never_reads_is_disconnected_and_its_request_aborted(connect, stream):
    with live_server(connections=settings(write_seconds=0.5)) as live:
        with_long_context(live)
        connection = connect(live.url, receive_buffer=4096)
        if stream:
            connection.sendall(request("/v1/completions", {**LONG, "stream": True}))
            eventually(lambda: live.engine.running == 1)
        else:
            tokens = {"tokens": [65] * 1_000_000}
            connection.sendall(request("/detokenize", tokens))
        eventually(lambda: len(live.registry) == 0, 60.0)
        eventually(lambda: live.state.in_flight == 0)  # the request's task notices it in the next turn of the loop
        assert live.engine.running == 0
        if stream:
            assert len(live.engine.aborted) == 1
            assert 'windlass_request_errors_total{code="client_disconnected"} 1.0' in live.http.get("/metrics").text


@pytest.mark.slow
def test_a_client_that_reads_slowly_stays_connected(connect):
    with live_server(connections=settings(write_seconds=3.0)) as live:
        with_long_context(live)
        connection = connect(live.url, receive_buffer=16384)
        connection.sendall(request("/v1/completions", {**LONG, "stream": True}))
        end = time.monotonic() + 9.0
        while time.monotonic() < end:
            assert len(connection.recv(8192)) > 0
            time.sleep(0.05)
        assert live.engine.running == 1
        connection.close()
        eventually(lambda: live.engine.running == 0)


# ---- units -------------------------------------------------------------------------------------------------------------
def test_client_networks():
    assert client_network("10.0.0.1") == "10.0.0.1" == client_network("::ffff:10.0.0.1")
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") != client_network("2001:db8:0:1::1")
    assert client_network("fe80::1%eth0") == "fe80::/64"


class Fake:
    """A connection without a socket."""

    bytes_pending = bytes_acknowledged = 0

    def __init__(self) -> None:
        self.ends: list[str] = []

    def close_timed_out(self) -> None:
        self.ends.append("late")

    def abort(self) -> None:
        self.ends.append("aborted")


def test_a_flood_from_one_address_evicts_only_its_own_connections():
    connections = ConnectionRegistry(settings(max_connections=3))
    quiet, busy, flood = Fake(), Fake(), [Fake() for _ in range(5)]
    connections.add(quiet, "10.0.0.1")  # the oldest of all
    connections.add(busy, "10.0.0.3")
    connections.mark_busy(busy)
    for connection in flood:
        assert connections.refuse("10.0.0.2") is None
        connections.add(connection, "10.0.0.2")
    assert [fake.ends for fake in (quiet, busy, *flood)] == [[], [], *[["aborted"]] * 4, []]
    assert connections.refuse("10.0.0.3") is None  # without waiting connections of its own
    assert quiet.ends == ["aborted"] and len(connections) == 2


def test_timeouts_start_at_the_latest_event():
    now = 0.0
    bounds = settings(header_seconds=10.0, idle_seconds=75.0, write_seconds=60.0)
    connections = ConnectionRegistry(bounds, clock=lambda: now)
    one, two = Fake(), Fake()
    connections.add(one, "a")
    now = 6.0
    connections.add(two, "a")
    now = 10.0
    connections.sweep()
    assert (one.ends, two.ends) == (["late"], [])
    connections.remove(one)
    connections.mark_busy(two)
    now = 1000.0
    two.bytes_pending, two.bytes_acknowledged = 5, 100
    connections.mark_sending(two)
    for _ in range(2):
        now += 59.0
        two.bytes_acknowledged += 1
        connections.sweep()
    assert two.ends == []
    now = 1178.0
    connections.sweep()
    assert two.ends == ["aborted"]
    connections.remove(two)
    connections.mark_idle(two)  # called by a removed connection
    connections.mark_awaiting_head(two)
    now = 2000.0
    connections.sweep()
    assert two.ends == ["aborted"] and len(connections) == 0


# ---- handover to another server ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_retired_server_announces_that_connections_close() -> None:
    async def main() -> None:
        half, retired = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Half an answer, and once the server has retired the rest."""
            if scope["type"] != "http":
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            half.set()
            await retired.wait()
            await send({"type": "http.response.body", "body": b"whole"})

        listener = socket.create_server(("127.0.0.1", 0))
        held = listener.dup()  # another server accepts later
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = HttpServer(app, listener, ConnectionSettings(), max_header_bytes=65536, max_body_bytes=65536)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(limits=limits, timeout=10) as client:
            begun = asyncio.create_task(client.get(url))
            await asyncio.wait_for(half.wait(), 30)
            server.retire()
            retired.set()
            first = await begun
            again = await client.get(url)  # over the same connection: no other is accepted
            assert (first.text, again.text) == ("halfwhole", "halfwhole")
            assert "connection" not in first.headers and again.headers["connection"] == "close"
            await asyncio.sleep(1.2)  # uvicorn has renewed its headers
            assert len(server.registry) == 0
            with pytest.raises(httpx.ReadTimeout):
                await client.get(url, timeout=httpx.Timeout(10, read=0.3))  # it is in the listener's queue
        accepted, _ = held.accept()
        assert accepted.recv(4) == b"GET "
        accepted.close()
        held.close()
        await server.stop(1)
        await serving

    asyncio.run(main())
