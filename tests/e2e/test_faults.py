"""Each fault injected into a real server on the bundled model: who is told what, who is unharmed, and that it serves again."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e_helpers.running_streams import PATH, Streams, answer, open_files, serves_again
from helpers.device import DEVICE, ON_A_CPU, SERVERS
from helpers.eventually import ESTABLISHED, LISTENING, children, ports, seconds_of_texts
from helpers.raw_client import wait_for
from helpers.real_server import RealServer, serve

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, limits a process"),
]


def health(server: RealServer) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{server.url}/health", timeout=30).json()
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    """One server for all faults: each has to leave it as if nothing had been."""
    # Prompts are computed whole, so that a long one needs memory that the engine has not used before.
    with serve("--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--target-step-ms", "0") as server:
        yield server
        log = server.log.read_text()
        assert log.count("Traceback") == log.count("the engine failed in a step")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_an_engine_that_is_killed_or_stopped(server: RealServer, number: signal.Signals) -> None:
    expected, before, files = answer(server).json()["choices"], server.engine_pid(), open_files(server.process.pid)
    streams = Streams(server.url, 6)
    os.kill(before, number)
    assert set(streams.finish()) == {"engine_unavailable"}
    refused = answer(server)
    assert refused.status_code in (200, 503) and (refused.status_code == 200 or "retry-after" in refused.headers)
    serves_again(server)
    assert server.engine_pid() != before
    assert answer(server).json()["choices"] == expected
    told = health(server)
    assert str(told.pop("crash_report")).startswith("crash-")
    assert told == {"status": "ready", "degraded": ["engine_restarted"]}
    wait_for(lambda: server.metric("windlass_num_requests_running") == 0)
    wait_for(lambda: open_files(server.process.pid) <= files + 2)  # the connection that asks, and one that lingers


@ON_A_CPU
@pytest.mark.slow
def test_an_engine_that_gets_no_more_memory(server: RealServer) -> None:
    """It may have no further address space: the first step that needs some fails, and the next engine has no such bound."""
    before = server.engine_pid()
    resource.prlimit(before, resource.RLIMIT_AS, (2**20, 2**20))
    failed = answer(server, prompt=[5] * 8000, echo=True, logprobs=1)  # the logits of every token
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_unavailable"
    assert "memory" in server.log.read_text()
    serves_again(server)
    assert server.engine_pid() != before


@pytest.mark.slow
def test_text_processes_that_are_killed(server: RealServer) -> None:
    def ask() -> httpx.Response:
        return httpx.post(
            f"{server.url}/tokenize", json={"prompt": "sea " * 2000}, timeout=60
        )  # too long for the event loop

    expected = ask().json()["tokens"]
    (forks,) = children(server.process.pid, b"workers.fork_server")
    streams = Streams(server.url, 2)
    for pid in (*children(forks), forks):
        os.kill(pid, signal.SIGKILL)
    for _ in range(4):
        assert ask().json()["tokens"] == expected  # others have taken their place
    assert streams.finish() == ["length"] * 2
    wait_for(lambda: "text_process_lost" in str(health(server)))


@pytest.mark.slow
def test_a_log_on_a_full_disk() -> None:
    command = [sys.executable, "-m", "windlass.server.cli.main", "serve", "demo", "--port", "0"]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stderr=full, stdout=full, env={**SERVERS, **os.environ}) as process,
    ):
        try:
            wait_for(lambda: ports(process.pid, LISTENING), 60.0)  # no line can tell
            url = f"http://127.0.0.1:{ports(process.pid, LISTENING)[0]}"
            wait_for(lambda: _ready(url), 60.0)
            assert Streams(url, 2).finish() == ["length"] * 2
            assert httpx.post(url + PATH, content=b"{").status_code == 400
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prompt", "answer", "upload", "tokenizing", "restart"])
def test_sigterm_in_every_phase(phase: str) -> None:
    length = 32_768 if DEVICE == "cpu" else 131_072  # so that its prompt is computed for seconds
    with serve("--max-model-len", str(length), "--grace-period", "1") as server:
        ends: list[int | str] = []
        body: dict[str, object] = {"prompt": "The sea", "max_tokens": 4000, "ignore_eos": True}

        def ask() -> None:
            try:
                content = _slowly(json.dumps(body).encode()) if phase == "upload" else json.dumps(body).encode()
                ends.append(httpx.post(server.url + PATH, content=content, timeout=60).status_code)
            except httpx.TransportError as error:
                ends.append(type(error).__name__)

        if phase == "prompt":
            body |= {"prompt": [5] * (28_000 if DEVICE == "cpu" else 120_000), "max_tokens": 1}
        elif phase == "tokenizing":
            body |= {"prompt": "sea " * 1_000_000, "truncate_prompt_tokens": 8, "max_tokens": 1}
        elif phase == "restart":
            os.kill(server.engine_pid(), signal.SIGKILL)
        thread = threading.Thread(target=ask)
        thread.start()
        if phase in ("answer", "prompt"):
            wait_for(lambda: server.metric("windlass_num_requests_running") == 1)
        elif phase == "tokenizing":
            wait_for(lambda: seconds_of_texts(server.process.pid) > 0.2)
        else:
            wait_for(lambda: ends or ports(server.process.pid, ESTABLISHED))
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert time.monotonic() - begin < 1.0 + 2.0 + 10.0  # the promise, and a machine with other work
        thread.join(60)
        assert len(ends) == 1 and ends[0] in (200, 503, "ReadError", "RemoteProtocolError", "WriteError")
        if phase in ("answer", "prompt"):
            assert ends[0] in (200, 503)  # told, not cut
        assert "Traceback" not in server.log.read_text()


def _slowly(body: bytes) -> Iterator[bytes]:
    for number in body:
        yield bytes([number])
        time.sleep(0.1)
