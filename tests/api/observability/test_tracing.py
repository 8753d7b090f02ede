"""Spans of requests, decoded by a real OTLP receiver and by the library's in-memory exporter."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from helpers.eventually import eventually
from helpers.live_server import live_server
from helpers.real_server import serve
from helpers.scripted_engine import ScriptedEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from windlass.engine.errors import EngineDeadError
from windlass.server.cli import main as cli
from windlass.server.config.api_keys import ApiKey
from windlass.server.observability.tracing import Tracing

CANARY, KEY = "xylophone-canary", "key-4711-canary"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["prepare", "queue", "prefill", "decode"]


class Receiver:
    """Received spans as dictionaries, and all received bytes."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[dict[str, Any]] = []
        self.services: set[str] = set()
        self.raw = b""

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += map(_as_dict, scope.spans)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


def _as_dict(span: Any) -> dict[str, Any]:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano / 1e9,
        "end": span.end_time_unix_nano / 1e9,
        "kind": span.kind,
        "error": span.status.code == 2,
        **attributes,
    }


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            receiver.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_stream_has_spans_under_the_client_s_span() -> None:
    engine = ScriptedEngine(first_delay=0.2, delay=0.05, reply=[65, 66])
    alice = ApiKey(digest=ApiKey.plain(KEY).digest, name="alice")
    with receiving() as receiver, live_server(engine, otel_endpoint=receiver.url, callers=(alice,)) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine", "x-api-key": KEY}
        body = {"prompt": CANARY, "max_tokens": 6, "stream": True}
        answer = live.http.post("/v1/completions?key=secret", json=body, headers=headers)
        assert answer.status_code == 200
        live.http.get("/health")
        assert live.http.post("/v1/completions", json=body).status_code == 401
        live.state.tracing.flush()
    (span,) = [each for each in receiver.named("POST /v1/completions") if each["parent"]]
    assert span["trace"] == TRACE and span["parent"] == PARENT and span["kind"] == 2
    assert span["windlass.request_id"] == "mine" and span["windlass.caller"] == "alice"
    assert span["http.response.status_code"] == 200 and span["windlass.outcome"] == "ok" and not span["error"]
    assert span["gen_ai.usage.output_tokens"] == 6 and span["windlass.scaling"] == "default"
    phases = [each for each in receiver.spans if each["parent"] == span["id"]]
    assert [each["name"] for each in sorted(phases, key=lambda each: each["start"])] == PHASES
    assert all(each["trace"] == TRACE and span["start"] - 0.01 <= each["start"] <= each["end"] for each in phases)
    by_name = {each["name"]: each for each in phases}
    assert by_name["prefill"]["end"] - by_name["prefill"]["start"] >= 0.19
    assert by_name["decode"]["end"] - by_name["decode"]["start"] >= 5 * 0.05 - 0.01
    assert by_name["prefill"]["end"] == pytest.approx(by_name["decode"]["start"], abs=1e-3)
    assert by_name["decode"]["gen_ai.usage.output_tokens"] == 6
    # Without a client span it begins its own trace; health checks have no span.
    (refused,) = [each for each in receiver.named("POST /v1/completions") if not each["parent"]]
    assert refused["http.response.status_code"] == 401 and refused["trace"] != TRACE
    assert not receiver.named("GET /health") and receiver.services == {"windlass"}
    for secret in (CANARY, KEY, "secret"):
        assert secret.encode() not in receiver.raw


@pytest.mark.slow
def test_failures_and_several_prompts() -> None:
    dead = ScriptedEngine(fail_after=(2, EngineDeadError("gone")))
    with receiving() as receiver, live_server(dead, otel_endpoint=receiver.url + "/v1/traces") as live:
        live.post("/v1/completions", {"prompt": "a", "max_tokens": 9})
        live.state.tracing.flush()
    (span,) = receiver.named("POST /v1/completions")
    assert (
        span["error"] and span["http.response.status_code"] == 503 and span["windlass.outcome"] == "engine_unavailable"
    )
    with receiving() as receiver, live_server(ScriptedEngine(), otel_endpoint=receiver.url) as live:
        live.complete(["a", "bc"], max_tokens=3, n=2)
        live.state.tracing.flush()
    assert [len(receiver.named(name)) for name in PHASES] == [1, 2, 2, 2]
    assert [each["gen_ai.usage.output_tokens"] for each in receiver.named("decode")] == [6, 6]
    assert {each["windlass.prompt"] for each in receiver.named("prefill")} == {0, 1}


@pytest.mark.slow
def test_requests_succeed_without_the_collector() -> None:
    with live_server(ScriptedEngine(), otel_endpoint="http://127.0.0.1:9") as live:
        assert live.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_the_engine_reports_its_start_time() -> None:
    with receiving() as receiver, serve("--kv-cache-memory", "64MiB", "--otel-endpoint", receiver.url) as server:
        body = {
            "prompt": [7] * 100,
            "max_tokens": 12,
            "ignore_eos": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        }
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        asked = {"query": "sea", "documents": ["ship", "house"], "pooling": "mean"}
        assert httpx.post(f"{server.url}/v1/rerank", json=asked, timeout=60).status_code == 200
        eventually(lambda: receiver.named("decode") and receiver.named("pool"), 20)
    (pooled,) = receiver.named("pool")
    (ranking,) = receiver.named("POST /v1/rerank")
    assert pooled["parent"] == ranking["id"] and pooled["windlass.texts"] == 3 and pooled["end"] > pooled["start"]
    assert ranking["windlass.outcome"] == "ok"
    assert ranking["gen_ai.usage.input_tokens"] == pooled["gen_ai.usage.input_tokens"] > 0
    (span,), phases = (
        receiver.named("POST /v1/completions"),
        [next(each for each in receiver.named(name) if each["parent"] != ranking["id"]) for name in PHASES],
    )
    assert span["windlass.scaling"] == "yarn" and span["gen_ai.usage.input_tokens"] == 100
    for before, after in itertools.pairwise(phases):
        assert before["start"] <= before["end"] == pytest.approx(after["start"], abs=2e-3)
    queue, prefill = phases[1], phases[2]
    assert queue["end"] > queue["start"] and prefill["end"] > prefill["start"]  # the engine's own time is between them
    assert phases[3]["end"] <= span["end"] + 2e-3


def test_phases_in_the_exporter() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    scope = {"type": "http", "method": "POST", "path": "/x" * 500, "headers": [], "windlass.request_id": "r"}
    parent = tracing.begin(scope)
    # The second one has times of two processes: never negative.
    tracing.phases(parent, [("decode", 10.0, 12.5, {"n": 1}), ("queue", 12.5, 9.0, {})])
    parent.end()
    tracing.flush()
    decode, queue, whole = exporter.get_finished_spans()
    assert decode.end_time - decode.start_time == pytest.approx(2.5e9, abs=1e3) and decode.attributes == {"n": 1}
    assert queue.end_time == queue.start_time == decode.end_time
    assert decode.parent.span_id == whole.context.span_id and len(whole.attributes["url.path"]) == 200
    tracing.close()


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "demo", "--otel-endpoint", "collector"]) == 2
    assert "must be a URL" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert cli.run(["serve", "demo", "--otel-endpoint", "http://127.0.0.1:4318"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install -c constraints.txt -e '.[otel]'" in said
