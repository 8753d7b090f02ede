"""Progress and interruption of `windlass replay` on a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.eventually import eventually
from helpers.scripted_http import Exchange, Script, answer, scripted_server, silence

from windlass.clients.loadtest.display import ProgressDisplay
from windlass.clients.loadtest.runner import RunProgress
from windlass.server.cli import main as cli
from windlass.server.cli.replay import RecordedAnswer, RecordedLine, ReplayPace, ReplayRequest, replay
from windlass.server.serving.observers import RECORD_VERSION, digest

COUNT = 9


def recorded(number: int) -> RecordedLine:
    """A recorded request with the answer 5."""
    return RecordedLine(
        at=float(number),
        request_id=f"r{number}",
        route="/v1/completions",
        prompt_tokens=[1],
        fields={},
        outcome="ok",
        answers=[RecordedAnswer(choice=0, tokens=1, digest=digest([5]))],
        prompt_token_ids=[[number]],
        exact=True,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps({"windlass_record": RECORD_VERSION, "deterministic": True, "text": True})]
    lines += [recorded(number).model_dump_json(exclude={"of", "line"}) for number in range(COUNT)]
    path = tmp_path / "load.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def tokens(*ids: int) -> Script:
    return answer({"choices": [{"index": 0, "token_ids": list(ids)}]})


def asked_for_answers(exchanges: list[Exchange]) -> int:
    return sum(exchange.request.method == "POST" for exchange in exchanges)


def scripted(exchanges: list[Exchange], *answers: Script) -> Script:
    """A script that gives the answers in order and then repeats the last one."""

    async def script(exchange: Exchange) -> None:
        exchanges.append(exchange)
        if exchange.request.method == "GET":
            await answer({"object": "list", "data": []})(exchange)
        else:
            await answers[min(asked_for_answers(exchanges), len(answers)) - 1](exchange)

    return script


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    command = [sys.executable, "-m", "windlass.server.cli.main", "replay", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A background job of a shell would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "as_json"),
    [
        (signal.SIGINT, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_replay_with_a_report(file: Path, number: signal.Signals, as_json: bool) -> None:
    exchanges: list[Exchange] = []
    # Two at once: the fifth is sent when three have been compared.
    with scripted_server(scripted(exchanges, tokens(5), tokens(6), tokens(5), silence)) as server:
        options = ["--as-fast-as-possible", "--concurrency", "2", *(["--json"] if as_json else [])]
        process = start(str(file), "--url", server.url, *options)
        try:
            eventually(lambda: asked_for_answers(exchanges) == 5, 60)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in err
    assert err.startswith(f"repeating 9 requests on {server.url}\n0/9 ended")
    if as_json:
        found = json.loads(out)
        assert found["interrupted"] is True and (found["requests"], found["recorded_requests"]) == (3, COUNT)
        assert (found["compared"], found["equal"], found["failed"]) == (3, 2, [])
        assert len(found["mismatches"]) == 1
    else:
        assert "interrupted: 6 of 9 requests had not ended\n" in out
        assert out.count("mismatch: line ") == 1 and "3 compared: 2 identical, 1 different\n" in out


@pytest.mark.slow
def test_a_signal_before_any_answer(file: Path) -> None:
    exchanges: list[Exchange] = []
    with scripted_server(scripted(exchanges, silence)) as server:
        process = start(str(file), "--url", server.url)
        try:
            eventually(lambda: asked_for_answers(exchanges) == 1, 60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert "interrupted: 9 of 9 requests had not ended\nno answer was compared yet\n" in out


def test_progress_without_a_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(scripted([], tokens(5))) as server:
        assert cli.run(["replay", str(file), "--url", server.url, "--as-fast-as-possible", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[:2] == [f"repeating 9 requests on {server.url}", "0/9 ended, 0 running"]
    assert "\x1b" not in captured.err
    found = json.loads(captured.out)
    assert found["interrupted"] is False and found["requests"] == found["recorded_requests"] == COUNT


def test_progress_counts_all_requests() -> None:
    """All calls get the same object, so it is read after the end."""
    reported: list[RunProgress] = []
    requests = [ReplayRequest(recorded(number), "/v1/completions", {}) for number in range(3)]
    with scripted_server(tokens(5), answer({}, "500 Internal Server Error"), tokens(5)) as server:
        asyncio.run(replay(server.url, None, requests, ReplayPace(speed=None), progress=reported.append))
    assert (reported[-1].total, reported[-1].ended, reported[-1].failed, reported[-1].running) == (3, 3, 1, 0)


def test_progress_without_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(terminal=True)
    display(RunProgress(phase="running", total=10, ended=3, running=2, failed=1, chunks=None))
    display.stop()
    shown = capsys.readouterr().err
    assert "3/10 ended, 2 running, 1 failed" in shown and "chunks" not in shown
