"""Both clients of the unmodified `openai` package: their fields, fields of Windlass, errors and aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from helpers.live_server import MODEL, Live, server_fixture
from helpers.real_server import RealServer
from helpers.scripted_http import answer, drop, scripted_server

from windlass.clients import Client, RopeScaling
from windlass.engine.errors import DeadlineError, EngineDeadError, QueueFullError, RequestError

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "What does horse mean?"}]
PROMPTS: dict[str, dict[str, Any]] = {"completions": {"prompt": "In the beginning"}, "chat": {"messages": MESSAGES}}
KEY = "secret"
shared = server_fixture(api_keys=(KEY,), max_body_bytes=20_000, max_header_bytes=4_000)


@pytest.fixture(params=["completions", "chat"])
def endpoint(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(kind: str, url: str, **options: Any) -> Any:
    """A client of the package."""
    settings = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": 30, **options}
    return openai.OpenAI(**settings) if kind == "sync" else openai.AsyncOpenAI(**settings)


def resource(client: Any, endpoint: str) -> Any:
    return client.completions if endpoint == "completions" else client.chat.completions


async def create(kind: str, url: str, endpoint: str, received: list[Any] | None = None, **fields: Any) -> Any:
    """A response, or the list of a stream's chunks, which are appended to `received` one by one."""
    options = {name: fields.pop(name) for name in ("api_key", "timeout", "max_retries") if name in fields}
    fields = {"model": MODEL, **PROMPTS[endpoint], **fields}
    received = [] if received is None else received
    if kind == "async":
        async with opened(kind, url, **options) as client:
            result = await resource(client, endpoint).create(**fields)
            if not fields.get("stream"):
                return result
            async for chunk in result:
                received.append(chunk)
            return received

    def work() -> Any:
        with opened(kind, url, **options) as client:
            result = resource(client, endpoint).create(**fields)
            if not fields.get("stream"):
                return result
            for chunk in result:
                received.append(chunk)
            return received

    return await asyncio.to_thread(work)


def text_of(result: Any) -> str:
    """Text of the first choice of a response or of a list of chunks."""
    if not isinstance(result, list):
        choice = result.choices[0]
        return choice.text if hasattr(choice, "text") else choice.message.content
    choices = [chunk.choices[0] for chunk in result if chunk.choices]
    return "".join(choice.text if hasattr(choice, "text") else choice.delta.content or "" for choice in choices)


# ---- responses of the bundled model ----------------------------------------------------------------------------------
SCALINGS = [None, RopeScaling.yarn(factor=4), {"rope_type": "linear", "factor": 2}, "long"]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
async def test_scalings_and_reports_in_responses_and_streams(
    demo_server: RealServer, kind: str, endpoint: str, scaling: Any
) -> None:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
    fields["extra_body"] = {"ignore_eos": True, **({} if scaling is None else {"rope_scaling": scaling})}
    whole = await create(kind, demo_server.url, endpoint, **fields)
    chunks = await create(
        kind, demo_server.url, endpoint, **fields, stream=True, stream_options={"include_usage": True}
    )
    assert text_of(whole) == text_of(chunks) and len(chunks) > 3
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens == 12

    last = next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.rotary == chunks[-1].rotary == whole.rotary
    assert [chunk for chunk in chunks if hasattr(chunk, "rotary")] == [last, chunks[-1]]

    with Client(demo_server.url) as client:
        planned = client.inspect(scaling)
        own = client.completions if endpoint == "completions" else client.chat
        same = own(*PROMPTS[endpoint].values(), max_tokens=12, temperature=0, ignore_eos=True, rope_scaling=scaling)
    assert whole.rotary["fingerprint"] == planned.fingerprint and whole.rotary["rope_type"] == planned.rope_type
    assert whole.rotary["parameters"] == planned.parameters
    assert text_of(whole) == same.text


async def test_scalings_differ(demo_server: RealServer, kind: str) -> None:
    fields = {"model": "demo", "max_tokens": 12, "temperature": 0}
    texts = [
        text_of(await create(kind, demo_server.url, "completions", **fields, extra_body={"rope_scaling": scaling}))
        for scaling in (RopeScaling.default(), RopeScaling.linear(8))
    ]
    assert texts[0] != texts[1]


async def test_other_fields_of_windlass(live: Live, kind: str) -> None:
    extra = {"top_k": 5, "return_token_ids": True, "priority": -1, "request_id": "mine", "rope_update": "recompute"}
    result = await create(kind, live.url, "completions", max_tokens=3, extra_body=extra)
    assert result.choices[0].token_ids == [65, 66, 67] and result._request_id == "mine" and result.id == "cmpl-mine"
    (asked,) = live.engine.requests
    assert (asked.sampling.top_k, asked.priority, asked.rope_update) == (5, -1, "recompute")


async def test_models_and_endpoints_without_a_method(demo_server: RealServer, kind: str) -> None:
    async def result(value: Any) -> Any:
        return value if kind == "sync" else await value

    client = opened(kind, demo_server.url)
    models = await result(client.models.list())
    assert [model.id for model in models.data] == ["demo"] and models.data[0].max_model_len == 1024
    assert (await result(client.models.retrieve("demo"))).owned_by == "windlass"
    rotary = await result(client.get("/rotary", cast_to=object))
    body = {"rope_scaling": "grow", "length": 700, "rope_update": "rotate"}
    planned = await result(client.post("/rotary/inspect", cast_to=object, body=body))
    with Client(demo_server.url) as own:
        assert rotary["profiles"] == own.profiles()
        inspected = own.inspect("grow", length=700, rope_update="rotate")
    assert tuple(planned["inv_freq"]) == inspected.inv_freq and planned["policy"] == "rotate"
    await result(client.close())


def test_chat_stream_helper(live: Live) -> None:
    live.engine.eos_after = 3  # the package raises for an answer that ends by its length
    with (
        opened("sync", live.url) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body={"top_k": 5}) as stream,
    ):
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == "bcd" and final.choices[0].finish_reason == "stop"


# ---- errors ----------------------------------------------------------------------------------------------------------
def raising(error: Exception) -> Any:
    return lambda request: error


REFUSALS: list[tuple[Exception, type[openai.APIStatusError], int, str | None]] = [
    (RequestError("bad", "prompt", "some_code"), openai.BadRequestError, 400, "some_code"),
    (QueueFullError("full"), openai.RateLimitError, 429, "queue_full"),
    (RuntimeError("a defect"), openai.InternalServerError, 500, "internal"),
    (EngineDeadError("gone"), openai.InternalServerError, 503, "engine_unavailable"),
    (DeadlineError("late"), openai.InternalServerError, 504, "deadline_exceeded"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS, ids=[str(status) for _, _, status, _ in REFUSALS])
async def test_error_classes_by_status(live: Live, kind: str, endpoint: str, refusal: Any, stream: bool) -> None:
    error, expected, status, code = refusal
    live.engine.refuse = raising(error)
    with pytest.raises(openai.APIStatusError) as caught:
        await create(kind, live.url, endpoint, stream=stream, extra_headers={"x-request-id": "mine"})
    assert type(caught.value) is expected and caught.value.status_code == status
    assert caught.value.code == code and caught.value.request_id == "mine"
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    if status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) >= 1


MISTAKES: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = [
    ({"api_key": "wrong"}, openai.AuthenticationError, None, "invalid_api_key"),
    ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
    ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
    ({"extra_body": {"tempature": 1}}, openai.BadRequestError, "tempature", "unknown_field"),
    (
        {"extra_body": {"rope_scaling": {"rope_type": "yarn", "factor": -4}}},
        openai.BadRequestError,
        "rope_scaling.factor",
        "invalid_value",
    ),
    ({"extra_body": {"rope_scaling": "none such"}}, openai.BadRequestError, "rope_scaling", "unknown_profile"),
    ({"user": "x" * 30_000}, openai.APIStatusError, None, "request_too_large"),
    ({"extra_headers": {"x-long": "x" * 6_000}}, openai.APIStatusError, None, "request_too_large"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES, ids=[str(pair[0])[:40] for pair in MISTAKES])
async def test_client_errors_have_param_and_code(
    live: Live, kind: str, endpoint: str, mistake: Any, stream: bool
) -> None:
    fields, expected, param, code = mistake
    with pytest.raises(openai.APIStatusError) as caught:
        await create(kind, live.url, endpoint, stream=stream, **fields)
    assert type(caught.value) is expected and (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id and caught.value.body["message"] in str(caught.value)


async def test_unknown_endpoints(live: Live) -> None:
    with opened("sync", live.url) as client:
        for call in (
            lambda: client.responses.cancel("resp_x"),
            lambda: client.moderations.create(model=MODEL, input="x"),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no endpoint POST"):
                call()


async def test_error_in_a_running_stream(live: Live, kind: str, endpoint: str) -> None:
    live.engine.fail_after = (2, EngineDeadError("the engine died"))
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        await create(kind, live.url, endpoint, chunks, stream=True, max_tokens=9)
    assert type(caught.value) is openai.APIError and caught.value.code == "engine_unavailable"
    assert len(text_of(chunks)) == 2


@pytest.mark.quick_cases(1)
async def test_timeouts_and_connections(live: Live, kind: str) -> None:
    live.engine.first_delay = 20.0
    with pytest.raises(openai.APITimeoutError):
        await create(kind, live.url, "completions", timeout=1.0)
    await asyncio.to_thread(live.wait, lambda: live.engine.running == 0)  # the server has aborted the request
    assert len(live.engine.aborted) == 1
    with pytest.raises(openai.APIConnectionError):
        await create(kind, "http://127.0.0.1:1", "completions")
    with scripted_server(drop) as server, pytest.raises(openai.APIConnectionError):
        await create(kind, server.url, "completions")


async def test_retries_of_the_package(kind: str) -> None:
    busy = answer({"error": {"message": "loading"}}, "503 Unavailable", retry_after="0")
    done = answer({"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": []})
    with scripted_server(busy, done) as server:
        await create(kind, server.url, "completions", max_retries=1)
    assert len(server.requests) == 2


async def test_leaving_a_stream_aborts_the_generation(live: Live, kind: str) -> None:
    live.engine.delay = 0.02
    client = opened(kind, live.url)
    if kind == "sync":
        with client.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True) as stream:
            next(iter(stream))
        client.close()
    else:
        async with await client.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True) as stream:
            await anext(aiter(stream))
        await client.close()
    await asyncio.to_thread(live.wait, lambda: len(live.engine.aborted) == 1)
