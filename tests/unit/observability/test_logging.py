"""Log lines that clients can cause: limits for repeated ones, and asyncio's real warnings of writes to disconnected clients."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterator

import pytest

from windlass.server.observability.logging import LOG_INTERVAL_SECONDS, RateLimitedLogger, is_not_lost_write_warning


@pytest.fixture
def asyncios() -> Iterator[logging.Logger]:
    logger = logging.getLogger("asyncio")
    found, logger.filters = logger.filters, []  # a server may have run in this process
    yield logger
    logger.filters = found


async def write_to_a_client_that_left() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), "127.0.0.1", 0)
    async with server:
        client = socket.create_connection(server.sockets[0].getsockname())
        writer = await accepted.get()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        client.close()
        for _ in range(20):
            writer.transport.write(b"x")
        writer.transport.abort()


def test_writes_to_disconnected_clients_are_not_logged(
    asyncios: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(write_to_a_client_that_left())
    assert len(caplog.records) > 5  # else this test could not fail
    caplog.clear()
    asyncios.addFilter(is_not_lost_write_warning)
    asyncio.run(write_to_a_client_that_left())
    asyncios.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_a_rate_limited_line_has_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    limited = RateLimitedLogger(logging.getLogger("limited"), logging.WARNING, clock=lambda: now)
    for _ in range(1000):
        limited.log("it happened")
    now += LOG_INTERVAL_SECONDS
    limited.log("it happened")
    assert [record.getMessage() for record in caplog.records] == [
        "it happened",
        "it happened (1000 times since the last such message)",
    ]
