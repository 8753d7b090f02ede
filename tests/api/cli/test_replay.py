"""`--record` and `windlass replay`: equal servers give equal tokens, changed ones do not, and no text leaks."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.device import SERVERS
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve
from helpers.scripted_http import Script, answer, events, scripted_server

from windlass.server.cli import main as cli
from windlass.server.cli.replay import RecordedLine, ReplayPace, ReplayRequest, make_replay_request, replay

pytestmark = pytest.mark.timeout(240)
CANARY, KEY = "xylophone-canary", "key-4711-canary"
SMALL = ("--kv-cache-memory", "64MiB", "--deterministic")
LINEAR = json.dumps({"rope_type": "linear", "factor": 4.0})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASK = [{"role": "user", "content": f"What does horse mean? {CANARY}"}]


def workload(server: RealServer) -> int:
    """Send one request of each kind. Returns their number."""
    posts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": f"The {CANARY}", "max_tokens": 24, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "One", "max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.5}),
        ("/v1/completions", {"prompt": "One", "max_tokens": 12, "n": 1, "best_of": 3}),
        ("/v1/completions", {"prompt": ["One", "Two words"], "max_tokens": 10, "temperature": 0}),
        ("/v1/completions", {"prompt": "Stop", "max_tokens": 60, "stop": ["e", "a"]}),
        ("/v1/completions", {"prompt": "Long", "max_tokens": 20, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("/v1/completions", {"prompt": "No", "max_tokens": 20, "bad_words": ["the"], "dry_multiplier": 0.8}),
        ("/v1/completions", {"prompt": "Shift", "max_tokens": 600, "ignore_eos": True, "context_overflow": "shift"}),
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 16, "stream": True}),
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 40, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"model": "demo", "messages": ASK, "max_tokens": 16}),
        ("/v1/responses", {"input": f"Say {CANARY}", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": [f"The {CANARY}", "Two words"], "dimensions": 16, "pooling": "mean"}),
        ("/v1/rerank", {"query": CANARY, "documents": ["One", "Two words"], "pooling": "last",
                        "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("/pooling", {"input": "One", "task": "token_embed", "attention_window": 64}),
    ]  # fmt: skip
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        for path, body in posts:
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
        # The client disconnects.
        body = {"prompt": "Gone", "max_tokens": 4000, "ignore_eos": True, "stream": True, "context_overflow": "shift"}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
        # Refused after it was counted: it does not reach the engine.
        assert http.post("/v1/completions", json={"prompt": "Refused", "max_tokens": -1}).status_code == 400
    return len(posts) + 1


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def recorded(file: Path, *options: str) -> list[dict[str, Any]]:
    """The requests that a server recorded of the workload."""
    with serve(*SMALL, "--api-key", KEY, "--record", str(file), *options) as server:
        count = workload(server)
        eventually(lambda: len(file.read_text().splitlines()) == count + 1, 20)
    head, *found = lines_of(file)
    assert head["windlass_record"] == 1 and head["deterministic"] is True and head["model"] == "demo"
    return found


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("record") / "with.jsonl"
    recorded(file, "--record-text")
    return file


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("record") / "without.jsonl"
    recorded(file)
    return file


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    command = [sys.executable, "-m", "windlass.server.cli.main", "replay", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**environment, **SERVERS, "OMP_NUM_THREADS": "1"}
    )


def replayed(file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = run(str(file), "--json", *arguments)
    assert done.stdout.count("\n") == 1, done
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_another_server_gives_the_same_tokens_sequentially_and_concurrently(with_text: Path) -> None:
    code, found = replayed(with_text, "demo", *SMALL)
    assert code == 0, found
    assert found["requests"] == 16 and found["failed"] == found["mismatches"] == []
    # All except the one with a disconnected client, including best_of, grammars and penalties.
    assert found["compared"] == found["equal"] == 15
    assert found["fingerprint"]["now"] == found["fingerprint"]["recorded"]
    code, crowded = replayed(with_text, "demo", *SMALL, "--as-fast-as-possible")
    assert code == 0 and crowded["equal"] == 15 and crowded["tokens"] == found["tokens"]


@pytest.mark.slow
def test_another_scaling_gives_mismatches(with_text: Path) -> None:
    done = run(str(with_text), "demo", *SMALL, "--rope-scaling", LINEAR, "--as-fast-as-possible")
    assert done.returncode == 1
    assert "mismatch: line 2, /v1/completions, request " in done.stdout
    assert "has another model or other settings" in done.stdout
    code, found = replayed(with_text, "demo", *SMALL, "--rope-scaling", LINEAR, "--as-fast-as-possible")
    different = {each["line"] for each in found["mismatches"]}
    assert code == 1 and found["failed"] == []
    # The request with its own scaling is equal; grammars and stop strings may hide differences.
    assert 7 not in different and len(different) >= 8


@pytest.mark.slow
def test_changes_in_the_file_are_mismatches(with_text: Path, tmp_path: Path) -> None:
    """A digest, a seed, and a token of a prompt."""
    lines = lines_of(with_text)
    lines[1]["answers"][0]["digest"] = "0" * 32
    lines[2]["fields"]["seed"] += 1
    lines[5]["prompt_token_ids"][0][-1] += 1
    lines[13]["prompt_token_ids"][1][0] += 1
    lines[14]["fields"]["rope_scaling"]["factor"] = 3.0
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = replayed(changed, "demo", *SMALL, "--as-fast-as-possible")
    assert code == 1 and {each["line"] for each in found["mismatches"]} == {2, 3, 6, 14, 15}


@pytest.mark.slow
def test_without_text_only_lengths_are_recorded_and_repeated(without: Path) -> None:
    text = without.read_text()
    assert CANARY not in text and KEY not in text and "horse" not in text and "prompt_token_ids" not in text
    assert "digest" not in text and '"stop"' not in text.replace('"finish_reason":"stop"', "").replace(
        '"context_overflow":"stop"', ""
    )
    _, *lines = lines_of(without)
    assert {line["route"] for line in lines} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/pooling",
    }
    assert [line["outcome"] for line in lines].count("client_disconnected") == 1
    assert all(
        type(line["fields"]["seed"]) is int
        for line in lines
        if line["fields"].get("temperature") and len(line["prompt_tokens"]) == 1
    )
    with serve(*SMALL, "--api-key", KEY) as server:
        code, found = replayed(without, "--url", server.url, "--api-key", KEY, "--speed", "8")
        assert code == 0 and found["compared"] == 0 and found["failed"] == []
        answers = [answer.get("tokens", 0) for line in lines for answer in line["answers"]]
        # All answers of a prompt become as long as its longest one.
        longest = sum(max(a.get("tokens", 0) for a in line["answers"]) * len(line["answers"]) for line in lines)
        assert sum(answers) <= found["tokens"] == longest
        prompts = sum(sum(line["prompt_tokens"]) for line in lines)
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text
        (counted,) = [line for line in metrics.splitlines() if line.startswith("windlass_prompt_tokens_total ")]
        assert float(counted.split()[1]) == prompts


@pytest.mark.slow
def test_speed(without: Path, tmp_path: Path) -> None:
    head, *lines = lines_of(without)
    written = [line for line in lines if all("tokens" in answer for answer in line["answers"])]
    short = [line for line in written if sum(answer["tokens"] for answer in line["answers"]) < 40][:3]
    for index, line in enumerate(short):
        line["at"] = head["at"] + 8.0 * index
    file = tmp_path / "slow.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [head, *reversed(short)]))
    with serve(*SMALL, "--record", str(tmp_path / "again.jsonl")) as server:
        started = time.monotonic()
        assert replayed(file, "--url", server.url, "--speed", "2")[0] == 0
        assert time.monotonic() - started >= 8.0
        assert replayed(file, "--url", server.url, "--as-fast-as-possible")[1]["seconds"] < 8.0
        eventually(lambda: len((tmp_path / "again.jsonl").read_text().splitlines()) == 7, 30)
    _, *again = lines_of(tmp_path / "again.jsonl")
    times = sorted(line["at"] for line in again)[:3]
    assert [round((time - times[0]) / 4.0) for time in times] == [0, 1, 2]
    assert [line["prompt_tokens"] for line in again[:3]] == [line["prompt_tokens"] for line in short]


def metric(server: RealServer, line: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return float(next(each for each in text.splitlines() if each.startswith(line)).split()[-1])


@pytest.mark.slow
def test_a_full_file_ends_the_recording_without_failed_requests(tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    with serve("--kv-cache-memory", "64MiB", "--record", str(file), WINDLASS_RECORD_LIMIT="2KiB") as server:
        for _ in range(8):
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        eventually(lambda: metric(server, "windlass_recorded_requests_total ") > 0, 5)
        eventually(lambda: metric(server, 'windlass_record_lost_total{reason="full"}') >= 3, 5)
        log = server.log.read_text()
    assert log.count("WINDLASS_RECORD_LIMIT") == 1
    assert 1024 < file.stat().st_size <= 2048
    lines_of(file)  # complete lines only
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_disk_errors_are_counted_and_logged_once(tmp_path: Path) -> None:
    with serve("--kv-cache-memory", "64MiB", "--record", "/dev/full") as server:
        for _ in range(5):
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        eventually(lambda: metric(server, 'windlass_record_lost_total{reason="disk"}') >= 5, 5)
        assert server.log.read_text().count("No space left on device") == 1
        assert "Traceback" not in server.log.read_text()


def test_invalid_recordings_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = json.dumps({"windlass_record": 1})
    for name, text, message in (
        ("none", None, "cannot read"),
        ("empty", "", "contains no requests"),
        ("other", '{"a": 1}\n', "was not written by"),
        ("broken", head + "\n{\n", "line 2 is not JSON"),
        ("newer", '{"windlass_record": 99}\n', "format version 99 is not supported"),
        ("wrong", head + '\n{"at": "x"}\n', "line 2: at:"),
        ("list", head + "\n[]\n", "line 2 is not an object"),
    ):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        assert cli.run(["replay", str(file), "--url", "http://127.0.0.1:9"]) == 2
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


WELL = RecordedLine(at=0.0, request_id="r", route="/v1/completions", prompt_tokens=[1], fields={}, outcome="ok")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answer({"detail": "Not Found"}, "404 Not Found"), "HTTP 404: Not Found"),
        (answer({"error": "no such model"}, "400 Bad Request"), "HTTP 400: no such model"),
        (answer({"error": {"message": "too long", "code": "x"}}, "400 Bad Request"), "HTTP 400: too long"),
        (answer({"choices": []}, "503 Service Unavailable"), "HTTP 503"),
        (answer(b"<p>Bad\n gateway", "502 Bad Gateway", content_type="text/html"), "HTTP 502: <p>Bad gateway"),
        (answer({}, "307 Temporary Redirect", location="/elsewhere"), "HTTP 307"),
        (answer({"error": "no such model"}), "no such model"),
        (events({"error": "it broke"}, "[DONE]"), "it broke"),
        (events({"error": {"message": "it broke"}}, "[DONE]"), "it broke"),
        (answer({"choices": []}), "the answer has no choices"),
        (answer({}), "the answer has no choices"),
        (events("[DONE]"), "the answer has no choices"),
        (answer({"choices": [{"index": 0, "token_ids": [5]}], "error": None}), ""),
        (answer({"choices": [{"index": 0, "token_ids": []}]}), ""),
    ],
)
def test_invalid_answers_are_failures_with_a_reason(script: Script, reason: str) -> None:
    with scripted_server(script) as server:
        asked = ReplayRequest(WELL, "/v1/completions", {"prompt": "a"})
        (found,) = asyncio.run(replay(server.url, None, [asked], ReplayPace())).requests
    assert (found.error, found.failed) == (reason, bool(reason))


def test_a_missing_key_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recording"
    file.write_text(json.dumps({"windlass_record": 1}) + "\n" + WELL.model_dump_json(exclude_none=True) + "\n")
    with scripted_server(answer({"error": {"message": "no key"}}, "401 Unauthorized")) as server:
        assert cli.run(["replay", str(file), "--url", server.url]) == 2
        assert capsys.readouterr().err == f"error: {server.url}: no key: give one with --api-key\n"
        assert len(server.requests) == 1


def test_streams_reuse_a_connection() -> None:
    with scripted_server(events({"choices": [{"index": 0, "token_ids": [5]}]}, "[DONE]")) as server:
        asked = [ReplayRequest(WELL, "/v1/completions", {"prompt": "a"})] * 3
        found = asyncio.run(replay(server.url, None, asked, ReplayPace(speed=None, concurrent=1))).requests
    assert [each.error for each in found] == [""] * 3 and server.connections == 1


def test_answers_have_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    async def sent(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        given.append(request.extensions["timeout"])
        return httpx.Response(200, json={"choices": [{"index": 0, "token_ids": [5]}]}, request=request)

    monkeypatch.setattr(httpx.AsyncClient, "send", sent)
    asked = ReplayRequest(WELL, "/v1/completions", {"prompt": "a"})
    (found,) = asyncio.run(replay("http://127.0.0.1:9", None, [asked], ReplayPace())).requests
    assert found.error == "" and given == [{"connect": 10.0, "read": None, "write": None, "pool": None}]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("outcome", ["ok", "client_disconnected"])
def test_incomplete_requests_are_limited_to_their_recorded_tokens(name: str, outcome: str) -> None:
    line = {
        "prompt_token_ids": [[1]],
        "outcome": outcome,
        "answers": [{"choice": 0, "tokens": 7}, {"choice": 1, "tokens": 3}],
        "fields": {"max_tokens": 4000, "min_tokens": 100},
    }
    body = {"messages": [], name: 4000, "min_tokens": 100}
    for more in ({}, {"chat": True, "body": body}):
        asked = make_replay_request(RecordedLine.model_validate(WELL.model_dump() | line | more), [1]).body
        limits = {asked[limit] for limit in ("max_tokens", "max_completion_tokens") if limit in asked}
        assert (limits, asked["min_tokens"]) == (({4000}, 100) if outcome == "ok" else ({7}, 7))


@pytest.mark.slow
def test_a_server_that_is_not_there_and_options_that_do_not_go(
    with_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["replay", str(with_text), "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.run(["replay", str(with_text), "--speed", "0"]) == 2
    assert "--speed" in capsys.readouterr().err
    assert cli.run(["serve", "demo", "--record-text"]) == 2
    assert "needs --record" in capsys.readouterr().err
    assert cli.run(["serve", "demo", "--record", str(tmp_path / "no" / "file")]) == 2
    assert "cannot write --record" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WINDLASS_")]:
        monkeypatch.delenv(name)
    yield
