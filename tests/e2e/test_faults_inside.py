"""Faults that only a defect brings, and callers that mean no good, at a real server on the bundled model.

The engine is the real one with the defects of `failing_core`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e_helpers.running_streams import Streams, answer, open_files, serves_again
from helpers.failing_core import FATAL, FULL, LOST, POISONED
from helpers.raw_client import connect, until_closed, wait_for
from helpers.real_server import RealServer, serve

from windlass.server.startup.engines import CORE_VARIABLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, limits a process"),
]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
        patch.setenv(CORE_VARIABLE, "helpers.failing_core:core")
        with serve("--max-model-len", "8192", WINDLASS_HEADER_TIMEOUT="3") as server:
            yield server
            log = server.log.read_text()
            told = log.count("the engine failed in a step") + log.count("EngineError: the model produced NaN")
            assert log.count("Traceback") == told


def test_logits_that_are_not_finite_are_one_requests_own(server: RealServer) -> None:
    engine, files = server.engine_pid(), open_files(server.process.pid)
    alone = Streams(server.url, 1)
    assert alone.finish() == ["length"]
    streams = Streams(server.url, 3)
    failed = answer(server, prompt=[50, POISONED, 51])
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal"
    assert answer(server, prompt=[50, POISONED, 51], stream=True).status_code == 500  # before its first event
    assert streams.finish() == ["length"] * 3 and set(streams.texts) == set(alone.texts)
    assert server.engine_pid() == engine and server.metric("windlass_kv_cache_usage_perc") == 0
    wait_for(lambda: open_files(server.process.pid) <= files + 2)


def test_a_kernel_that_fails_in_one_step(server: RealServer) -> None:
    expected, before, files = answer(server).json()["choices"], server.engine_pid(), open_files(server.process.pid)
    streams = Streams(server.url, 3)
    failed = answer(server, prompt=[50] * FATAL)
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_unavailable"
    assert streams.finish() == ["engine_unavailable"] * 3
    serves_again(server)
    assert server.engine_pid() != before and answer(server).json()["choices"] == expected
    assert "a kernel has failed" in server.log.read_text()
    wait_for(lambda: server.metric("windlass_num_requests_running") == 0)
    wait_for(lambda: open_files(server.process.pid) <= files + 2)


def test_a_gpu_without_memory_for_a_step(server: RealServer) -> None:
    engine, files = server.engine_pid(), open_files(server.process.pid)
    alone = Streams(server.url, 1)
    assert alone.finish() == ["length"]
    streams = Streams(server.url, 3)
    assert server.metric("windlass_num_requests_running") >= 3
    failed = answer(server, prompt=[50] * FULL, n=2)
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "out_of_memory"
    assert "retry-after" in failed.headers and "newest" in failed.json()["error"]["message"]
    assert answer(server, prompt=[50] * FULL, stream=True).status_code == 503  # before its first event
    assert streams.finish() == ["length"] * 3 and set(streams.texts) == set(alone.texts)
    assert server.engine_pid() == engine and server.metric("windlass_kv_cache_usage_perc") == 0
    assert server.log.read_text().count("no memory on the device for a step of ") == 2
    wait_for(lambda: open_files(server.process.pid) <= files + 2)


def test_a_gpu_that_is_lost(server: RealServer) -> None:
    expected, before = answer(server).json()["choices"], server.engine_pid()
    streams = Streams(server.url, 2)
    failed = answer(server, prompt=[50] * LOST)
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_unavailable"
    assert streams.finish() == ["engine_unavailable"] * 2
    serves_again(server)
    assert server.engine_pid() != before and answer(server).json()["choices"] == expected
    report = json.loads((Path(re.findall(r"crash report: (\S+)", server.log.read_text())[-1])).read_text())
    assert "AcceleratorError: CUDA error: an illegal memory access" in report["reason"]


def test_a_text_of_four_mebibytes_beside_streams(server: RealServer) -> None:
    alone = Streams(server.url, 1)
    assert alone.finish() == ["length"]
    streams = Streams(server.url, 2)
    text = "sea of words " * (4 * 2**20 // 13)
    answers: list[httpx.Response] = []
    asking = [
        threading.Thread(target=lambda: answers.append(answer(server, prompt=text, truncate_prompt_tokens=16)))
        for _ in range(2)
    ]
    for thread in asking:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in asking):
        begin = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.05)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert streams.finish() == ["length"] * 2 and set(streams.texts) == set(alone.texts)
    print(f"/health in {slowest:.3f} s at most, gaps of streams {sorted(streams.gaps)[-3:]}")


def test_heads_that_come_byte_by_byte(server: RealServer) -> None:
    files, streams = open_files(server.process.pid), Streams(server.url, 2)
    held = [connect(server.url, "127.0.0.2") for _ in range(200)]
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 4000
    ended = 0
    for byte in head:
        ended = 0
        for connection in held:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                ended += 1
        if ended == len(held):
            break
        time.sleep(0.2)
    assert ended == len(held), "each was closed, long before its head was there"
    found = [until_closed(connection) for connection in held]
    assert all(not each or each.startswith(b"HTTP/1.1 408 ") for each in found)
    for connection in held:
        connection.close()
    assert streams.finish() == ["length"] * 2
    wait_for(lambda: open_files(server.process.pid) <= files + 2)
