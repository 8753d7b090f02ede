"""Thousands of connections at a real server with the bundled model, all at once: nobody else is harmed, and nothing is left."""

from __future__ import annotations

import json
import resource
import threading
import time
from pathlib import Path

import httpx
import pytest
from helpers.crowd import Crowd
from helpers.raw_client import request, wait_for
from helpers.real_server import RealServer, serve

IDLE, UNREAD = 10_000, 1_000
PATH = "/v1/completions"
BODY = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}
ENDLESS = {"prompt": "The sea", "max_tokens": 480, "ignore_eos": True, "logprobs": 5, "stream": True}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Neighbour:
    """A well-behaved client of another address: stream after stream of one text."""

    def __init__(self, url: str) -> None:
        self.texts: list[str] = []
        self.gaps: list[float] = []  # seconds between two pieces of a stream
        self.first: list[float] = []  # seconds until the first piece
        self._url, self._ended = url, threading.Event()
        self.stream()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            self.stream()

    def stream(self) -> None:
        text, done, last = "", False, time.monotonic()
        begin, first = last, True
        with httpx.Client(timeout=600) as http, http.stream("POST", self._url + PATH, json=BODY) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    now = time.monotonic()
                    (self.first if first else self.gaps).append(now - (begin if first else last))
                    first, last = False, now
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert done
        self.texts.append(text)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def told(self) -> str:
        gaps = sorted(self.gaps)
        return (
            f"{len(self.texts)} streams beside, the first piece after {max(self.first):.2f} s at most, gaps p50 "
            f"{gaps[len(gaps) // 2]:.3f} s, p99.9 {gaps[int(len(gaps) * 0.999)]:.3f} s, longest {gaps[-1]:.3f} s"
        )


def memory(pid: int) -> float:
    """Resident MiB."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def assert_nothing_is_left(server: RealServer, files: int) -> None:
    wait_for(lambda: open_files(server.process.pid) <= files + 2, 60.0)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_restarts_total"):
        assert server.metric(f"windlass_{name}") == 0, name
    assert "Traceback" not in server.log.read_text()


def test_ten_thousand_idle_connections() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < IDLE + 2000:
        pytest.skip("this machine allows fewer open files")
    options = ("--max-connections", str(IDLE + 1000), "--max-connections-per-address", str(IDLE // 2))
    with serve(*options, WINDLASS_HEADER_TIMEOUT="600", WINDLASS_KEEP_ALIVE_TIMEOUT="600") as server:
        pid = server.process.pid
        neighbour, files, before = Neighbour(server.url), open_files(pid), memory(pid)
        after = []
        with neighbour:
            for _ in range(3):
                with (
                    Crowd(server.url, IDLE // 2, "127.0.0.2") as first,
                    Crowd(server.url, IDLE // 2, "127.0.0.3") as second,
                ):
                    wait_for(lambda: first.opened + second.opened >= IDLE, 300.0)
                    wait_for(lambda: open_files(pid) >= files + IDLE, 300.0)
                    count = len(neighbour.texts)
                    wait_for(lambda: len(neighbour.texts) >= count + 3, 300.0)  # noqa: B023
                    assert first.opened + second.opened == IDLE, "none of them was closed"
                    held = memory(pid)
                wait_for(lambda: open_files(pid) < files + 10, 60.0)
                after.append(memory(pid))
        print(f"{IDLE} idle connections: {before:.0f} MiB before, {held:.0f} with them, {after} behind each time")
        print(neighbour.told())
        assert set(neighbour.texts) == {neighbour.texts[0]}
        assert held - before < IDLE * 40 / 1024, "MiB, at 40 KiB each"
        assert after[-1] - after[0] < 16
        assert_nothing_is_left(server, files)


def test_ten_thousand_connections_beyond_the_bounds() -> None:
    """As a server is started, without a word of connections: one address has 512."""
    with serve() as server:
        pid = server.process.pid
        neighbour, files, before = Neighbour(server.url), open_files(pid), memory(pid)
        with neighbour, Crowd(server.url, IDLE, "127.0.0.2") as crowd:
            wait_for(lambda: crowd.opened >= IDLE, 600.0)
            count = len(neighbour.texts)
            wait_for(lambda: len(neighbour.texts) >= count + 3, 300.0)
            assert open_files(pid) < files + 600
        print(f"{crowd.opened} connections, of which 512 may stay: {before:.0f} MiB before, {memory(pid):.0f} behind")
        print(neighbour.told())
        assert set(neighbour.texts) == {neighbour.texts[0]}
        assert memory(pid) - before < 48
        assert_nothing_is_left(server, files)


def test_a_thousand_readers_that_never_read() -> None:
    """They are dropped after their time, and none gets in another's way."""
    with serve("--max-connections-per-address", str(UNREAD), WINDLASS_WRITE_TIMEOUT="3") as server:
        pid, engine = server.process.pid, server.engine_pid()
        neighbour, files = Neighbour(server.url), open_files(pid)
        before, engine_before, most = memory(pid), memory(engine), 0.0
        after = []
        for _ in range(2):
            with neighbour if not after else Neighbour(server.url) as beside:
                with Crowd(server.url, UNREAD, "127.0.0.2", request(PATH, ENDLESS)) as crowd:
                    wait_for(lambda: crowd.opened >= UNREAD, 120.0)
                    end = time.monotonic() + 900.0
                    while server.metric("windlass_num_requests_running") > 1 or server.metric(
                        "windlass_num_requests_waiting"
                    ):
                        most = max(most, memory(pid))
                        assert time.monotonic() < end
                        time.sleep(0.2)
                print(f"{UNREAD} that read nothing: {crowd.ends}")
                assert sum(crowd.ends.values()) == UNREAD and set(crowd.ends) <= {"200 cut", "200 told"}
            print(beside.told())
            assert set(beside.texts) == {neighbour.texts[0]}
            wait_for(lambda: open_files(pid) < files + 10, 60.0)
            after.append(memory(pid))
        print(
            f"server: {before:.0f} MiB before, {most:.0f} at most, {after} behind; engine {engine_before:.0f}", end=" "
        )
        print(f"and {memory(engine):.0f}")
        lag, looks = (server.metric(f"windlass_event_loop_lag_seconds_{part}") for part in ("sum", "count"))
        print(f"event loop: {lag / looks:.4f} s late on average")
        assert most - before < UNREAD * 0.5
        assert after[1] - after[0] < 16 and memory(engine) - engine_before < 100
        assert_nothing_is_left(server, files)
