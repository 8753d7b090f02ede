"""The measurer is measured: its figures beside what a scripted server noted it did, on the same clock."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import struct
import time

import numpy as np
import pytest
from helpers.scripted_http import answer
from helpers.scripted_llm import Performance, ScriptedLLM, asked, scripted_llm, stream

from windlass.clients.loadtest import runner
from windlass.clients.loadtest.load_plan import Lengths, LoadPlan, WorkloadSpec
from windlass.clients.loadtest.results import RunResult
from windlass.clients.loadtest.runner import measure
from windlass.clients.loadtest.target import Target
from windlass.clients.loadtest.timed_requests import Pool


@pytest.fixture(autouse=True)
def fine_ticks(monkeypatch):
    """Both sides watch their own lateness every millisecond: what a busy machine adds is then known."""
    monkeypatch.setattr(runner, "TICK_SECONDS", 0.001)


def run(llm: ScriptedLLM, count: int, **options) -> RunResult:
    spec = options.pop("workload", WorkloadSpec(input_len=Lengths.fixed(5), output_len=Lengths.fixed(4)))
    plan = LoadPlan(target=Target(url=llm.url), workload=spec, count=count, **options)
    return measure(plan)


def tolerance(llm: ScriptedLLM, result: RunResult) -> float:
    """5 ms, and the lateness of either side, in ms."""
    return 5.0 + result.generator["loop_lag_ms"]["max"] + llm.lag * 1000


PLAYS = {
    "even": stream(0.02, 0.02, 0.02, 0.02),
    "slow start": stream(0.0, 0.01, 0.01, 0.01, start=0.15),
    "slow first token": stream(0.12, 0.01, 0.01, 0.01),
    "stall": stream(0.01, 0.01, 0.14, 0.01),
    "stall at the end": stream(0.01, 0.01, 0.01, 0.13),
}


def test_every_figure_is_what_the_server_did():
    with scripted_llm(*PLAYS.values()) as llm:
        result = run(llm, len(PLAYS))
    allowed = tolerance(llm, result)
    start = result.generator["monotonic_start"]
    assert len(result.completed) == len(PLAYS)
    truths: dict[str, list[float]] = {"ttft_actual_ms": [], "tpot_ms": [], "itl_ms": [], "e2el_ms": []}
    for record, truth in zip(result.records, llm.performances, strict=True):
        # Nothing arrives before it was sent, and not later than either side is slow.
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
    # In a closed loop a request is meant to go when its client is free: both times to the first token are one.
    assert summary["ttft_ms"]["p99"] == pytest.approx(summary["ttft_actual_ms"]["p99"], abs=allowed)
    span = llm.performances[-1].ended - llm.performances[0].arrived
    assert result.duration_s * 1000 == pytest.approx(span * 1000, abs=allowed)
    assert summary["output_tokens"] == 20
    assert summary["output_tokens_per_second"] == pytest.approx(20 / result.duration_s)
    assert summary["request_rate"] == pytest.approx(5 / result.duration_s)


def test_late_requests_count_from_when_they_were_meant():
    """One slot, three arrivals at once: each waits for the one before, which the server never sees."""
    from windlass.clients.loadtest.load_plan import Replay

    with scripted_llm(stream(0.05, 0.01)) as llm:
        result = run(llm, 3, schedule=Replay([0.0, 0.0, 0.0]), concurrency=1)
    allowed = tolerance(llm, result)
    first = llm.performances[0].arrived
    for record, truth in zip(sorted(result.records, key=lambda record: record.sent), llm.performances, strict=True):
        assert record.intended == 0
        assert record.ttft_actual_ms == pytest.approx((truth.sent[0] - truth.arrived) * 1000, abs=allowed)
        assert record.ttft_ms == pytest.approx((truth.sent[0] - first) * 1000, abs=allowed)
        assert record.lag_ms == pytest.approx((truth.arrived - first) * 1000, abs=allowed)
    # That is the load's doing: the generator was not late itself.
    assert result.generator["send_lag_ms"]["max"] <= allowed


def test_several_tokens_in_one_write_arrive_together_and_one_token_in_many_writes_arrives_once():
    async def together(performance: Performance) -> None:
        await performance.head()
        events = [b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'] * 3
        await performance.exchange.chunk(b"".join(events))
        await asyncio.sleep(0.05)
        await performance.token("b", "length")
        await performance.done()

    async def in_batches(performance: Performance) -> None:
        await performance.head()
        event = 'data: {"choices":[{"index":0,"text":"é","finish_reason":"length"}]}\r\n\r\n'.encode()
        for place in range(0, len(event), 7):
            performance.sent = [time.monotonic()]
            await performance.exchange.chunk(event[place : place + 7])
            await asyncio.sleep(0.003)
        await performance.done()

    with scripted_llm(together, in_batches) as llm:
        result = run(llm, 2, keep_text=True)
    one, two = result.records
    assert len(one.chunks) == 4 and one.gaps_ms[:2] == [0, 0]
    assert one.gaps_ms[2] >= 50 - tolerance(llm, result)
    assert one.output_tokens == 4 and one.text == "aaab"  # no usage: chunks are counted
    arrived = result.generator["monotonic_start"] + two.chunks[0]
    assert len(two.chunks) == 1 and two.text == "é"
    assert 0 <= (arrived - llm.performances[1].sent[0]) * 1000 <= tolerance(llm, result)


def test_what_carries_no_token_is_no_chunk():
    async def play(performance: Performance) -> None:
        await performance.head()
        await performance.exchange.chunk(b": keep-alive\n\n")
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await performance.data({"choices": [role]})
        await asyncio.sleep(0.06)
        await performance.token("yes")
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await performance.data({**last, "rotary": {"rope_type": "default", "context": {"reused_tokens": 3}}})
        await performance.usage(9, 2, prompt_tokens_details={"cached_tokens": 4})
        await performance.done()

    async def reasoning(performance: Performance) -> None:
        await performance.head()
        performance.sent.append(time.monotonic())
        await performance.data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
        for wrong in (-3, math.inf, "many", True):
            await performance.data({"choices": [], "rotary": {"context": {"reused_tokens": wrong}}})
        await asyncio.sleep(0.02)
        await performance.token("yes", "stop")
        await performance.done()

    spec = WorkloadSpec(chat=True, output_len=Lengths.fixed(2))
    with scripted_llm(play, reasoning) as llm:
        result = run(llm, 2, workload=spec)
    one, two = result.records
    assert one.outcome == two.outcome == "completed"
    assert len(one.chunks) == 1 and len(two.chunks) == 2
    truth = llm.performances[0]
    assert one.ttft_actual_ms == pytest.approx((truth.sent[0] - truth.arrived) * 1000, abs=tolerance(llm, result))
    assert (one.input_tokens, one.output_tokens, one.cached_tokens, one.reused_tokens) == (9, 2, 4, 3)
    assert (one.finish_reason, one.request_id, one.asked_tokens) == ("stop", "req-7", 2)
    assert two.output_tokens == 2 and two.input_tokens == 128  # as planned: no usage came
    assert two.cached_tokens is None and two.reused_tokens == 0  # nor anything of a cache that is a number of tokens


def test_an_answer_of_which_nothing_can_be_seen_came_with_its_end():
    async def play(performance: Performance) -> None:
        await performance.head()
        await asyncio.sleep(0.03)
        await performance.token("", "length")
        await performance.usage(5, 3, prompt_tokens_details={"cached_tokens": -1})
        await performance.done()

    with scripted_llm(play) as llm:
        result = run(llm, 1)
    (record,) = result.completed
    assert len(record.chunks) == 1 and record.output_tokens == 3
    assert record.cached_tokens is None  # no count is less than none, and no file may hold one
    assert record.ttft_ms >= 25


# ---- broken streams --------------------------------------------------------------------------------------------------
async def no_done(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.token("b", "length")
    await performance.exchange.send(b"0\r\n\r\n")


async def no_finish_reason(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.done()


async def ends_early(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.exchange.send(b"0\r\n\r\n")


async def closed_in_the_middle(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.exchange.send(b'40\r\ndata: {"choi')
    performance.exchange.writer.close()


async def reset_in_the_middle(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await asyncio.sleep(0.02)
    raw = performance.exchange.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    performance.exchange.writer.transport.abort()


async def closed_without_a_length(performance: Performance) -> None:
    """HTTP/1.0 style: the body ends with the connection, so only the missing [DONE] tells."""
    await performance.exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await performance.exchange.send(b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n')
    performance.exchange.writer.close()


async def error_event(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.data({"error": {"message": "the engine died", "type": "server_error"}})
    await performance.done()


async def error_by_name(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.exchange.chunk(b'event: error\ndata: {"message": "the engine died"}\n\n')
    await performance.token("b", "stop")
    await performance.done()


async def error_after_the_end(performance: Performance) -> None:
    await performance.head()
    await performance.token("a", "stop")
    await performance.data({"error": "the engine died"})
    await performance.done()


async def not_json(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.data('{"choices": [')
    await performance.done()


async def not_a_chunk(performance: Performance) -> None:
    await performance.head()
    await performance.data('{"choices": 3}')
    await performance.done()


async def text_of_a_wrong_type(performance: Performance) -> None:
    await performance.head()
    await performance.token([1], "stop")
    await performance.done()


async def not_a_stream(performance: Performance) -> None:
    await answer({"choices": [{"text": "all at once", "finish_reason": "stop"}]})(performance.exchange)


async def a_page(performance: Performance) -> None:
    await answer(b"<html>log in first</html>", content_type="text/html")(performance.exchange)


async def not_http(performance: Performance) -> None:
    await performance.exchange.send(b"what?\r\n\r\n")


async def bad_chunk_size(performance: Performance) -> None:
    await performance.head()
    await performance.exchange.send(b"zz\r\nhello\r\n")


async def aborted(performance: Performance) -> None:
    await performance.head()
    await performance.token("a", "abort")
    await performance.done()


async def hangs_up(performance: Performance) -> None:
    performance.exchange.writer.close()


async def silent(performance: Performance) -> None:
    await performance.wait_gone()


async def stuck(performance: Performance) -> None:
    await performance.head()
    await performance.token()
    await performance.wait_gone()


async def full(performance: Performance) -> None:
    await answer({"error": {"message": "the queue is full"}}, "429 Too Many Requests")(performance.exchange)


async def broken_gateway(performance: Performance) -> None:
    await answer(b"<html>bad gateway</html>", "502 Bad Gateway", content_type="text/html")(performance.exchange)


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
    not_json: ("malformed", "no JSON"),
    not_a_chunk: ("malformed", "no chunk"),
    text_of_a_wrong_type: ("malformed", "no chunk"),
    not_a_stream: ("malformed", "no event stream"),
    a_page: ("malformed", "log in first"),
    not_http: ("malformed", "no proper HTTP"),
    bad_chunk_size: ("malformed", "no proper HTTP"),
    aborted: ("aborted", "'abort'"),
    hangs_up: ("connection", ""),
    silent: ("timeout", "within 1 s"),
    stuck: ("timeout", "within 1 s"),
    full: ("http_429", "the queue is full"),
    broken_gateway: ("http_502", "bad gateway"),
}


@pytest.mark.parametrize("play", BROKEN, ids=lambda play: play.__name__)
def test_a_broken_stream_is_counted_as_broken(play):
    kind, message = BROKEN[play]
    limit = 1.0 if kind == "timeout" else 30.0
    with scripted_llm(asked(), play, asked()) as llm:
        result = run(llm, 3, timeout_s=limit)
    assert [record.outcome for record in result.records] == ["completed", kind, "completed"]
    broken = result.records[1]
    assert message in (broken.message or "") and "\n" not in broken.message
    assert broken.ended is not None and not result.meets_slo(broken)
    summary = result.summary()
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, {kind: 1})
    assert summary["output_tokens"] == 8  # what came of the broken one is no throughput


def test_a_timeout_is_on_time():
    with scripted_llm(silent) as llm:
        result = run(llm, 1, timeout_s=0.2)
    (record,) = result.records
    assert 200 <= record.e2el_ms <= 200 + tolerance(llm, result)
    assert llm.performances[0].client_gone


def test_a_server_that_ends_with_done_and_keeps_the_connection_has_ended():
    async def play(performance: Performance) -> None:
        await performance.head()
        await performance.token("a", "stop")
        performance.ended = time.monotonic()
        await performance.data("[DONE]")
        await performance.wait_gone()

    with scripted_llm(play) as llm:
        result = run(llm, 2)
    assert len(result.completed) == 2
    assert llm.server.connections == 3  # one for control; none is used again before its body has ended
    ended = result.generator["monotonic_start"] + result.records[0].ended
    assert 0 <= (ended - llm.performances[0].ended) * 1000 <= tolerance(llm, result)


def test_a_server_that_is_gone_is_a_failure_by_kind(monkeypatch):
    with scripted_llm(asked()) as llm:
        url = llm.url
        from windlass.clients.loadtest.runner import prepare, run_load
        from windlass.clients.loadtest.target import ControlClient

        plan = LoadPlan(target=Target(url=url), workload=WorkloadSpec(), count=3)

        async def found():
            async with ControlClient(plan.target) as control:
                return await prepare(plan, control)

        server, workload = asyncio.run(found())
    result = asyncio.run(run_load(plan, server=server, workload=workload))
    assert result.errors == {"connection": 3} and not result.completed
    assert "cannot connect" in result.records[0].message

    async def unanswered(self):  # the system gave up the connection long before the request's own time was over
        raise TimeoutError(errno.ETIMEDOUT, "Connect call failed")

    monkeypatch.setattr(Pool, "acquire", unanswered)
    late = asyncio.run(run_load(plan, server=server, workload=workload))
    assert late.errors == {"connection": 3} and "Connect call failed" in late.records[0].message
    assert result.summary()["ttft_ms"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
