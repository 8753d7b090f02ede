"""`windlass top`: statistics of a real server, the screen of a real terminal, and errors."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from api_helpers.pseudo_terminal import CTRL_C, PseudoTerminal
from helpers.eventually import eventually, exit_code
from helpers.real_server import RealServer, serve

from windlass.clients import APIConnectionError, APIError, Client, Metrics
from windlass.clients.errors import status_error_class
from windlass.clients.terminal import CommandError
from windlass.server.cli import top
from windlass.server.cli.top import (
    IntervalStats,
    MetricsSnapshot,
    MetricsWatcher,
    interval_stats,
    plain,
    quantile,
    rows,
)

MAIN = ("-m", "windlass.server.cli.main", "top")
KEY = "top-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    profile = 'long={"rope_type": "yarn", "factor": 2.0}'
    with serve("--kv-cache-memory", "64MiB", "--rope-profile", profile) as running:
        yield running


def complete(server: RealServer, tokens: int = 16, **fields: Any) -> None:
    body = {"prompt": list(range(100, 148)), "max_tokens": tokens, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *MAIN, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_statistics_between_two_snapshots(server: RealServer) -> None:
    complete(server, 8)  # before the first snapshot
    with Client(server.url) as client:
        watch, beats = MetricsWatcher(client), server.metric("windlass_event_loop_lag_seconds_count")
        complete(server, 16)
        complete(server, 10, rope_scaling="long", n=2)
        complete(server, 12, rope_scaling={"rope_type": "linear", "factor": 2.0})
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "timeout": 1e-9})
        eventually(lambda: server.metric("windlass_event_loop_lag_seconds_count") > beats, 30)
        found = watch.next()
        after = watch.next()
    total = {name: round(getattr(found, f"{name}_rate") * found.seconds, 6) for name in ("generated", "finished")}
    assert total == {"generated": 16 + 20 + 12, "finished": 4}
    assert round(found.failed_rate * found.seconds, 6) == 1
    assert found.prompt_rate is not None and round(found.prompt_rate * found.seconds) >= 3 * 48
    assert found.state == "ready" and found.running == found.waiting == 0
    assert found.blocks is not None and found.blocks > 0 and found.blocks_used == 0
    assert found.prefix_hits is not None and 0 < found.prefix_hits < 1  # the first prompt was cached
    assert found.first_token is not None and 0 < found.first_token[0] <= found.first_token[2]
    assert found.between_tokens is not None and found.loop_lag is not None
    by_name = {each.name: each for each in found.scalings}
    assert set(by_name) == {"default", "long", "linear"}
    seconds = found.seconds
    assert round(by_name["long"].generated_rate * seconds, 6) == 20
    assert round(by_name["linear"].generated_rate * seconds, 6) == 12
    assert round(by_name["long"].prompt_rate * seconds, 6) == 48
    # No further requests.
    assert after.generated_rate == 0 and after.first_token is None and after.prefix_hits is None
    assert all(each.generated_rate == 0 for each in after.scalings)


@pytest.mark.slow
def test_a_running_stream_is_counted(server: RealServer) -> None:
    body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True, "rope_scaling": "long"}
    body |= {"context_overflow": "shift"}  # else it could end before the snapshot
    with Client(server.url) as client, httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        watch = MetricsWatcher(client)
        for _ in range(30):
            next(lines)
        found = watch.next()
    (long,) = [each for each in found.scalings if each.name == "long"]
    assert long.running == 1 and long.generated_rate > 0


def snapshot(at: float, text: str) -> MetricsSnapshot:
    return MetricsSnapshot(at=at, state="ready", metrics=Metrics.parse(text))


def test_counters_of_a_restarted_engine() -> None:
    first = "windlass_generation_tokens_total 500\n"
    second = "windlass_generation_tokens_total 30\n"
    assert interval_stats(snapshot(0, first), snapshot(2, second)).generated_rate == 15
    assert interval_stats(snapshot(0, ""), snapshot(2, second)).generated_rate == 15
    # A missing metric is not zero.
    assert interval_stats(snapshot(0, first), snapshot(2, "")).generated_rate is None


def test_quantiles_are_linear_inside_buckets() -> None:
    bounds = [0.1, 0.5, 1.0, math.inf]
    counts = [10.0, 30.0, 40.0, 40.0]
    for share in (0.05, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert quantile(share, bounds, counts) == pytest.approx(
            np.interp(share * 40, [0, *counts[:3]], [0, *bounds[:3]])
        )
    assert quantile(0.99, [0.1, math.inf], [1.0, 100.0]) == 0.1  # beyond all finite bounds
    assert quantile(0.5, [0.1, 0.2, math.inf], [0.0, 4.0, 4.0]) == pytest.approx(0.15)


def test_plain_lines_with_large_numbers_fit_80_columns() -> None:
    large = "".join(f"windlass_{name} 98765432109\n" for name in (
        "num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total",
        "kv_blocks", "kv_blocks_used", "engine_restarts_total"))  # fmt: skip
    large += "windlass_kv_cache_usage_perc 0.987\n"
    found = interval_stats(snapshot(0, ""), snapshot(1, large))
    assert all(len(f"  {label:<12} {text}") <= 80 for label, text in rows(found))
    assert "98.8G running" in plain(found, "http://127.0.0.1:8000")


def test_once_is_text_or_one_json_object(server: RealServer) -> None:
    done = run(f"{server.url}/v1", "--once", "--interval", "0.2")
    assert done.returncode == 0 and done.stderr == ""
    assert re.match(rf"{server.url}, the last 0\.\d s\n  engine +ready\n  requests +0 running, 0 waiting", done.stdout)
    assert "\x1b" not in done.stdout
    done = run(server.url, "--once", "--json", "--interval", "0.2")
    shown = json.loads(done.stdout)
    assert shown["state"] == "ready" and shown["running"] == 0 and shown["loop_lag"].keys() == {"p50", "p90", "p99"}


@pytest.mark.slow
def test_json_ends_with_its_reader(server: RealServer) -> None:
    process = subprocess.Popen(
        [sys.executable, *MAIN, server.url, "--json", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    for _ in range(3):
        assert json.loads(process.stdout.readline())["state"] == "ready"
    process.stdout.close()
    assert exit_code(process) == 0 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", "\x1b", CTRL_C])
def test_a_terminal_shows_live_statistics_until_a_key(server: RealServer, key: str) -> None:
    complete(server, rope_scaling="long")
    with PseudoTerminal(*MAIN, server.url, "--interval", "0.3", columns=80) as terminal:
        terminal.wait(rf"windlass top  {server.url}")
        terminal.wait(r"engine +ready")
        terminal.wait(r"tokens/s +[\d.]+ in, [\d.]+ out")
        terminal.wait(r"scaling +running +in/s +out/s")
        terminal.wait(r"long +0 ")
        terminal.type("\x1b[A\x1bOP\x1b[15~x")  # an arrow, F1 and F5 are not the Escape key
        for _ in range(2):
            terminal.wait(r"engine +ready")
        terminal.type(key)
        assert terminal.end() == 0
        lines = re.split(r"\n|(?=windlass top)", terminal.shown)  # each frame overwrites the previous one
        assert max(map(len, lines)) <= 80 and "Traceback" not in terminal.shown


@pytest.mark.slow
def test_an_ended_server_is_reported() -> None:
    with (
        serve("--kv-cache-memory", "64MiB") as gone,
        PseudoTerminal(*MAIN, gone.url, "--interval", "0.2", columns=80) as terminal,
    ):
        terminal.wait(r"engine +ready")
        gone.process.terminate()
        terminal.wait(r"cannot reach http")
        terminal.wait(r"engine +ready")  # the last known statistics remain
        terminal.type("q")
        assert terminal.end() == 0


class Flaky:
    """Statistics of a server that is reachable at each + of the script and fails at each -."""

    def __init__(self, script: str, error: APIError | None = None) -> None:
        self.script = list(script)
        self.error = error or APIConnectionError("cannot reach it: refused")

    def next(self) -> IntervalStats:
        if not self.script:
            raise KeyboardInterrupt
        if self.script.pop(0) == "-":
            raise self.error
        return interval_stats(snapshot(0, ""), snapshot(1, ""))


def test_json_continues_after_an_unreachable_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "MetricsWatcher", lambda client: Flaky("+--+-+"))
    assert top.watch("http://127.0.0.1:9", None, 0, once=False, as_json=True) == 0
    out, err = capsys.readouterr()
    assert len([json.loads(line) for line in out.splitlines()]) == 3
    assert err.count("\n") == err.count("cannot reach") == 2  # one line for each period without answers
    monkeypatch.setattr(top, "MetricsWatcher", lambda client: Flaky("-"))
    with pytest.raises(CommandError, match="cannot reach it"):
        top.watch("http://127.0.0.1:9", None, 0, once=True, as_json=True)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_closed_terminal_ends_it_silently(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    window, terminal = os.openpty()

    class Closing(Flaky):
        def next(self) -> IntervalStats:
            os.close(window)
            return super().next()

    with os.fdopen(os.dup(terminal)) as typed, os.fdopen(terminal, "w") as shown, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", typed)
        patched.setattr(sys, "stdout", shown)
        patched.setattr(top, "MetricsWatcher", lambda client: Closing("+"))
        assert top.watch("http://127.0.0.1:9", None, 0.01, once=False, as_json=as_json) == 0


def test_refused_requests_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(status: int) -> int:
        error = status_error_class(status)("no", status=status)
        monkeypatch.setattr(top, "MetricsWatcher", lambda client: Flaky("-+", error))
        return top.watch("http://127.0.0.1:9", None, 0, once=False, as_json=True)

    for status in (401, 404):
        with pytest.raises(CommandError, match=f"it answered {status}"):
            watch(status)
    assert watch(429) == watch(503) == 0


@pytest.mark.slow
def test_errors_are_one_line_with_advice() -> None:
    done = run("http://127.0.0.1:9", "--once")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"error: cannot reach http://127\.0\.0\.1:9/ready: Connection refused; is the server running, .+\?\n",
        done.stderr,
    )
    assert done.stderr.count("reach") == 1
    assert run("nonsense", "--once").returncode == 2
    assert run("http://127.0.0.1:9", "--interval", "0").returncode == 2
    with serve("--kv-cache-memory", "64MiB", "--api-key", KEY, "--metrics-names", "vllm") as closed:
        done = run(closed.url, "--once")
        assert (
            done.returncode == 2
            and done.stderr.count("\n") == 1
            and "401" in done.stderr
            and "--api-key" in done.stderr
        )
        done = run(closed.url, "--once", WINDLASS_API_KEY=KEY)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--metrics-names" in done.stderr
        assert KEY not in done.stderr
