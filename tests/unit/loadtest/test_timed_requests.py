"""Measured times against those recorded by a scripted server on the same clock."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import struct
import time

import numpy as np
import pytest
from helpers.scripted_http import Generation, ScriptedLLM, answer, full_stream, scripted_llm, stream

from windlass.clients.loadtest import runner
from windlass.clients.loadtest.load_plan import Lengths, LoadPlan, WorkloadSpec
from windlass.clients.loadtest.results import RunResult
from windlass.clients.loadtest.runner import measure
from windlass.clients.loadtest.target import Target
from windlass.clients.loadtest.timed_requests import Pool


@pytest.fixture(autouse=True)
def fine_ticks(monkeypatch):
    """Both sides measure their lag every millisecond, to know the delays of a busy machine."""
    monkeypatch.setattr(runner, "TICK_SECONDS", 0.001)


def run(llm: ScriptedLLM, count: int, **options) -> RunResult:
    spec = options.pop("workload", WorkloadSpec(input_len=Lengths.fixed(5), output_len=Lengths.fixed(4)))
    plan = LoadPlan(target=Target(url=llm.url), workload=spec, count=count, **options)
    return measure(plan)


def tolerance(llm: ScriptedLLM, result: RunResult) -> float:
    """5 ms plus the lag of both sides, in ms."""
    return 5.0 + result.generator["loop_lag_ms"]["max"] + llm.lag * 1000


PLAYS = {
    "even": stream(0.02, 0.02, 0.02, 0.02),
    "slow start": stream(0.0, 0.01, 0.01, 0.01, start=0.15),
    "slow first token": stream(0.12, 0.01, 0.01, 0.01),
    "stall": stream(0.01, 0.01, 0.14, 0.01),
    "stall at the end": stream(0.01, 0.01, 0.01, 0.13),
}


@pytest.mark.slow
def test_figures_equal_the_times_recorded_by_the_server():
    with scripted_llm(*PLAYS.values()) as llm:
        result = run(llm, len(PLAYS))
    allowed = tolerance(llm, result)
    start = result.generator["monotonic_start"]
    assert len(result.completed) == len(PLAYS)
    truths: dict[str, list[float]] = {"ttft_actual_ms": [], "tpot_ms": [], "itl_ms": [], "e2el_ms": []}
    for record, truth in zip(result.records, llm.generations, strict=True):
        # Nothing arrives before it was sent, nor later than the lag of both sides.
        for arrived, sent in zip(record.chunks, truth.sent, strict=True):
            assert 0 <= (start + arrived - sent) * 1000 <= allowed
        assert 0 <= (truth.arrived - (start + record.sent)) * 1000 <= allowed
        assert 0 <= (start + record.ended - truth.ended) * 1000 <= allowed
        gaps = np.diff(truth.sent) * 1000
        assert np.allclose(record.gaps_ms, gaps, rtol=0, atol=allowed)
        truths["ttft_actual_ms"].append((truth.sent[0] - truth.arrived) * 1000)
        truths["tpot_ms"].append((truth.sent[-1] - truth.sent[0]) * 1000 / 3)
        truths["itl_ms"].extend(gaps)
        truths["e2el_ms"].append((truth.ended - truth.arrived) * 1000)
    summary = result.summary()
    for name, values in truths.items():
        expected = {"mean": np.mean(values)} | {f"p{p}": np.percentile(values, p) for p in (50, 90, 95, 99)}
        for figure, value in expected.items():
            assert summary[name][figure] == pytest.approx(value, abs=allowed), (name, figure)
    # In a closed loop a request is intended when its client is free, so that both times to first token are equal.
    assert summary["ttft_ms"]["p99"] == pytest.approx(summary["ttft_actual_ms"]["p99"], abs=allowed)
    span = llm.generations[-1].ended - llm.generations[0].arrived
    assert result.duration_s * 1000 == pytest.approx(span * 1000, abs=allowed)
    assert summary["output_tokens"] == 20
    assert summary["output_tokens_per_second"] == pytest.approx(20 / result.duration_s)
    assert summary["request_rate"] == pytest.approx(5 / result.duration_s)


def test_late_requests_count_from_the_intended_send():
    """One slot and three arrivals at once: each waits for the previous one, which the server cannot observe."""
    from windlass.clients.loadtest.load_plan import Replay

    with scripted_llm(stream(0.05, 0.01)) as llm:
        result = run(llm, 3, schedule=Replay([0.0, 0.0, 0.0]), concurrency=1)
    allowed = tolerance(llm, result)
    first = llm.generations[0].arrived
    for record, truth in zip(sorted(result.records, key=lambda record: record.sent), llm.generations, strict=True):
        assert record.intended == 0
        assert record.ttft_actual_ms == pytest.approx((truth.sent[0] - truth.arrived) * 1000, abs=allowed)
        assert record.ttft_ms == pytest.approx((truth.sent[0] - first) * 1000, abs=allowed)
        assert record.lag_ms == pytest.approx((truth.arrived - first) * 1000, abs=allowed)
    # The generator did not cause these delays.
    assert result.generator["send_lag_ms"]["max"] <= allowed


def test_chunks_do_not_depend_on_the_writes_of_the_server():
    async def together(generation: Generation) -> None:
        await generation.head()
        events = [b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'] * 3
        await generation.chunk(b"".join(events))
        await asyncio.sleep(0.05)
        await generation.token("b", "length")
        await generation.done()

    async def in_batches(generation: Generation) -> None:
        await generation.head()
        event = 'data: {"choices":[{"index":0,"text":"é","finish_reason":"length"}]}\r\n\r\n'.encode()
        for place in range(0, len(event), 7):
            generation.sent = [time.monotonic()]
            await generation.chunk(event[place : place + 7])
            await asyncio.sleep(0.003)
        await generation.done()

    with scripted_llm(together, in_batches) as llm:
        result = run(llm, 2, keep_text=True)
    one, two = result.records
    assert len(one.chunks) == 4 and one.gaps_ms[:2] == [0, 0]
    assert one.gaps_ms[2] >= 50 - tolerance(llm, result)
    assert one.output_tokens == 4 and one.text == "aaab"  # chunks are counted without usage
    arrived = result.generator["monotonic_start"] + two.chunks[0]
    assert len(two.chunks) == 1 and two.text == "é"
    assert 0 <= (arrived - llm.generations[1].sent[0]) * 1000 <= tolerance(llm, result)


def test_events_without_tokens_are_not_chunks():
    async def play(generation: Generation) -> None:
        await generation.head()
        await generation.chunk(b": keep-alive\n\n")
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await generation.data({"choices": [role]})
        await asyncio.sleep(0.06)
        await generation.token("yes")
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await generation.data({**last, "rotary": {"rope_type": "default", "context": {"reused_tokens": 3}}})
        await generation.usage(9, 2, prompt_tokens_details={"cached_tokens": 4})
        await generation.done()

    async def reasoning(generation: Generation) -> None:
        await generation.head()
        generation.sent.append(time.monotonic())
        await generation.data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
        for wrong in (-3, math.inf, "many", True):
            await generation.data({"choices": [], "rotary": {"context": {"reused_tokens": wrong}}})
        await asyncio.sleep(0.02)
        await generation.token("yes", "stop")
        await generation.done()

    spec = WorkloadSpec(chat=True, output_len=Lengths.fixed(2))
    with scripted_llm(play, reasoning) as llm:
        result = run(llm, 2, workload=spec)
    one, two = result.records
    assert one.outcome == two.outcome == "completed"
    assert len(one.chunks) == 1 and len(two.chunks) == 2
    truth = llm.generations[0]
    assert one.ttft_actual_ms == pytest.approx((truth.sent[0] - truth.arrived) * 1000, abs=tolerance(llm, result))
    assert (one.input_tokens, one.output_tokens, one.cached_tokens, one.reused_tokens) == (9, 2, 4, 3)
    assert (one.finish_reason, one.request_id, one.asked_tokens) == ("stop", "req-7", 2)
    assert two.output_tokens == 2 and two.input_tokens == 128  # as planned, without usage
    assert two.cached_tokens is None and two.reused_tokens == 0  # invalid counts are ignored


def test_response_without_visible_tokens_arrives_at_its_end():
    async def play(generation: Generation) -> None:
        await generation.head()
        await asyncio.sleep(0.03)
        await generation.token("", "length")
        await generation.usage(5, 3, prompt_tokens_details={"cached_tokens": -1})
        await generation.done()

    with scripted_llm(play) as llm:
        result = run(llm, 1)
    (record,) = result.completed
    assert len(record.chunks) == 1 and record.output_tokens == 3
    assert record.cached_tokens is None  # negative counts are ignored
    assert record.ttft_ms >= 25


async def no_done(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.token("b", "length")
    await generation.send(b"0\r\n\r\n")


async def no_finish_reason(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.done()


async def ends_early(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.send(b"0\r\n\r\n")


async def closed_in_the_middle(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.send(b'40\r\ndata: {"choi')
    generation.writer.close()


async def reset_in_the_middle(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await asyncio.sleep(0.02)
    raw = generation.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    generation.writer.transport.abort()


async def closed_without_a_length(generation: Generation) -> None:
    """HTTP/1.0 style: the body ends with the connection, so that only [DONE] marks a complete response."""
    await generation.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await generation.send(b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n')
    generation.writer.close()


async def error_event(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.data({"error": {"message": "the engine died", "type": "server_error"}})
    await generation.done()


async def error_by_name(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.chunk(b'event: error\ndata: {"message": "the engine died"}\n\n')
    await generation.token("b", "stop")
    await generation.done()


async def error_after_the_end(generation: Generation) -> None:
    await generation.head()
    await generation.token("a", "stop")
    await generation.data({"error": "the engine died"})
    await generation.done()


async def not_json(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.data('{"choices": [')
    await generation.done()


async def not_a_chunk(generation: Generation) -> None:
    await generation.head()
    await generation.data('{"choices": 3}')
    await generation.done()


async def text_of_a_wrong_type(generation: Generation) -> None:
    await generation.head()
    await generation.token([1], "stop")
    await generation.done()


async def not_a_stream(generation: Generation) -> None:
    await answer({"choices": [{"text": "all at once", "finish_reason": "stop"}]})(generation)


async def a_page(generation: Generation) -> None:
    await answer(b"<html>log in first</html>", content_type="text/html")(generation)


async def not_http(generation: Generation) -> None:
    await generation.send(b"what?\r\n\r\n")


async def bad_chunk_size(generation: Generation) -> None:
    await generation.head()
    await generation.send(b"zz\r\nhello\r\n")


async def aborted(generation: Generation) -> None:
    await generation.head()
    await generation.token("a", "abort")
    await generation.done()


async def hangs_up(generation: Generation) -> None:
    generation.writer.close()


async def silent(generation: Generation) -> None:
    await generation.wait_disconnect()


async def stuck(generation: Generation) -> None:
    await generation.head()
    await generation.token()
    await generation.wait_disconnect()


async def full(generation: Generation) -> None:
    await answer({"error": {"message": "the queue is full"}}, "429 Too Many Requests")(generation)


async def broken_gateway(generation: Generation) -> None:
    await answer(b"<html>bad gateway</html>", "502 Bad Gateway", content_type="text/html")(generation)


BROKEN = {
    no_done: ("truncated", "without [DONE]"),
    no_finish_reason: ("truncated", "without a finish reason"),
    ends_early: ("truncated", "a finish reason and [DONE]"),
    closed_in_the_middle: ("truncated", "after 1 chunks"),
    reset_in_the_middle: ("truncated", "after 1 chunks"),
    closed_without_a_length: ("truncated", "without [DONE]"),
    error_event: ("error_event", "the engine died"),
    error_by_name: ("error_event", "the engine died"),
    error_after_the_end: ("error_event", "the engine died"),
    not_json: ("malformed", "not JSON"),
    not_a_chunk: ("malformed", "not a chunk"),
    text_of_a_wrong_type: ("malformed", "not a chunk"),
    not_a_stream: ("malformed", "not an event stream"),
    a_page: ("malformed", "log in first"),
    not_http: ("malformed", "not valid HTTP"),
    bad_chunk_size: ("malformed", "not valid HTTP"),
    aborted: ("aborted", "'abort'"),
    hangs_up: ("connection", ""),
    silent: ("timeout", "within 1 s"),
    stuck: ("timeout", "within 1 s"),
    full: ("http_429", "the queue is full"),
    broken_gateway: ("http_502", "bad gateway"),
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("play", BROKEN, ids=lambda play: play.__name__)
def test_broken_streams_are_failures_by_kind(play):
    kind, message = BROKEN[play]
    limit = 1.0 if kind == "timeout" else 30.0
    with scripted_llm(full_stream, play, full_stream) as llm:
        result = run(llm, 3, timeout_s=limit)
    assert [record.outcome for record in result.records] == ["completed", kind, "completed"]
    broken = result.records[1]
    assert message in (broken.message or "") and "\n" not in broken.message
    assert broken.ended is not None and not result.meets_slo(broken)
    summary = result.summary()
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, {kind: 1})
    assert summary["output_tokens"] == 8  # without those of the broken stream


def test_timeout_ends_the_request_on_time():
    with scripted_llm(silent) as llm:
        result = run(llm, 1, timeout_s=0.2)
    (record,) = result.records
    assert 200 <= record.e2el_ms <= 200 + tolerance(llm, result)
    assert llm.generations[0].disconnected


def test_response_ends_with_done_on_an_open_connection():
    async def play(generation: Generation) -> None:
        await generation.head()
        await generation.token("a", "stop")
        generation.ended = time.monotonic()
        await generation.data("[DONE]")
        await generation.wait_disconnect()

    with scripted_llm(play) as llm:
        result = run(llm, 2)
    assert len(result.completed) == 2
    assert llm.connections == 3  # one for control; none is reused before its body has ended
    ended = result.generator["monotonic_start"] + result.records[0].ended
    assert 0 <= (ended - llm.generations[0].ended) * 1000 <= tolerance(llm, result)


def test_absent_server_is_a_connection_failure(monkeypatch):
    with scripted_llm(full_stream) as llm:
        url = llm.url
        from windlass.clients.loadtest.runner import prepare, run_load
        from windlass.clients.loadtest.target import ControlClient

        plan = LoadPlan(target=Target(url=url), workload=WorkloadSpec(), count=3)

        async def found():
            async with ControlClient(plan.target) as control:
                return await prepare(plan, control)

        workload = asyncio.run(found())
    result = asyncio.run(run_load(plan, workload=workload))
    assert result.errors == {"connection": 3} and not result.completed
    assert "cannot connect" in result.records[0].message

    async def times_out(self):  # a timeout of the system, long before that of the request
        raise TimeoutError(errno.ETIMEDOUT, "Connect call failed")

    monkeypatch.setattr(Pool, "acquire", times_out)
    late = asyncio.run(run_load(plan, workload=workload))
    assert late.errors == {"connection": 3} and "Connect call failed" in late.records[0].message
    assert result.summary()["ttft_ms"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
