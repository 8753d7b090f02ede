"""Real servers against hostile clients: crowds of idle connections, clients that never read, secrets in logs."""

from __future__ import annotations

import contextlib
import json
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
from e2e_helpers.streams import LONG, PATH, Streamed, read_stream
from helpers.crowd import Crowd
from helpers.eventually import (
    calm_time,
    cpu_seconds,
    eventually,
    exit_code,
    in_time,
    open_files,
    resident,
    seconds_of_texts,
)
from helpers.raw_client import Connect, answers_health, connector, is_open, request, until_closed
from helpers.real_server import RealServer, serve
from helpers.served import Served
from helpers.toy_tokenizers import byte_level

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "toy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def dial() -> Iterator[Connect]:
    with connector() as dial:
        yield dial


@contextlib.contextmanager
def soft_limit_of_files(count: int) -> Iterator[None]:
    """Set the limit of this process and of those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def slowest_health(url: str, seconds: float) -> float:
    """Return the longest duration of /health from 127.0.0.1, requested on new connections for `seconds`."""
    slowest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        assert answers_health(url, "127.0.0.1")
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.02)
    return slowest


def check_log(served: Served) -> None:
    assert len(served.errors) < 4000 and "Traceback" not in served.errors


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--max-connections", "100", "--max-connections-per-address", "1000"], id="in total", marks=pytest.mark.slow
        ),
        pytest.param(["--max-connections-per-address", "100"], id="per address"),
        pytest.param(
            ["--max-connections", "100", "--forwarded-allow-ips", "127.0.0.2"],
            id="from a proxy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_idle_crowd_leaves_the_server_reachable(model, options):
    with Served(model, *options, WINDLASS_HEADER_TIMEOUT="1") as served:
        url = served.wait_ready()
        with Crowd(url, 300, "127.0.0.2") as crowd:
            eventually(lambda: crowd.opened >= 300, 30.0)
            in_time(lambda: slowest_health(url, 2.0), 2.0)
        check_log(served)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        pytest.param((), 0.5, id="default limits"),
        pytest.param(
            ("--max-connections-per-address", "100000", "--max-connections", "2000"), 2.0, id="no limit per address"
        ),
    ],
)
def test_five_thousand_idle_connections(model, options, seconds):
    with soft_limit_of_files(1024):  # default of most systems
        served = Served(model, *options)
    with served:
        url = served.wait_ready()
        assert options or slowest_health(url, 1.0) < seconds
        with Crowd(url, 5000, "127.0.0.2") as crowd:
            assert slowest_health(url, 30.0) < seconds
            assert crowd.opened >= 5000
        check_log(served)


def test_limit_of_open_files_is_raised_and_its_exhaustion_is_temporary(model, dial):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with soft_limit_of_files(256):
        served = Served(model)
    with served:
        url = served.wait_ready()
        soft, _ = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
        assert soft == 65536 if hard == resource.RLIM_INFINITY else soft == min(hard, 65536)
        assert answers_health(url, "127.0.0.1")
        pid = served.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, hard))
        waiting = [dial(url) for _ in range(20)]
        served.wait_line("new connections cannot be accepted: Too many open files")
        begin = cpu_seconds(pid)
        time.sleep(1.5)
        assert cpu_seconds(pid) - begin < 0.5, "it must wait before it accepts again"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for connection in waiting:
            connection.sendall(request("/health", None, "connection: close"))
            assert until_closed(connection).startswith(b"HTTP/1.1 200 ")
        assert served.errors.count("Too many open files") == 1 and "Traceback" not in served.errors


# ---- clients that never read -------------------------------------------------------------------------------------------
UNREAD_SAMPLES = {"prompt": "hello", "max_tokens": 50_000, "n": 4, "logprobs": 20, "stream": True, "ignore_eos": True}


@pytest.mark.slow
def test_unread_stream_is_aborted_and_delays_no_shutdown(dial):
    with serve("--grace-period", "0.5", "--max-model-len", "60000", WINDLASS_WRITE_TIMEOUT="2") as server:
        dial(server.url, receive_buffer=4096).sendall(request("/v1/completions", UNREAD_SAMPLES))
        eventually(lambda: server.metric("windlass_num_requests_running") == 4)
        eventually(lambda: "was disconnected: it read nothing of its answer for 2 s" in server.log.read_text(), 60.0)
        eventually(lambda: server.metric("windlass_num_requests_running") == 0)
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert 'code="client_disconnected"} 1.0' in httpx.get(f"{server.url}/metrics").text

        dial(server.url, receive_buffer=4096).sendall(request("/v1/completions", UNREAD_SAMPLES))
        eventually(lambda: server.metric("windlass_num_requests_running") == 4)
        begin = calm_time()
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server.process) == 0
        assert calm_time() - begin < 0.5 + 2.0 + 10.0  # the limit, and 10 s of work
        assert "Traceback" not in server.log.read_text()


def test_sigterm_ends_the_server_in_time_among_hostile_clients(model, dial):
    in_time(lambda: seconds_to_end_among_clients(model, dial), 0.5 + 2.0)


def seconds_from_sigterm(served: Served) -> float:
    begin = calm_time()
    served.signal(signal.SIGTERM)
    assert served.wait(20.0) == 0
    took = calm_time() - begin
    assert "Traceback" not in served.errors, served.errors
    return took


def seconds_to_end_among_clients(model: Path, dial: Connect) -> float:
    with Served(model, "--grace-period", "0.5", "--max-model-len", "400", SCRIPT_VOCAB_SIZE="423") as served:
        url = served.wait_ready()
        files = open_files(served.process.pid)
        stuck = dial(url, receive_buffer=2048)
        stuck.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": 300, "n": 64, "stream": True}))
        eventually(lambda: "windlass_num_requests_running 1.0" in httpx.get(f"{url}/metrics").text)
        answer = dial(url, receive_buffer=2048)
        answer.sendall(request("/detokenize", {"tokens": [65] * 1_000_000}))
        dial(url)
        dial(url).sendall(b"GET /hea")
        dial(url).sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        for _ in range(4):
            dial(url).sendall(request("/tokenize", {"prompt": "word " * 400_000}))
        eventually(lambda: open_files(served.process.pid) >= files + 9)
        eventually(lambda: not is_open(stuck))  # its answer has begun
        eventually(lambda: seconds_of_texts(served.process.pid) > 0.1)
        return seconds_from_sigterm(served)


def test_sigterm_ends_the_server_in_time_during_an_endless_template(model, tmp_path, dial):
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": loops}))

    def seconds_to_end() -> float:
        with Served(tmp_path, "--grace-period", "0.2") as served:
            url = served.wait_ready()
            dial(url).sendall(request("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}))
            eventually(lambda: seconds_of_texts(served.process.pid) > 0.3)
            return seconds_from_sigterm(served)

    in_time(seconds_to_end, 0.2 + 2.0)


# ---- secrets -------------------------------------------------------------------------------------
def test_log_contains_no_keys(model, dial):
    secrets = [f"sk-secret-{number}" for number in range(8)]
    with Served(model, "--access-log", "--log-level", "debug", "--api-key", secrets[0]) as served:
        url = served.wait_ready()
        allowed = {"authorization": f"Bearer {secrets[0]}"}
        assert httpx.get(f"{url}/v1/models?api_key={secrets[1]}&x=1", headers=allowed).status_code == 200
        assert httpx.get(f"{url}/v1/models?{secrets[2]}").status_code == 401
        assert httpx.get(f"{url}/health", headers={"authorization": f"Bearer {secrets[3]}"}).status_code == 200
        assert httpx.get(f"{url}/no/such?access%5Ftoken={secrets[4]}", headers=allowed).status_code == 404
        body = {"prompt": "hi", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions?key={secrets[5]}", json=body, headers=allowed)
        assert answer.status_code == 200
        for bad in (
            f"GET /?token={secrets[6]} HTTP/1.1\r\nauthorization: Bearer {secrets[6]}\r\nb\x00d header\r\n\r\n",
            f"GET /?token={secrets[7]} HTTP/9\r\nauthorization: Bearer {secrets[7]}\r\n\r\n",
        ):
            connection = dial(url)
            connection.sendall(bad.encode())
            assert until_closed(connection).startswith(b"HTTP/1.1 400 ")
        served.wait_line(r'"POST /v1/completions\?\.\.\. HTTP/1\.1" 200$')
        assert '"GET /v1/models?... HTTP/1.1" 200' in served.errors and '"GET /health HTTP/1.1" 200' in served.errors
        served.signal(signal.SIGTERM)
        served.wait()
        assert [secret for secret in secrets if secret in served.errors] == []
        assert "api_key" not in served.errors and "earer" not in served.errors


# ---- thousands of connections to the bundled model -----------------------------------------------------------------------
IDLE, UNREAD = 10_000, 1_000
BODY = {**LONG, "max_tokens": 300}
UNREAD_STREAM = {"prompt": "The sea", "max_tokens": 480, "ignore_eos": True, "logprobs": 5, "stream": True}


class Neighbour:
    """A well-behaved client of another address: one stream in the constructor, and further ones during its block."""

    def __init__(self, url: str) -> None:
        self.results: list[Streamed] = []
        self.first: list[float] = []  # seconds until the first event
        self._url, self._ended = url, threading.Event()
        self._stream()
        self._thread = threading.Thread(target=self._run)

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]

    def _run(self) -> None:
        while not self._ended.is_set():
            self._stream()

    def _stream(self) -> None:
        begin = time.monotonic()
        result = read_stream(self._url, BODY, timeout=600)
        assert result.done and result.error is None
        self.first.append(result.times[0] - begin)
        self.results.append(result)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def describe(self) -> str:
        gaps = sorted(gap for result in self.results for gap in result.gaps)
        return (
            f"{len(self.texts)} concurrent streams, first event after {max(self.first):.2f} s at most, gaps p50 "
            f"{gaps[len(gaps) // 2]:.3f} s, p99.9 {gaps[int(len(gaps) * 0.999)]:.3f} s, longest {gaps[-1]:.3f} s"
        )


def check_nothing_left(server: RealServer, files: int) -> None:
    eventually(lambda: open_files(server.process.pid) <= files + 2, 60.0)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_restarts_total"):
        assert server.metric(f"windlass_{name}") == 0, name
    assert "Traceback" not in server.log.read_text()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_idle_connections() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < IDLE + 2000:
        pytest.skip("this machine allows fewer open files")
    options = ("--max-connections", str(IDLE + 1000), "--max-connections-per-address", str(IDLE // 2))
    with serve(*options, WINDLASS_HEADER_TIMEOUT="600", WINDLASS_KEEP_ALIVE_TIMEOUT="600") as server:
        pid = server.process.pid
        neighbour, files, before = Neighbour(server.url), open_files(pid), resident(pid)
        after = []
        with neighbour:
            for _ in range(3):
                with (
                    Crowd(server.url, IDLE // 2, "127.0.0.2") as first,
                    Crowd(server.url, IDLE // 2, "127.0.0.3") as second,
                ):
                    eventually(lambda: first.opened + second.opened >= IDLE, 300.0)
                    eventually(lambda: open_files(pid) >= files + IDLE, 300.0)
                    count = len(neighbour.texts)
                    eventually(lambda: len(neighbour.texts) >= count + 3, 300.0)  # noqa: B023
                    assert first.opened + second.opened == IDLE, "no connection may be closed"
                    held = resident(pid)
                eventually(lambda: open_files(pid) < files + 10, 60.0)
                after.append(resident(pid))
        print(f"{IDLE} idle connections: {before:.0f} MiB before, {held:.0f} with them, {after} after each round")
        print(neighbour.describe())
        assert set(neighbour.texts) == {neighbour.texts[0]}
        assert held - before < IDLE * 40 / 1024, "MiB, at 40 KiB each"
        assert after[-1] - after[0] < 16
        check_nothing_left(server, files)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_connections_beyond_the_limits() -> None:
    """By default, an address may hold 512 connections."""
    with serve() as server:
        pid = server.process.pid
        neighbour, files, before = Neighbour(server.url), open_files(pid), resident(pid)
        with neighbour, Crowd(server.url, IDLE, "127.0.0.2") as crowd:
            eventually(lambda: crowd.opened >= IDLE, 600.0)
            count = len(neighbour.texts)
            eventually(lambda: len(neighbour.texts) >= count + 3, 300.0)
            assert open_files(pid) < files + 600
        print(f"{crowd.opened} connections, of which 512 may stay: {before:.0f} MiB before, {resident(pid):.0f} after")
        print(neighbour.describe())
        assert set(neighbour.texts) == {neighbour.texts[0]}
        assert resident(pid) - before < 48
        check_nothing_left(server, files)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousand_unread_streams_are_dropped() -> None:
    with serve("--max-connections-per-address", str(UNREAD), WINDLASS_WRITE_TIMEOUT="3") as server:
        pid, engine = server.process.pid, server.engine_pid()
        neighbour, files = Neighbour(server.url), open_files(pid)
        before, engine_before, most = resident(pid), resident(engine), 0.0
        after = []
        for _ in range(2):
            with neighbour if not after else Neighbour(server.url) as current:
                with Crowd(server.url, UNREAD, "127.0.0.2", request(PATH, UNREAD_STREAM)) as crowd:
                    eventually(lambda: crowd.opened >= UNREAD, 120.0)
                    end = time.monotonic() + 900.0
                    while server.metric("windlass_num_requests_running") > 1 or server.metric(
                        "windlass_num_requests_waiting"
                    ):
                        most = max(most, resident(pid))
                        assert time.monotonic() < end
                        time.sleep(0.2)
                print(f"{UNREAD} unread streams: {crowd.ends}")
                assert sum(crowd.ends.values()) == UNREAD and set(crowd.ends) <= {"200 cut", "200 told"}
            print(current.describe())
            assert set(current.texts) == {neighbour.texts[0]}
            eventually(lambda: open_files(pid) < files + 10, 60.0)
            after.append(resident(pid))
        print(
            f"server: {before:.0f} MiB before, {most:.0f} at most, {after} after each round; engine {engine_before:.0f}",
            end=" ",
        )
        print(f"and {resident(engine):.0f}")
        lag, samples = (server.metric(f"windlass_event_loop_lag_seconds_{part}") for part in ("sum", "count"))
        print(f"event loop: {lag / samples:.4f} s late on average")
        assert most - before < UNREAD * 0.5
        assert after[1] - after[0] < 16 and resident(engine) - engine_before < 100
        check_nothing_left(server, files)


# ---- memory of large bodies ---------------------------------------------------------------------------------------------
SCRIPT = """
import ctypes, sys
from pathlib import Path
from windlass.server.startup.launch import release_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

if sys.argv[1] == "with":
    release_freed_memory()
before = resident()
for size in (8, 16, 24, 31):  # each freed block raises the size up to which glibc caches freed memory
    body = bytes(bytearray(b"x") * (size << 20))
    text = body.decode()
    held = [b"y" * 2000 for _ in range(100)]  # small blocks after it prevent the heap from shrinking
    del body, text
print(resident() - before)
"""


def growth(how: str) -> int:
    """Return the MiB that stay resident after large bodies, with or without `release_freed_memory`."""
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_bodies_is_released() -> None:
    assert growth("without") > 20  # otherwise this test could not fail
    assert growth("with") < 8
