"""The managed server of a chat or replay. Here it is a script that prints the URL of a test server."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.live_server import Live, live_server
from helpers.scripted_http import ScriptedServer, answer, scripted_server

from windlass.server.cli import main as cli

WELL = {"at": 0.0, "request_id": "r", "route": "/v1/completions", "prompt_tokens": [3], "fields": {}, "outcome": "ok"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A proxy in the environment that refuses all requests."""
    with scripted_server(answer({"error": "not through here"}, "403 Forbidden")) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, server.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make later managed servers report this URL."""

    def start(url: str) -> None:
        script = tmp_path / "python"
        notes = f'echo "$*" > {tmp_path}/arguments\nenv > {tmp_path}/environment'
        script.write_text(f"#!/bin/sh\n{notes}\necho 'loading toy; listening on {url}/v1' >&2\ncat > /dev/null\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return start


@pytest.fixture(params=["chat", "replay"])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    if request.param == "chat":
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        before = signal.getsignal(signal.SIGINT)
        yield ["chat", "demo"]
        signal.signal(signal.SIGINT, before)
        return
    file = tmp_path / "recording"
    file.write_text(json.dumps({"windlass_record": 1}) + "\n" + json.dumps(WELL) + "\n")
    yield ["replay", str(file), "demo"]


def test_requests_bypass_the_proxies_of_the_environment(
    command: list[str], live: Live, proxy: ScriptedServer, started: Callable[[str], None]
) -> None:
    started(live.url)
    count = len(live.engine.requests)
    assert cli.run(command) == 0
    assert len(live.engine.requests) == count + 1 and proxy.requests == []


def test_sampling_options_reach_the_server(
    command: list[str], live: Live, started: Callable[[str], None], tmp_path: Path
) -> None:
    started(live.url)
    options = ["--generation-config", "none", "--override-generation-config", '{"top_k": 3}']
    assert cli.run([*command, *options]) == 0
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.endswith(' --generation-config=none --override-generation-config={"top_k": 3}\n')


def test_folders_of_the_environment_reach_the_server(
    command: list[str],
    live: Live,
    started: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    passed = {"WINDLASS_CACHE": "/cache", "WINDLASS_CRASH_DIR": "/crashes"}
    for name, value in (passed | {"WINDLASS_PORT": "80"}).items():
        monkeypatch.setenv(name, value)
    started(live.url)
    assert cli.run(command) == 0
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert passed.items() <= found.items() and "WINDLASS_PORT" not in found


@pytest.mark.parametrize("ready", [False, True])
def test_a_refusal_is_one_line(
    command: list[str], ready: bool, started: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = answer({"error": {"message": "not\nyours"}}, "403 Forbidden")
    with scripted_server(*[answer({"status": "ready"})] * ready, refusal) as server:
        started(server.url)
        assert cli.run(command) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err == f"error: {server.url}: not yours\n"
