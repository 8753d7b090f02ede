"""Ends of exchanges: errors before and within a stream, deadlines, keep-alives, disconnects, draining."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from helpers.described import description
from helpers.eventually import in_time
from helpers.live_server import Live, live_server, parse_events, server_fixture

from windlass.engine.errors import (
    DeadlineError,
    DeviceMemoryError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    SlowConsumerError,
)

COMPLETION = ("/v1/completions", {"prompt": "a", "max_tokens": 100})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100})
shared = server_fixture(deadline_slack=0.1)


@pytest.fixture
def live(live: Live) -> Iterator[Live]:
    yield live
    live.wait(lambda: live.state.in_flight == 0 and live.engine.running == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_of_a_prompt(live: Live, path: str) -> None:
    live.engine.cached_tokens, live.engine.first_delay, live.engine.delay = 1, 0.03, 0.03
    body: dict[str, Any] = {"max_tokens": 2, "stream_options": {"include_usage": True}, "return_progress": True}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    *events, usage, done = live.stream(path, body)
    progress = [event.pop("prompt_progress", None) for event in events]
    total = usage["usage"]["prompt_tokens"]
    times = [each.pop("time_ms") for each in progress if each is not None]
    assert times == sorted(times) and 30 <= times[0] < times[1]
    first, second = ({"total": total, "cache": 1, "processed": computed} for computed in (1, total))
    assert progress[:3] == [first, second, None] and not any(progress[2:])
    assert [event["choices"] == [] for event in events] == [True, True, *[False] * (len(events) - 2)]
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1} and done == "[DONE]"
    # A response that is not streamed has no place for it.
    assert "prompt_progress" not in live.request(path, **{**body, "stream_options": None})
    assert not live.engine.requests[-1].reports_progress


def test_progress_of_several_prompts(live: Live) -> None:
    events = live.stream("/v1/completions", {"prompt": ["a", "bcd"], "max_tokens": 1, "return_progress": True})
    found = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    assert sorted({(each["index"], each["total"]) for each in found}) == [(0, 2), (1, 4)]


FAILURES: list[tuple[Exception, int, str | None]] = [
    (RequestError("no", "prompt", "refused"), 400, "refused"),
    (QueueFullError("the queue is full", retry_after=2.5), 429, "queue_full"),
    (EngineDeadError("the engine died"), 503, "engine_unavailable"),
    (DeviceMemoryError("no memory"), 503, "out_of_memory"),
    (SlowConsumerError("too slow"), 408, "slow_reader"),
    (DeadlineError("too late"), 504, "deadline_exceeded"),
    (KeyError("a defect"), 500, "internal"),
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda x: type(x).__name__)
def test_a_failure_before_the_first_token_has_its_own_status(
    live: Live, error: Exception, status: int, code: str, stream: bool
) -> None:
    live.engine.refuse = lambda request: error
    for path, body in (COMPLETION, CHAT):
        found = live.refuse(path, {**body, "stream": stream}, status)
        assert found["code"] == code
        assert "defect" not in found["message"]
        response = live.post(path, body)
        if status in (429, 503):
            assert int(response.headers["retry-after"]) == (3 if status == 429 else 1)


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda x: type(x).__name__)
def test_a_failure_within_a_stream_is_an_event(live: Live, error: Exception, status: int, code: str) -> None:
    live.engine.fail_after = (2, error)
    live.engine.delay = 0.01
    for path, body in (COMPLETION, CHAT):
        events = live.stream(path, body)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == code and set(events[-2]) == {"error"}
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
        assert len(events) >= 4


def test_a_failure_of_one_of_many_prompts_ends_the_stream(live: Live) -> None:
    live.engine.fail_after = (1, EngineDeadError("gone"))
    live.engine.delay = 0.01
    events = live.stream("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 5})
    assert events[-2]["error"]["code"] == "engine_unavailable" and events[-1] == "[DONE]"


def refused_after(live: Live, path: str, body: dict[str, Any], timeout: float) -> float:
    """Seconds until a request with this time limit is refused."""
    begin = time.monotonic()
    assert live.refuse(path, {**body, "timeout": timeout}, 504)["code"] == "deadline_exceeded"
    took = time.monotonic() - begin
    assert took >= timeout
    return took


def begun_and_cut(live: Live, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream whose deadline passes within it. If a busy machine lets it pass before, the time limit is
    raised.
    """
    for timeout in (0.2, 1.0, 3.0):
        answer = live.post(path, {**body, "timeout": timeout, "stream": True})
        if answer.status_code != 504:
            break
    assert answer.status_code == 200, answer.text
    description().check_stream(path, answer.text)
    return parse_events(answer.text)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ignored", [False, True], ids=["by the engine", "by the server"])
def test_deadlines(live: Live, ignored: bool) -> None:
    live.engine.delay = 0.05
    live.engine.ignore_deadline = ignored
    for path, body in (COMPLETION, CHAT):
        in_time(partial(refused_after, live, path, body, 0.2), 1.5)
        events = begun_and_cut(live, path, body)
        assert events[-2]["error"]["code"] == "deadline_exceeded" and events[-1] == "[DONE]"
    live.wait(lambda: len(live.engine.aborted) == len(live.engine.requests) > 0)


def test_a_deadline_before_the_first_token_of_a_stream(live: Live) -> None:
    live.engine.first_delay = 5
    assert live.refuse(*(CHAT[0], {**CHAT[1], "timeout": 0.1, "stream": True}), 504)["code"] == "deadline_exceeded"


def test_operator_deadline_is_the_default() -> None:
    with live_server(default_timeout=0.1, deadline_slack=0.0) as live:
        live.engine.delay = 0.05
        live.refuse(*COMPLETION, 504)
        live.complete(max_tokens=3, timeout=5)


@pytest.mark.slow
def test_keep_alives_during_silence() -> None:
    with live_server(stream_comment_seconds=0.1) as live:
        events = live.stream(CHAT[0], {**CHAT[1], "max_tokens": 2}, live.let_go(": keep-alive", 2))
        assert events[:2] == [": keep-alive"] * 2
        assert events[-1] == "[DONE]"
        rest = [event for event in events[:-1] if event != ": keep-alive"]
        assert rest[0]["choices"][0]["delta"]["role"] == "assistant"
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        # After a comment the status is sent, so a failure is an event.
        live.engine.fail_after = (0, QueueFullError("full"))
        events = live.stream(*CHAT, live.let_go(": keep-alive"))
        assert events[0] == ": keep-alive" and events[-2]["error"]["code"] == "queue_full" and events[-1] == "[DONE]"
        # Frequent tokens need no comments. A busy machine may delay some of them.
        live.engine.reset()
        live.engine.delay = 0.03
        body = {"prompt": "a", "max_tokens": 10}
        assert any(": keep-alive" not in live.stream(COMPLETION[0], body) for _ in range(10))


def open_stream(live: Live, path: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection with a sent request, whose response is not read."""
    import json

    url = httpx.URL(live.url)
    connection = socket.create_connection((url.host, url.port), timeout=30)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 20])
def test_disconnect_aborts_the_request(live: Live, stream: bool, prompts: int) -> None:
    def leave() -> float:
        live.engine.reset()
        live.engine.delay = 0.02
        body = {"prompt": ["a"] * prompts, "max_tokens": 200, "stream": stream}
        connection = open_stream(live, "/v1/completions", body)
        live.wait(lambda: live.engine.running == min(prompts, 8))
        if stream:
            assert b"200 OK" in connection.recv(65536)
        left = time.monotonic()
        connection.close()
        live.wait(lambda: live.engine.running == 0)
        assert len(live.engine.aborted) == min(prompts, 8) == len(live.engine.requests)
        return max(live.engine.aborted_at) - left

    in_time(leave, 0.5)


def test_disconnect_before_the_first_token(live: Live) -> None:
    live.engine.first_delay = 300
    for stream in (False, True):
        connection = open_stream(live, "/v1/completions", {"prompt": "a", "stream": stream})
        live.wait(lambda: live.engine.running == 1)
        connection.close()
        live.wait(lambda: live.engine.running == 0)


def test_slow_consumer_is_throttled_and_ended(live: Live) -> None:
    info = live.engine.info
    assert info is not None
    from dataclasses import replace

    live.engine.info = replace(info, max_model_len=100_000_000)
    connection = open_stream(live, "/v1/completions", {"prompt": "a", "max_tokens": 50_000_000, "stream": True})
    live.wait(lambda: live.engine.made > 0)

    def stands_still() -> bool:
        before = live.engine.made
        for _ in range(10):  # the server has time to accept another one
            assert live.http.get("/health").status_code == 200
        return live.engine.made == before

    live.wait(stands_still, 20.0)
    assert live.engine.running == 1 and not live.engine.aborted
    connection.close()
    live.wait(lambda: live.engine.running == 0)


def test_abort_all_ends_streams_with_an_event_and_others_with_503(live: Live) -> None:
    live.engine.delay = 0.02
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(live.refuse, *COMPLETION, 503)
        begun = [threading.Event() for _ in range(2)]
        streams = [
            pool.submit(live.stream, *request, lambda text, event=event: event.set())
            for request, event in zip((COMPLETION, CHAT), begun, strict=True)
        ]
        assert all(event.wait(30) for event in begun)
        live.wait(lambda: live.engine.running == 3)
        assert live.state.in_flight == 3
        live.on_loop(live.state.abort_all)
        assert whole.result()["code"] == "draining"
        for stream in streams:
            events = stream.result()
            assert events[-2]["error"]["code"] == "draining" and events[-1] == "[DONE]"
            assert len(events) > 2
    live.wait(lambda: live.state.in_flight == 0)
    assert len(live.engine.aborted) == 3


def test_draining_refuses_new_requests_and_finishes_running_ones(live: Live) -> None:
    live.engine.delay = 0.03
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(live.stream, "/v1/completions", {"prompt": "a", "max_tokens": 15})
        live.wait(lambda: live.engine.running == 1)
        live.state.draining = True
        try:
            for path, body in (COMPLETION, CHAT):
                response = live.post(path, body)
                assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "draining"
            assert live.http.get("/ready").status_code == 503
            assert live.http.get("/health").status_code == 200
            events = running.result()
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        finally:
            live.state.draining = False


def test_engine_states(live: Live) -> None:
    engine = live.engine
    info = engine.info
    for state in ("starting", "restarting", "failed"):
        engine.state, engine.info = state, None if state == "starting" else info
        for path, body in (COMPLETION, CHAT):
            response = live.post(path, body)
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert state in response.json()["error"]["message"]
        for path in ("/health", "/ready"):
            response = live.http.get(path)
            assert response.status_code == 503 and response.json() == {"status": state}
        assert live.http.get("/v1/models").json()["data"][0]["id"] == "toy"
        assert live.post("/tokenize", {"prompt": "a"}).status_code == 200
        assert live.http.get("/metrics").status_code == 200
    engine.state, engine.info = "ready", info
    assert live.http.get("/health").json() == {"status": "ready"}
    live.complete(max_tokens=1)


def test_an_engine_that_ends_a_stream_too_early_is_an_error(live: Live) -> None:
    async def generate(request: Any) -> Any:
        return
        yield

    live.engine.generate = generate  # type: ignore[method-assign]
    try:
        assert live.refuse(*COMPLETION, 503)["code"] == "engine_unavailable"
    finally:
        del live.engine.generate


def test_concurrent_streams_do_not_mix(live: Live) -> None:
    live.engine.delay = 0.001

    def one(number: int) -> bool:
        with httpx.Client(base_url=live.url, timeout=30) as http:
            body = {"prompt": "a", "max_tokens": number + 1, "stream": True, "request_id": f"r{number}"}
            events = parse_events(http.post("/v1/completions", json=body).text)
        assert {event["id"] for event in events[:-1]} == {f"cmpl-r{number}"}
        return "".join(e["choices"][0]["text"] for e in events[:-1]) == ("bcd" * 20)[: number + 1]

    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(one, range(30)))
    assert threading.active_count() < 60
