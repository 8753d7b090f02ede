"""Both clients against a scripted server on real sockets: responses, errors, retries, streams and their ends."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import inspect
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
from api_helpers.any_client import any_client, scripted_client
from helpers.scripted_http import answer, drop, events, scripted_server, silence

import windlass.clients
from windlass.clients import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    NotFoundError,
    RateLimitError,
    ResponseError,
    RetryPolicy,
    ServerError,
    StreamError,
)

QUICK = RetryPolicy(first_delay=0.01, longest_delay=0.02)
ENVELOPE = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
COMPLETION = {
    **ENVELOPE,
    "choices": [
        {
            "index": 0,
            "text": " two",
            "finish_reason": "stop",
            "stop_reason": 7,
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [None, -1],
                "top_logprobs": [None, {"b": -1.0}],
                "text_offset": [0, 1],
            },
            "new_field": [1],
        }
    ],
    "usage": USAGE,
    "rotary": {"rope_type": "yarn"},
    "something_new": {"x": 1},
}
CHAT = {
    **ENVELOPE,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Größe"},
            "finish_reason": "length",
            "logprobs": {
                "content": [
                    {
                        "token": "G",
                        "logprob": -0.5,
                        "bytes": [71],
                        "top_logprobs": [{"token": "G", "logprob": -0.5, "bytes": None}],
                    }
                ]
            },
        }
    ],
    "usage": USAGE,
}


def chunk(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {**ENVELOPE, "choices": [{"index": index, "text": text, "finish_reason": finish}]}


def chat_chunk(content: str | None = None, role: str | None = None, finish: str | None = None) -> dict[str, Any]:
    delta = {name: value for name, value in (("role", role), ("content", content)) if value is not None}
    return {**ENVELOPE, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@pytest.fixture
def make(kind, monkeypatch):
    """A factory of clients with short retry delays."""
    for variable in ("WINDLASS_API_KEY", "WINDLASS_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    return lambda *args, **options: any_client(kind, *args, **{"retry": QUICK, "timeout": 10, **options})


@pytest.fixture
def serve(kind, make):
    """A factory of scripted servers with a client of each."""
    return lambda *scripts, **options: scripted_client(kind, *scripts, **{"retry": QUICK, "timeout": 10, **options})


pytestmark = pytest.mark.anyio


async def collect(stream) -> list[Any]:
    async with stream:
        return [item async for item in stream]


# ---- responses -------------------------------------------------------------------------------------------------------
async def test_context_options_are_sent_and_context_use_is_reported(serve):
    fields = {
        "context_overflow": "shift",
        "keep_tokens": 32,
        "attention_window": 64,
        "attention_sinks": 4,
        "cache_reuse": 48,
        "cache_reuse_recompute": 0.15,
    }
    spans = ({"start": 0, "end": 48}, {"start": 50, "end": 99})
    report = {
        "attention_window": 64,
        "attention_sinks": 4,
        "window": 80,
        "kept_tokens": 32,
        "dropped_tokens": 16,
        "shifts": 1,
    }
    report |= {"dropped_turns": 2, "reused_tokens": 47, "reused_passages": 1}
    told = {"rope_type": "default", "context": report}
    last = {**ENVELOPE, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "rotary": told}
    last_of_chat = {**chat_chunk(finish="stop"), "rotary": told}
    scripts = [
        answer({**COMPLETION, "rotary": told}),
        events(chunk("x"), last, "[DONE]"),
        answer({**CHAT, "rotary": told}),
        events(chat_chunk("x", role="assistant"), last_of_chat, "[DONE]"),
    ]
    chat = [{"role": "user", "content": "one"}]
    async with serve(*scripts) as (server, client):
        found = [(await client.completions("one", passages=spans, **fields)).rotary]
        found.append(
            (await (await client.completions("one", passages=spans, stream=True, **fields)).get_final()).rotary
        )
        found.append((await client.chat(chat, **fields)).rotary)
        found.append((await (await client.chat(chat, stream=True, **fields)).get_final()).rotary)
    for request, rotary in zip(server.requests, found, strict=True):
        sent = dict(request.json)
        wanted = {**fields, **({"passages": list(spans)} if "prompt" in sent else {})}
        assert {name: sent[name] for name in wanted} == wanted
        assert dataclasses.asdict(rotary.context) == report


async def test_completion(serve):
    async with serve(answer(COMPLETION)) as (server, client):
        result = await client.completions("one", model="m", max_tokens=2, stop=("\n",), top_k=None, deadline=9.5)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.json == {"prompt": "one", "model": "m", "max_tokens": 2, "stop": ["\n"], "timeout": 9.5}
    assert request.headers["content-type"] == "application/json" and "authorization" not in request.headers
    assert result.text == " two" and result.request_id == "req-1" and result.rotary.rope_type == "yarn"
    choice = result.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 7)
    assert choice.logprobs.token_logprobs == (None, -1.0) and choice.logprobs.top_logprobs == (None, {"b": -1.0})
    assert result.usage.prompt_tokens_details.cached_tokens == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.id = "x"


async def test_chat(make):
    with scripted_server(answer(CHAT)) as server:
        async with make(server.url + "/v1/") as client:
            messages = [{"role": "user", "content": "Größe? 😀"}]
            result = await client.chat(messages, temperature=0, extra_body={"reasoning_effort": "low"})
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.json == {"messages": messages, "temperature": 0, "reasoning_effort": "low"}
    assert result.text == "Größe" and result.choices[0].message.role == "assistant"
    token = result.choices[0].logprobs.content[0]
    assert token.bytes == (71,) and token.top_logprobs[0].bytes is None


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3])], ids=["list", "tuple", "range", "numpy"]
)
async def test_token_ids_in_any_form(serve, prompt):
    async with serve(answer(COMPLETION)) as (server, client):
        await client.completions(prompt)
        await client.completions([prompt, prompt], logit_bias={5: 1.5})
    assert server.requests[0].json == {"prompt": [1, 2, 3]}
    assert server.requests[1].json == {"prompt": [[1, 2, 3], [1, 2, 3]], "logit_bias": {"5": 1.5}}
    assert server.connections == 1  # the connection was reused


async def test_small_endpoints(serve):
    scripts = [
        answer({"count": 2, "tokens": [4, 5], "max_model_len": 9, "offsets": [[0, 1], [1, 2]]}),
        answer({"count": 1, "tokens": [4], "max_model_len": None}),
        answer({"prompt": "hi", "offsets": None}),
        answer({"object": "list", "data": [{"id": "org/m", "max_model_len": 64, "rotary": {"rope_theta": 1e4}}]}),
        answer({"id": "org/m x"}),
    ]
    async with serve(*scripts) as (server, client):
        tokenized = await client.tokenize("hi")
        chat = await client.tokenize(messages=[{"role": "user", "content": "x"}])
        text = await client.detokenize([4, 5], extra_body={"skip_special_tokens": True})
        models = await client.models()
        model = await client.model("org/m x")
    assert tokenized.tokens == (4, 5) and tokenized.offsets == ((0, 1), (1, 2)) and tokenized.max_model_len == 9
    assert chat.count == 1 and chat.offsets is None and text.text == "hi"
    assert models[0].id == "org/m" and models[0].rotary == {"rope_theta": 1e4} and model.id == "org/m x"
    assert [r.path for r in server.requests] == [
        "/tokenize", "/tokenize", "/detokenize", "/v1/models", "/v1/models/org/m%20x",
    ]  # fmt: skip
    assert server.requests[2].json == {"tokens": [4, 5], "skip_special_tokens": True}


async def test_health_accepts_status_503_and_is_not_retried(serve):
    async with serve(answer({"status": "ok"}), answer({"status": "draining"}, "503 Unavailable")) as (server, client):
        health, ready = await client.health(), await client.ready()
    assert (health.ok, health.status) == (True, "ok") and (ready.ok, ready.status) == (False, "draining")
    assert [r.path for r in server.requests] == ["/health", "/ready"]


async def test_settings_from_the_environment(make, monkeypatch):
    with scripted_server(answer(COMPLETION)) as server:
        monkeypatch.setenv("WINDLASS_BASE_URL", server.url + "/v1")
        monkeypatch.setenv("WINDLASS_API_KEY", "secret")
        async with make() as client:
            await client.completions("x")
        async with make(server.url, api_key="other", headers={"x-team": "blue"}) as client:
            await client.completions("x")
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert server.requests[1].headers["authorization"] == "Bearer other"
    assert server.requests[1].headers["x-team"] == "blue"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1", "/v1"])
def test_malformed_base_url_or_key_is_refused_by_the_constructor(url):
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="base URL"):
            kind(url)
    with pytest.raises(ValueError, match="API key"):
        Client("http://x", api_key="a\nb")


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError), (401, AuthenticationError), (403, AuthenticationError), (404, NotFoundError),
        (413, BadRequestError), (415, BadRequestError), (422, BadRequestError), (429, RateLimitError),
        (500, ServerError), (502, ServerError), (503, ServerError), (504, ServerError),
    ],
)  # fmt: skip
async def test_errors_by_status(serve, status, kind):
    error = {"message": "bad temperature", "type": "t", "param": "temperature", "code": "c"}
    async with serve(
        answer({"error": error}, f"{status} X", x_request_id="req-9"), retry=RetryPolicy(max_retries=0)
    ) as (_, client):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await client.completions("x", stream=stream)
            e = caught.value
            assert type(e) is kind and isinstance(e, APIStatusError)
            assert (e.status, e.param, e.code, e.type, e.request_id) == (status, "temperature", "c", "t", "req-9")
            assert e.message == "bad temperature" and "req-9" in str(e) and "temperature" in str(e)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (answer(b"<html>nginx</html>", "502 Bad Gateway", content_type="text/html"), "nginx"),
        (answer(b"", "500 Oops"), "HTTP 500 Oops"),
        (answer({"detail": "Not Found"}, "404 Not Found"), "Not Found"),
        (answer({"error": "plain"}, "400 Bad"), "plain"),
        (answer([1], "400 Bad"), "HTTP 400"),
        (answer(b"", "307 Temporary Redirect", location="http://elsewhere/"), "http://elsewhere/"),
    ],
)
async def test_errors_of_other_servers(serve, script, says):
    async with serve(script) as (server, client):
        with pytest.raises(APIStatusError, match=says):
            await client.chat([])
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "payload", [b"not json", [], {"id": "x"}, {"id": "x", "choices": 3}, {"id": "x", "choices": [{"text": "no index"}]}]
)
async def test_malformed_response(serve, payload):
    async with serve(answer(payload)) as (_, client):
        with pytest.raises(ResponseError, match="not understood") as caught:
            await client.completions("x")
    assert caught.value.request_id == "req-1"


async def test_values_that_json_cannot_represent(make):
    async with make("http://127.0.0.1:9") as client:
        with pytest.raises(ValueError, match=r"(?i)nan|out of range"):
            await client.completions("x", temperature=float("nan"))
        with pytest.raises(TypeError):
            await client.completions("x", extra_body={"x": object()})


# ---- retries ---------------------------------------------------------------------------------------------------------
OVERLOADED = answer({"error": {"message": "full"}}, "429 Too Many")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", ["429 Too Many", "503 Unavailable"])
async def test_retries_until_success(serve, status, stream):
    good = events(chunk("a", "stop"), "[DONE]") if stream else answer(COMPLETION)
    busy = answer({"error": {"message": "busy"}}, status)
    async with serve(busy, busy, good) as (server, client):
        result = await client.completions("x", stream=stream)
        if stream:
            assert [c.text for c in await collect(result)] == ["a"]
    assert len(server.requests) == 3 and len({r.body for r in server.requests}) == 1


async def test_retries_are_bounded(serve):
    async with serve(OVERLOADED) as (server, client):
        with pytest.raises(RateLimitError, match="full"):
            await client.completions("x")
    assert len(server.requests) == 1 + QUICK.max_retries


@pytest.mark.slow
@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_honoured(serve, form):
    value = "1" if form == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
    busy = answer({"error": {"message": "busy"}}, "503 Unavailable", retry_after=value)
    async with serve(busy, answer(COMPLETION)) as (server, client):
        await client.completions("x")
    first, second = server.requests
    assert 0.9 <= second.time - first.time <= 3.5


async def test_long_retry_after_raises_the_error(serve):
    busy = answer({"error": {"message": "busy"}}, "503 Unavailable", retry_after="3600")
    async with serve(busy) as (server, client):
        with pytest.raises(ServerError) as caught:
            await client.completions("x")
    assert caught.value.retry_after == 3600 and len(server.requests) == 1


@pytest.mark.parametrize("status", ["400 Bad", "500 Oops", "502 Bad Gateway", "504 Timeout"])
async def test_other_statuses_are_not_retried(serve, status):
    async with serve(answer({"error": {"message": "no"}}, status), answer(COMPLETION)) as (server, client):
        with pytest.raises(APIStatusError):
            await client.completions("x")
    assert len(server.requests) == 1


async def test_connect_errors_are_retried_and_explained(make):
    sends = []

    def refuse(request: httpx.Request) -> httpx.Response:
        sends.append(request)
        raise httpx.ConnectError("refused")

    async with make("http://nowhere", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(APIConnectionError, match="is the server running") as caught:
            await client.completions("x")
    assert len(sends) == 3 and caught.value.status is None and isinstance(caught.value.__cause__, httpx.ConnectError)


async def test_connection_refused(make):
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{placeholder.getsockname()[1]}"
        async with make(url) as client:
            with pytest.raises(APIConnectionError, match="cannot reach"):
                await client.health()


async def test_no_retry_after_a_dropped_connection(serve):
    async with serve(drop) as (server, client):
        with pytest.raises(APIConnectionError, match="broke"):
            await client.completions("x")
    assert len(server.requests) == 1


async def test_timeouts(make):
    with scripted_server(silence) as server:
        async with make(server.url) as client:
            begin = time.monotonic()
            with pytest.raises(APITimeoutError):
                await client.completions("x", timeout=0.2)
            assert time.monotonic() - begin < 3
        assert len(server.requests) == 1
        assert server.disconnects.wait(30)


def test_retry_delays_grow_with_limit_and_jitter():
    policy = RetryPolicy(max_retries=6, first_delay=1, longest_delay=8, longest_retry_after=30)
    assert [policy.delay(attempt, None, 0.0) for attempt in range(7)] == [0.5, 1, 2, 4, 4, 4, None]
    assert [policy.delay(attempt, None, 1.0) for attempt in range(6)] == [1, 2, 4, 8, 8, 8]
    assert policy.delay(0, 30, 0.5) == pytest.approx(31.5) and policy.delay(0, 31, 0.0) is None
    assert policy.delay(6, 1, 0.0) is None
    patient = RetryPolicy(max_retries=5000, first_delay=1, longest_delay=8)
    assert [patient.delay(attempt, None, 1.0) for attempt in (1023, 1024, 4999)] == [8, 8, 8]


# ---- streams ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [None, 1, 7])
async def test_stream(serve, cut):
    payloads = [chunk("Gr"), chunk("öße 😀"), chunk("", "stop"), {**ENVELOPE, "choices": [], "usage": USAGE}, "[DONE]"]
    async with serve(events(*payloads, cut=cut)) as (server, client):
        stream = await client.completions("x", stream=True, stream_options={"include_usage": True})
        assert stream.request_id == "req-1"
        chunks = await collect(stream)
    assert server.requests[0].json["stream"] is True
    assert "".join(c.text for c in chunks) == "Größe 😀"
    assert chunks[2].choices[0].finish_reason == "stop" and chunks[3].usage.total_tokens == 5


async def test_chat_stream(serve):
    payloads = [chat_chunk("", role="assistant"), chat_chunk("Hi"), chat_chunk(finish="stop"), "[DONE]"]
    async with serve(events(*payloads)) as (_, client):
        chunks = await collect(await client.chat([{"role": "user", "content": "x"}], stream=True))
    assert [c.text for c in chunks] == ["", "Hi", ""] and chunks[0].choices[0].delta.role == "assistant"


async def test_chunks_arrive_when_they_are_sent(serve):
    taken = threading.Semaphore(0)
    async with serve(events(chunk("a"), chunk("b"), chunk("c", "stop"), "[DONE]", taken=taken)) as (_, client):
        texts = []
        async with await client.completions("x", stream=True) as stream:
            async for item in stream:
                texts.append(item.text)
                taken.release()
    assert texts == ["a", "b", "c"]


BAD_ENDS = {
    "no done": ((chunk("a", "stop"),), {}, "without \\[DONE\\]"),
    "nothing": ((), {}, "without \\[DONE\\]"),
    "no finish_reason": ((chunk("a"), "[DONE]"), {}, "finish_reason"),
    "only done": (("[DONE]",), {}, "finish_reason"),
    "a choice that nobody asked for": ((chunk("a", "stop"), chunk("b", None, 1), "[DONE]"), {}, "finish_reason"),
    "one of two choices": ((chunk("a", "stop"), "[DONE]"), {"n": 2}, "finish_reason"),
    "one of two prompts": ((chunk("a", "stop"), "[DONE]"), {"prompt": ["x", "y"]}, "finish_reason"),
}


@pytest.mark.parametrize("name", BAD_ENDS)
async def test_incomplete_stream_raises(serve, name):
    payloads, options, says = BAD_ENDS[name]
    async with serve(events(*payloads)) as (server, client):
        stream = await client.completions(**{"prompt": "x", "stream": True, **options})
        chunks = []
        with pytest.raises(StreamError, match=says) as caught:
            async with stream:
                async for item in stream:
                    chunks.append(item)
    assert caught.value.request_id == "req-1" and len(server.requests) == 1
    assert len(chunks) == sum(isinstance(p, dict) for p in payloads)


async def test_finish_reasons_of_every_choice(serve):
    payloads = [chunk("a", "stop", 0), chunk("b", None, 1), chunk("", "length", 1), "[DONE]"]
    async with serve(events(*payloads)) as (_, client):
        assert len(await collect(await client.completions("x", stream=True, n=2))) == 3


async def test_error_event_raises(serve):
    error = {"error": {"message": "engine died", "type": "server_error", "param": None, "code": "engine_unavailable"}}
    async with serve(events(chunk("a"), error, "[DONE]")) as (server, client):
        chunks = []
        with pytest.raises(StreamError, match="engine died") as caught:
            async for item in await client.completions("x", stream=True):
                chunks.append(item.text)
    assert chunks == ["a"] and len(server.requests) == 1
    assert (caught.value.code, caught.value.type, caught.value.param) == ("engine_unavailable", "server_error", None)


@pytest.mark.parametrize("payload", ["{", "[1]", '{"id": 3, "choices": []}', '{"choices": []}', "null"])
async def test_malformed_event(serve, payload):
    async with serve(events(payload, "[DONE]")) as (_, client):
        with pytest.raises(ResponseError, match="not understood"):
            await collect(await client.completions("x", stream=True))


async def test_broken_connection_in_a_stream(serve):
    async with serve(events(chunk("a"), end=False)) as (server, client):
        chunks = []
        with pytest.raises(APIConnectionError, match="broke") as caught:
            async for item in await client.completions("x", stream=True):
                chunks.append(item.text)
    assert chunks == ["a"] and caught.value.request_id == "req-1"
    assert len(server.requests) == 1  # a response that has begun is not retried


async def test_timeout_in_a_stream(serve):
    async with serve(events(chunk("a"), hang=True), timeout=0.3) as (server, client):
        with pytest.raises(APITimeoutError):
            await collect(await client.completions("x", stream=True))
        assert server.disconnects.wait(30)


async def test_response_that_is_not_a_stream(serve):
    async with serve(answer(COMPLETION)) as (_, client):
        with pytest.raises(ResponseError, match="a stream was expected"):
            await client.completions("x", stream=True)


@pytest.mark.parametrize("how", ["close", "close unread", "with", "exception", "break"])
async def test_closing_early_closes_the_connection(serve, how):
    async with serve(events(chunk("a"), chunk("b"), hang=True)) as (server, client):
        stream = await client.completions("x", stream=True)
        if how == "close":
            assert (await anext(stream)).text == "a"
            await stream.aclose()
            await stream.aclose()
        elif how == "close unread":
            await stream.aclose()
        elif how == "exception":
            with pytest.raises(KeyError):
                async with stream:
                    raise KeyError
        elif how == "with":
            async with stream:
                pass
        else:
            async with stream:
                async for _ in stream:
                    break
        assert await asyncio.to_thread(server.disconnects.wait, 30)
        # After the block, the rest is missing on purpose; a loop over a closed stream must raise.
        with pytest.raises(StreamError if how.startswith("close") else StopAsyncIteration):
            await anext(stream)


async def test_cancelling_a_task_closes_its_stream():
    with scripted_server(events(chunk("a"), hang=True)) as server:
        async with AsyncClient(server.url) as client:
            begun = asyncio.Event()

            async def follow():
                async with await client.completions("x", stream=True) as stream:
                    async for _ in stream:
                        begun.set()

            task = asyncio.create_task(follow())
            await asyncio.wait_for(begun.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.disconnects.wait, 30)


async def test_cancelling_a_plain_request_closes_its_connection():
    with scripted_server(silence) as server:
        async with AsyncClient(server.url) as client:
            task = asyncio.create_task(client.completions("x"))
            async with asyncio.timeout(30):
                while not server.requests:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.disconnects.wait, 30)


def test_abandoned_stream_is_closed():
    with scripted_server(events(chunk("a"), hang=True)) as server, Client(server.url) as client:
        for _ in client.completions("x", stream=True):
            break
        assert server.disconnects.wait(30)


# ---- the package -----------------------------------------------------------------------------------------------------
def test_import_is_light():
    code = (
        "import sys, windlass.clients\n"
        "heavy = ('torch', 'numpy', 'fastapi', 'pydantic', 'tokenizers', 'transformers', 'jinja2', 'windlass.engine')\n"
        "print([name for name in heavy if name in sys.modules], any(n.startswith('windlass.server') for n in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split("\n")[0] == "[] False"


def test_public_names():
    for name in windlass.clients.__all__:
        assert hasattr(windlass.clients, name)
    assert set(windlass.clients.__all__) <= set(dir(windlass.clients))
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = windlass.clients.Klient
    errors = [value for value in vars(windlass.clients.errors).values() if inspect.isclass(value)]
    assert all(issubclass(error, APIError) and error.__name__ in windlass.clients.__all__ for error in errors)


def test_both_clients_have_the_same_methods():
    def public(kind: type) -> dict[str, list[str]]:
        names = {"aclose": "close"}
        return {
            names.get(name, name): list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert public(Client) == public(AsyncClient)


def test_repr_shows_the_url_and_no_secret():
    options = {"api_key": "secret-key", "headers": {"x-team": "secret-header"}}
    for kind in (Client, AsyncClient):
        shown = repr(kind("http://user:secret-password@example.com:8000/v1", **options))
        assert shown == f"{kind.__name__}(base_url='http://example.com:8000')"
