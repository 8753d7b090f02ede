"""Log lines that clients can cause, stalls of the event loop, and recorded requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.eventually import eventually

from windlass.server.config.settings import RecordSettings
from windlass.server.observability.logging import (
    LOG_INTERVAL_SECONDS,
    EventLoopMonitor,
    RateLimitedLogger,
    is_not_lost_write_warning,
)
from windlass.server.observability.recording import WorkloadRecorder

pytestmark = pytest.mark.anyio


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


# ---- stalls of the event loop -----------------------------------------------------------------------------------------


def hold_up(seconds: float, noticed: Callable[[], bool] = lambda: True) -> None:
    """Block for this long, and until it was noticed."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or not (noticed() or time.monotonic() > begin + 30):
        time.sleep(0.05)


@pytest.mark.slow
async def test_a_stall_is_logged_while_it_lasts_and_observed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "windlass.server")
    for _ in range(3):  # a busy machine may stall the loop itself, and only one line a minute is logged
        caplog.clear()
        late: list[float] = []
        watch = EventLoopMonitor(late.append, stall=0.4)
        watch.start()
        await asyncio.sleep(0.3)
        assert late and (not caplog.records or max(late) > 0.3)
        if not caplog.records:
            break
        watch.stop()
    hold_up(1.0, lambda: bool(caplog.records))
    stalled = [record for record in caplog.records if "hold_up" in record.message]
    assert len(stalled) == 1 and "has been blocked" in stalled[0].message and "test_logging.py" in stalled[0].message
    async with asyncio.timeout(30):
        while not any("runs again after" in record.message for record in caplog.records):
            await asyncio.sleep(0.05)
    assert max(late) > 0.8
    watch.stop()
    count = len(late)
    await asyncio.sleep(0.3)
    assert len(late) <= count + 1


@pytest.mark.slow
async def test_repeated_stalls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "windlass.server")
    late: list[float] = []
    watch = EventLoopMonitor(late.append, stall=0.04)
    watch.start()
    for count in (1, 2, 3):
        hold_up(0.3)
        async with asyncio.timeout(30):
            while sum(seconds > 0.1 for seconds in late) < count:
                await asyncio.sleep(0.02)
    watch.stop()
    assert sum("has been blocked" in record.message for record in caplog.records) == 1
    assert sum("runs again" in record.message for record in caplog.records) <= 1


# ---- recorded requests (`--record`) -----------------------------------------------------------------------------------
HEAD = {"windlass_record": 1}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[WorkloadRecorder]:
    recorder = WorkloadRecorder(RecordSettings(path=tmp_path / "load.jsonl", max_bytes=200))
    yield recorder
    recorder.close()


def put(recorder: WorkloadRecorder, number: int, header: dict[str, Any] = HEAD) -> None:
    recorder.put(lambda: {"number": number}, header=lambda: header)


def written(recorder: WorkloadRecorder, count: int) -> Callable[[], bool]:
    return lambda: recorder.written == count


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_new_file_has_a_header(recorder: WorkloadRecorder, tmp_path: Path) -> None:
    file, away = tmp_path / "load.jsonl", tmp_path / "away.jsonl"
    put(recorder, 1)
    put(recorder, 2)
    eventually(written(recorder, 2), 10)
    file.rename(away)
    put(recorder, 3)
    eventually(written(recorder, 3), 10)
    assert lines_of(away) == [HEAD, {"number": 1}, {"number": 2}]
    assert lines_of(file) == [HEAD, {"number": 3}]


def test_another_server_adds_its_header_to_an_existing_file(recorder: WorkloadRecorder, tmp_path: Path) -> None:
    (tmp_path / "load.jsonl").write_text(json.dumps(HEAD) + '\n{"number": 0}\n')
    other = {"windlass_record": 1, "model": "another"}
    put(recorder, 1, other)
    put(recorder, 2, other)
    eventually(written(recorder, 2), 10)
    assert lines_of(tmp_path / "load.jsonl") == [HEAD, {"number": 0}, other, {"number": 1}, {"number": 2}]


def test_a_full_disk_loses_requests_but_not_the_header(
    recorder: WorkloadRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if recorder.lost["disk"] < 2:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("windlass.server.observability.recording.os.write", full)
    for number in range(4):
        put(recorder, number)
    eventually(written(recorder, 2), 10)
    assert recorder.lost == {"disk": 2}
    assert lines_of(tmp_path / "load.jsonl") == [HEAD, {"number": 2}, {"number": 3}]
