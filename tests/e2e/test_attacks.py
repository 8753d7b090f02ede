"""A real `windlass serve` against clients that mean no good: crowds that send nothing, readers that never read."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e_helpers.running_streams import open_files
from helpers.crowd import Crowd
from helpers.eventually import cpu_seconds, in_time, seconds_of_texts
from helpers.raw_client import Connect, answers_health, connector, is_open, request, until_closed, wait_for
from helpers.real_server import serve
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
    """For this process, and for those it starts meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def slowest_health(url: str, seconds: float) -> float:
    """The longest that /health took from 127.0.0.1, asked on new connections for so long; each must be a 200."""
    slowest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        assert answers_health(url, "127.0.0.1")
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.02)
    return slowest


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
def test_a_crowd_that_sends_nothing_locks_nobody_out(model, options):
    with Served(model, *options, WINDLASS_HEADER_TIMEOUT="1") as served:
        url = served.wait_ready()
        with Crowd(url, 300, "127.0.0.2") as crowd:
            wait_for(lambda: crowd.opened >= 300, 30.0)
            in_time(lambda: slowest_health(url, 2.0), 2.0)
        assert len(served.errors) < 4000 and "Traceback" not in served.errors


@pytest.mark.soak
def test_five_thousand_connections_that_send_nothing(model):
    with soft_limit_of_files(1024):  # as most systems set it
        served = Served(model)
    with served:
        url = served.wait_ready()
        assert slowest_health(url, 1.0) < 0.5
        with Crowd(url, 5000, "127.0.0.2") as crowd:
            assert slowest_health(url, 30.0) < 0.5
            assert crowd.opened >= 5000
        assert len(served.errors) < 4000 and "Traceback" not in served.errors


@pytest.mark.soak
def test_five_thousand_connections_where_no_address_is_bounded(model):
    with soft_limit_of_files(1024):
        served = Served(model, "--max-connections-per-address", "100000", "--max-connections", "2000")
    with served:
        url = served.wait_ready()
        with Crowd(url, 5000, "127.0.0.2") as crowd:
            assert slowest_health(url, 30.0) < 2.0
            assert crowd.opened >= 5000
        assert len(served.errors) < 4000 and "Traceback" not in served.errors


def test_the_limit_of_open_files_is_raised_and_running_out_of_them_is_one_line_and_ends(model, dial):
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
        served.wait_line("no connection can be accepted: Too many open files")
        begin = cpu_seconds(pid)
        time.sleep(1.5)
        assert cpu_seconds(pid) - begin < 0.5, "it must rest rather than try at once"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for connection in waiting:
            connection.sendall(request("/health", None, "connection: close"))
            assert until_closed(connection).startswith(b"HTTP/1.1 200 ")
        assert served.errors.count("Too many open files") == 1 and "Traceback" not in served.errors


# ---- readers that never read -------------------------------------------------------------------------------------------
ENDLESS = {"prompt": "hello", "max_tokens": 50_000, "n": 4, "logprobs": 20, "stream": True, "ignore_eos": True}


@pytest.mark.slow
def test_a_reader_that_never_reads_frees_its_blocks_and_delays_no_shutdown(dial):
    """With a real engine: a long stream is begun twice, and nobody reads either."""
    with serve("--grace-period", "0.5", "--max-model-len", "60000", WINDLASS_WRITE_TIMEOUT="2") as server:
        dial(server.url, receive_buffer=4096).sendall(request("/v1/completions", ENDLESS))
        wait_for(lambda: server.metric("windlass_num_requests_running") == 4)
        wait_for(lambda: "took no byte of its answer for 2 s" in server.log.read_text(), 60.0)
        wait_for(lambda: server.metric("windlass_num_requests_running") == 0)
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert 'code="client_disconnected"} 1.0' in httpx.get(f"{server.url}/metrics").text

        dial(server.url, receive_buffer=4096).sendall(request("/v1/completions", ENDLESS))
        wait_for(lambda: server.metric("windlass_num_requests_running") == 4)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert time.monotonic() - begin < 0.5 + 2.0 + 10.0  # the promise, and a machine with other work
        assert "Traceback" not in server.log.read_text()


def test_sigterm_ends_in_time_whatever_clients_do(model, dial):
    in_time(lambda: seconds_to_end_among_clients(model, dial), 0.5 + 2.0)


def seconds_from_sigterm(served: Served) -> float:
    begin = time.monotonic()
    served.signal(signal.SIGTERM)
    assert served.wait(20.0) == 0
    took = time.monotonic() - begin
    assert "Traceback" not in served.errors, served.errors
    return took


def seconds_to_end_among_clients(model: Path, dial: Connect) -> float:
    with Served(model, "--grace-period", "0.5", "--max-model-len", "400", SCRIPT_VOCAB_SIZE="423") as served:
        url = served.wait_ready()
        files = open_files(served.process.pid)
        stuck = dial(url, receive_buffer=2048)
        stuck.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": 300, "n": 64, "stream": True}))
        wait_for(lambda: "windlass_num_requests_running 1.0" in httpx.get(f"{url}/metrics").text)
        answer = dial(url, receive_buffer=2048)
        answer.sendall(request("/detokenize", {"tokens": [65] * 1_000_000}))
        dial(url)
        dial(url).sendall(b"GET /hea")
        dial(url).sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        for _ in range(4):
            dial(url).sendall(request("/tokenize", {"prompt": "word " * 400_000}))
        wait_for(lambda: open_files(served.process.pid) >= files + 9)
        wait_for(lambda: not is_open(stuck))  # its answer has begun
        wait_for(lambda: seconds_of_texts(served.process.pid) > 0.1)
        return seconds_from_sigterm(served)


def test_sigterm_ends_in_time_though_a_template_runs_on(model, tmp_path, dial):
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": loops}))

    def seconds_to_end() -> float:
        with Served(tmp_path, "--grace-period", "0.2") as served:
            url = served.wait_ready()
            dial(url).sendall(request("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}))
            wait_for(lambda: seconds_of_texts(served.process.pid) > 0.3)
            return seconds_from_sigterm(served)

    in_time(seconds_to_end, 0.2 + 2.0)


# ---- what must not be written down -------------------------------------------------------------------------------------
def test_no_key_gets_into_the_log(model, dial):
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
