"""Faults injected into real servers with the bundled model: errors of affected requests, other streams unharmed, recovery."""

from __future__ import annotations

import json
import os
import re
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
from e2e_helpers.streams import LONG, PATH, Streams
from helpers.device import DEVICE, ON_A_CPU, SERVERS
from helpers.eventually import (
    ESTABLISHED,
    LISTENING,
    calm_time,
    children,
    eventually,
    exit_code,
    open_files,
    ports,
    seconds_of_texts,
)
from helpers.failing_core import FATAL, FULL, LOST, POISONED
from helpers.raw_client import connect, until_closed
from helpers.real_server import RealServer, serve

from windlass.server.startup.engines import CORE_VARIABLE

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, limits a process"),
]
LONG_CONTEXT = ("--max-model-len", "8192")
TESTS = Path(__file__).parents[1]


def health(server: RealServer) -> dict[str, object]:
    found: dict[str, object] = server.get("/health")
    return found


def answer(server: RealServer, **fields: object) -> httpx.Response:
    return server.post(PATH, {"prompt": "The sea", "max_tokens": 8, "temperature": 0, **fields})


def check_failure(server: RealServer, status: int, code: str, **fields: object) -> httpx.Response:
    failed = answer(server, **fields)
    assert failed.status_code == status and failed.json()["error"]["code"] == code
    return failed


def check_recovery(server: RealServer, killed: int, expected: object = None) -> None:
    """A new engine gives the expected choices."""
    eventually(lambda: answer(server).status_code == 200, 180.0)
    assert server.engine_pid() != killed
    assert expected is None or answer(server).json()["choices"] == expected


def check_nothing_left(server: RealServer, files: int) -> None:
    eventually(lambda: server.metric("windlass_num_requests_running") == 0)
    # Further connections: the one of the request for the metric, and one that is still closing.
    eventually(lambda: open_files(server.process.pid) <= files + 2)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    """One server for all faults: it must recover from each completely."""
    # Prompts are computed in one chunk, so that a long one needs memory that the engine has not used before.
    with serve(*LONG_CONTEXT, "--max-num-batched-tokens", "8192", "--target-step-ms", "0") as server:
        server.timeout = 240
        yield server
        log = server.log.read_text()
        assert log.count("Traceback") == log.count("the engine failed in a step")


@pytest.fixture(scope="module")
def failing() -> Iterator[RealServer]:
    """The real engine with the defects of `failing_core`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
        patch.setenv(CORE_VARIABLE, "helpers.failing_core:core")
        with serve(*LONG_CONTEXT, WINDLASS_HEADER_TIMEOUT="3") as server:
            server.timeout = 240
            yield server
            log = server.log.read_text()
            assert log.count("Traceback") == log.count("the engine failed in a step")


@pytest.fixture(scope="module")
def text(failing: RealServer) -> str:
    """Text of an undisturbed long stream."""
    alone = Streams(failing.url, 1)
    assert alone.finish() == ["length"]
    (text,) = alone.texts
    return text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_killed_or_stopped_engine_is_replaced(server: RealServer, number: signal.Signals) -> None:
    expected, before, files = answer(server).json()["choices"], server.engine_pid(), open_files(server.process.pid)
    streams = Streams(server.url, 6)
    os.kill(before, number)
    assert set(streams.finish()) == {"engine_unavailable"}
    refused = answer(server)
    assert refused.status_code in (200, 503) and (refused.status_code == 200 or "retry-after" in refused.headers)
    check_recovery(server, before, expected)
    reported = health(server)
    assert str(reported.pop("crash_report")).startswith("crash-")
    assert reported == {"status": "ready", "degraded": ["engine_restarted"]}
    check_nothing_left(server, files)


@ON_A_CPU
@pytest.mark.slow
def test_engine_without_memory_is_replaced(server: RealServer) -> None:
    """The address space is limited: the first step that needs more fails, and the next engine has no such limit."""
    before = server.engine_pid()
    resource.prlimit(before, resource.RLIMIT_AS, (2**20, 2**20))
    check_failure(server, 503, "engine_unavailable", prompt=[5] * 8000, echo=True, logprobs=1)  # logits of every token
    assert "memory" in server.log.read_text()
    check_recovery(server, before)


def chained_rules(count: int) -> str:
    return "\n".join(["start: a0", *(f'a{i}: "x" a{i + 1} | "y"' for i in range(count)), f'a{count}: "z"'])


def chained_schema(count: int) -> dict[str, object]:
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)}
    return {"type": "object", "properties": {"y": {"$ref": "#/$defs/a0"}}, "$defs": {**links, f"a{count}": {}}}


def in_lark(count: int) -> str:
    """As schemas of functions are written."""
    return f"start: %json {json.dumps(chained_schema(count))}"


@pytest.mark.slow
def test_deep_grammars_end_no_process_where_the_stack_is_unlimited() -> None:
    """Threads then have stacks of 2 MiB unless their size is set, which is enough for 650 rules or 220 schemas."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("this user may not lift the limit of the stack")
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
    try:
        with serve() as server:
            before = server.engine_pid()

            for deep in (
                answer(server, structured_outputs={"grammar": chained_rules(700)}),
                answer(server, structured_outputs={"grammar": chained_rules(1900)}),
                answer(server, structured_outputs={"json": chained_schema(300)}),
                answer(server, structured_outputs={"json": chained_schema(900)}),
                answer(server, structured_outputs={"regex": "(" * 60 + "a" + ")?" * 60}),
                answer(server, structured_outputs={"choice": [f"sea {number}" for number in range(4000)]}),
                answer(server, structured_outputs={"grammar": in_lark(900)}),
            ):
                # It is compiled; the limits of a mask may then end its answer.
                assert deep.status_code == 200 or deep.json()["error"]["code"] == "no_token_left", deep.text
            for too_deep in (
                answer(server, structured_outputs={"grammar": chained_rules(2673)}),
                answer(server, structured_outputs={"json": chained_schema(1500)}),
                answer(server, structured_outputs={"grammar": in_lark(1500)}),
            ):
                assert too_deep.status_code == 400 and too_deep.json()["error"]["code"] == "invalid_grammar"
                assert "levels deep" in too_deep.json()["error"]["message"]
            assert server.engine_pid() == before and answer(server).status_code == 200
            assert "ended" not in server.log.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


@pytest.mark.slow
def test_killed_text_processes_are_replaced(server: RealServer) -> None:
    def ask() -> httpx.Response:
        return server.post("/tokenize", {"prompt": "sea " * 2000})  # too long for the event loop

    expected = ask().json()["tokens"]
    (forks,) = children(server.process.pid, b"workers.fork_server")
    streams = Streams(server.url, 2)
    for pid in (*children(forks), forks):
        os.kill(pid, signal.SIGKILL)
    for _ in range(4):
        assert ask().json()["tokens"] == expected
    assert streams.finish() == ["length"] * 2
    eventually(lambda: "text_process_lost" in str(health(server)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_logits_that_are_not_finite_fail_one_request(failing: RealServer, text: str) -> None:
    engine, files = failing.engine_pid(), open_files(failing.process.pid)
    streams = Streams(failing.url, 3)
    check_failure(failing, 500, "not_finite", prompt=[50, POISONED, 51])
    assert answer(failing, prompt=[50, POISONED, 51], stream=True).status_code == 500  # before its first event
    assert streams.finish() == ["length"] * 3 and streams.texts == {text}
    assert failing.engine_pid() == engine and failing.metric("windlass_kv_cache_usage_perc") == 0
    check_nothing_left(failing, files)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failed_kernel_ends_the_engine(failing: RealServer) -> None:
    expected, before, files = answer(failing).json()["choices"], failing.engine_pid(), open_files(failing.process.pid)
    streams = Streams(failing.url, 3)
    check_failure(failing, 503, "engine_unavailable", prompt=[50] * FATAL)
    assert streams.finish() == ["engine_unavailable"] * 3
    check_recovery(failing, before, expected)
    assert "a kernel has failed" in failing.log.read_text()
    check_nothing_left(failing, files)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpu_without_memory_for_a_step_fails_the_newest_request(failing: RealServer, text: str) -> None:
    engine, files = failing.engine_pid(), open_files(failing.process.pid)
    streams = Streams(failing.url, 3)
    assert failing.metric("windlass_num_requests_running") >= 3
    failed = check_failure(failing, 503, "out_of_memory", prompt=[50] * FULL, n=2)
    assert "retry-after" in failed.headers and "newest" in failed.json()["error"]["message"]
    assert answer(failing, prompt=[50] * FULL, stream=True).status_code == 503  # before its first event
    assert streams.finish() == ["length"] * 3 and streams.texts == {text}
    assert failing.engine_pid() == engine and failing.metric("windlass_kv_cache_usage_perc") == 0
    assert failing.log.read_text().count("the device has no memory for a step of ") == 2
    check_nothing_left(failing, files)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lost_gpu_ends_the_engine_with_a_crash_report(failing: RealServer) -> None:
    expected, before = answer(failing).json()["choices"], failing.engine_pid()
    streams = Streams(failing.url, 2)
    check_failure(failing, 503, "engine_unavailable", prompt=[50] * LOST)
    assert streams.finish() == ["engine_unavailable"] * 2
    check_recovery(failing, before, expected)
    report = json.loads((Path(re.findall(r"crash report: (\S+)", failing.log.read_text())[-1])).read_text())
    assert "AcceleratorError: CUDA error: an illegal memory access" in report["reason"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_texts_of_four_mebibytes_do_not_disturb_streams(failing: RealServer, text: str) -> None:
    streams = Streams(failing.url, 2)
    prompt = "sea of words " * (4 * 2**20 // 13)
    answers: list[httpx.Response] = []
    asking = [
        threading.Thread(target=lambda: answers.append(answer(failing, prompt=prompt, truncate_prompt_tokens=16)))
        for _ in range(2)
    ]
    for thread in asking:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in asking):
        begin = time.monotonic()
        assert httpx.get(f"{failing.url}/health", timeout=60).status_code == 200
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.05)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert streams.finish() == ["length"] * 2 and streams.texts == {text}
    gaps = sorted(gap for result in streams.results for gap in result.gaps)
    print(f"/health in {slowest:.3f} s at most, gaps of streams {gaps[-3:]}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_heads_sent_byte_by_byte_time_out(failing: RealServer) -> None:
    files, streams = open_files(failing.process.pid), Streams(failing.url, 2)
    held = [connect(failing.url, "127.0.0.2") for _ in range(200)]
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 4000
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
    assert ended == len(held), "every connection must be closed long before its head is complete"
    found = [until_closed(connection) for connection in held]
    assert all(not each or each.startswith(b"HTTP/1.1 408 ") for each in found)
    for connection in held:
        connection.close()
    assert streams.finish() == ["length"] * 2
    check_nothing_left(failing, files)


@pytest.mark.slow
def test_log_on_a_full_disk_stops_nothing() -> None:
    command = [sys.executable, "-m", "windlass.server.cli.main", "serve", "demo", "--port", "0"]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stderr=full, stdout=full, env={**SERVERS, **os.environ}) as process,
    ):
        try:
            eventually(lambda: ports(process.pid, LISTENING), 60.0)
            url = f"http://127.0.0.1:{ports(process.pid, LISTENING)[0]}"
            eventually(lambda: _ready(url), 60.0)
            assert Streams(url, 2).finish() == ["length"] * 2
            assert httpx.post(url + PATH, content=b"{").status_code == 400
            process.send_signal(signal.SIGTERM)
            assert exit_code(process) == 0
        finally:
            process.kill()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prompt", "answer", "upload", "tokenizing", "restart"])
def test_sigterm_ends_the_server_in_every_phase(phase: str) -> None:
    length = 32_768 if DEVICE == "cpu" else 131_072  # its prompt is computed for seconds
    with serve("--max-model-len", str(length), "--grace-period", "1") as server:
        ends: list[int | str] = []
        body: dict[str, object] = dict(LONG)

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
            eventually(lambda: server.metric("windlass_num_requests_running") == 1)
        elif phase == "tokenizing":
            eventually(lambda: seconds_of_texts(server.process.pid) > 0.2)
        else:
            eventually(lambda: ends or ports(server.process.pid, ESTABLISHED))
        begin = calm_time()
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server.process) == 0
        assert calm_time() - begin < 1.0 + 2.0 + 10.0  # the limit, and 10 s of work
        thread.join(60)
        assert len(ends) == 1 and ends[0] in (200, 503, "ReadError", "RemoteProtocolError", "WriteError")
        if phase in ("answer", "prompt"):
            assert ends[0] in (200, 503)  # not cut
        assert "Traceback" not in server.log.read_text()


def _slowly(body: bytes) -> Iterator[bytes]:
    for number in body:
        yield bytes([number])
        time.sleep(0.1)
