"""A server that says it is ready has nothing left to load: first requests of every kind import no module, in either process."""

from __future__ import annotations

import re
import socket
import time

import httpx
import pytest
from helpers.live_server import live_server
from helpers.real_server import RealServer, serve

PROMPT = {"prompt": "In the beginning", "max_tokens": 24, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
REQUESTS = [
    ("POST", "/v1/completions", {**PROMPT, "temperature": 0, "stream": True}),
    ("POST", "/v1/completions", {**PROMPT, "logprobs": 3, "echo": True, "stop": ["zz"]}),
    ("POST", "/v1/completions", {**PROMPT, "n": 2, "seed": 1, "top_k": 9, "min_p": 0.05, "frequency_penalty": 0.5}),
    ("POST", "/v1/completions", {**PROMPT, "rope_scaling": {"rope_type": "yarn", "factor": 4}}),
    ("POST", "/v1/completions", {**PROMPT, "rope_scaling": {"rope_type": "dynamic", "factor": 4}, "rope_update": "rotate"}),
    ("POST", "/v1/completions", {**PROMPT, "timeout": 0.001, "max_tokens": 400}),
    ("POST", "/v1/completions", {"prompt": "words " * 400}),
    ("POST", "/v1/completions", {"prompt": "x", "temprature": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/v1/completions", None),
    ("GET", "/nowhere", None),
    *(("GET", path, None) for path in ("/v1/models", "/health", "/version", "/metrics", "/openapi.json")),
]  # fmt: skip


def imported(server: RealServer) -> list[str]:
    """Modules imported after the ready line, by either process: `-X importtime` writes a line for each."""
    _, ready, after = server.log.read_text().partition(" serves ")
    assert ready
    return re.findall(r"^import time: .*\| +(\S+)$", after, re.MULTILINE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--quantization", "int8"), id="int8", marks=pytest.mark.slow),
    ],
)
def test_first_requests_import_nothing(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serve(*options) as server:
        end = time.monotonic() + 10
        while " serves " not in server.log.read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        loaded = server.log.read_text()
        assert "windlass.engine.execution.model_runner" in loaded  # the engine's imports are seen, too
        assert not re.search(r"\| +torch\._dynamo$", loaded, re.MULTILINE)  # a second's import that nothing here needs
        with httpx.Client(base_url=server.url, timeout=30) as client:
            statuses = [client.request(method, path, json=body).status_code for method, path, body in REQUESTS]
        assert statuses.count(200) >= 13 and max(statuses) <= 504, statuses
        # The engine's first idle moment, which may come between two of them, brings the library for grammars.
        assert [name for name in imported(server) if name.partition(".")[0] != "llguidance"] == []


def test_small_writes_do_not_wait_for_an_acknowledgement():
    """Each token is a small write of its own; Nagle's algorithm would keep it until the one before is acknowledged."""
    with live_server() as live:
        live.http.get("/health")
        (connection,) = live.registry._clients
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
