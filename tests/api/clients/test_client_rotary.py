"""Rotary scaling in both clients: the fields of requests, and the parsed reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from api_helpers.any_client import any_client
from helpers.scripted_http import answer, events, scripted_server

from windlass.clients import ResponseError, Rotary, RotaryGroup, RotaryInspection, RotarySettings

ENVELOPE = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}
YARN = {"rope_type": "yarn", "factor": 4.0}
REPORT = {
    "rope_type": "yarn",
    "parameters": {"rope_theta": 1e4, "factor": 4.0},
    "policy": "rotate",
    "effective_length": 181,
    "fingerprint": "f0",
    "moves": 2,
    "something_new": 1,
}
TYPED = Rotary(**{name: value for name, value in REPORT.items() if name != "something_new"})
SETTINGS = {
    "model": {"rope_type": "default", "rope_theta": 1e4},
    "default": {"rope_type": "default", "policy": "frozen"},
    "profiles": {"long": YARN},
    "policy": "profiles",
    "rope_update": None,
    "rope_exact": True,
    "max_model_len": 512,
}
INSPECTION = {
    "rope_type": "linear",
    "parameters": {"factor": 2.0},
    "inv_freq": [0.5, 0],
    "wavelengths": [12.5, None],
    "attention_factor": 1.2,
    "softmax_scale": 1,
    "effective_length": None,
    "fingerprint": "f1",
    "policy": "frozen",
    "length": 9,
}

pytestmark = pytest.mark.anyio


async def call(kind: str, url: str, method: str, *args: Any, **options: Any) -> Any:
    async with any_client(kind, url) as client:
        return await getattr(client, method)(*args, **options)


async def streamed(kind: str, url: str, **options: Any) -> tuple[Any, list[Any], Any]:
    """The rotary report of a stream before its end, its chunks, and the report after its end."""
    async with any_client(kind, url) as client, await client.completions("a", stream=True, **options) as stream:
        before = stream.rotary
        chunks = [chunk async for chunk in stream]
        return before, chunks, stream.rotary


def end(index: int, **fields: Any) -> dict[str, Any]:
    return {**ENVELOPE, "choices": [{"index": index, "text": "x", "finish_reason": "stop"}], **fields}


async def test_rotary_fields_are_sent_unchanged(kind: str) -> None:
    done = {**ENVELOPE, "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    with scripted_server(answer(done)) as server:
        await call(kind, server.url, "completions", "a", rope_scaling="long", rope_update="rotate")
        exact = {"policy": "recompute", "exact": True}
        await call(kind, server.url, "completions", "a", rope_scaling=YARN, rope_update=exact)
    first, second = (request.json for request in server.requests)
    assert first == {"prompt": "a", "rope_scaling": "long", "rope_update": "rotate"}
    assert second == {"prompt": "a", "rope_scaling": YARN, "rope_update": exact}


async def test_responses_have_typed_reports(kind: str) -> None:
    group = {"rope_type": "yarn", "parameters": {"factor": 4.0}, "effective_length": 9, "fingerprint": "g", "new": 1}
    other = {**REPORT, "effective_length": None, "groups": {"full_attention": group}}
    groups = {
        "full_attention": RotaryGroup(
            rope_type="yarn", parameters={"factor": 4.0}, effective_length=9.0, fingerprint="g"
        )
    }
    choices = [{"index": i, "text": "x", "finish_reason": "stop", "rotary": r} for i, r in enumerate([REPORT, other])]
    chat = {**ENVELOPE, "choices": [{"index": 0, "message": {"content": "x"}, "rotary": REPORT}], "rotary": REPORT}
    scripts = (answer({**ENVELOPE, "choices": choices, "rotary": REPORT}), answer(chat))
    with scripted_server(*scripts) as server:
        result = await call(kind, server.url, "completions", ["a", "b"])
        assert result.rotary == result.choices[0].rotary == TYPED and isinstance(result.rotary.effective_length, float)
        assert result.choices[1].rotary == dataclasses.replace(TYPED, effective_length=None, groups=groups)
        result = await call(kind, server.url, "chat", [])
        assert result.rotary == result.choices[0].rotary == TYPED


async def test_response_without_report(kind: str) -> None:
    with scripted_server(
        answer({**ENVELOPE, "choices": []}), answer({**ENVELOPE, "choices": [], "rotary": 5})
    ) as server:
        assert (await call(kind, server.url, "completions", "a")).rotary is None
        with pytest.raises(ResponseError, match="rotary"):
            await call(kind, server.url, "completions", "a")


async def test_stream_reports_at_its_end(kind: str) -> None:
    text = {**ENVELOPE, "choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    with scripted_server(events(text, end(0, rotary=REPORT), "[DONE]")) as server:
        before, chunks, after = await streamed(kind, server.url)
    assert before is None and after == TYPED
    assert [chunk.rotary for chunk in chunks] == [None, TYPED]


async def test_stream_of_several_choices_reports_the_first(kind: str) -> None:
    other = {**REPORT, "fingerprint": "other"}
    usage = {**ENVELOPE, "choices": [], "usage": {}, "rotary": REPORT}
    for parts in (
        [end(1, rotary=other), end(0, rotary=REPORT)],
        [end(0, rotary=REPORT), end(1, rotary=other)],
        [end(1, rotary=other), end(0), usage],
    ):
        with scripted_server(events(*parts, "[DONE]")) as server:
            _, chunks, after = await streamed(kind, server.url, n=2)
        assert after == TYPED and len(chunks) == len(parts)


async def test_stream_without_report(kind: str) -> None:
    with scripted_server(events(end(0), "[DONE]")) as server:
        assert (await streamed(kind, server.url))[2] is None


async def test_rotary_settings(kind: str) -> None:
    with scripted_server(answer(SETTINGS)) as server:
        settings = await call(kind, server.url, "rotary")
    (request,) = server.requests
    assert (request.method, request.path) == ("GET", "/v1/rotary")
    assert isinstance(settings, RotarySettings) and settings.profiles == {"long": YARN}
    assert (settings.policy, settings.rope_update, settings.rope_exact) == ("profiles", None, True)
    assert settings.max_model_len == 512 and settings.model["rope_theta"] == 1e4


async def test_inspection(kind: str) -> None:
    with scripted_server(answer(INSPECTION)) as server:
        inspection = await call(kind, server.url, "inspect", YARN, length=9, rope_update="frozen", model="m")
        await call(kind, server.url, "inspect", "long")
        await call(kind, server.url, "inspect")
    first, second, third = server.requests
    assert (first.method, first.path) == ("POST", "/v1/rotary/inspect")
    assert first.json == {"rope_scaling": YARN, "length": 9, "rope_update": "frozen", "model": "m"}
    assert (second.json, third.json) == ({"rope_scaling": "long"}, {})
    assert isinstance(inspection, RotaryInspection)
    assert inspection.inv_freq == (0.5, 0.0) and inspection.wavelengths == (12.5, None)
    assert (inspection.attention_factor, inspection.policy, inspection.effective_length) == (1.2, "frozen", None)


async def test_inspection_of_two_rotary_groups(kind: str) -> None:
    groups = {"full_attention": INSPECTION, "sliding_attention": {**INSPECTION, "inv_freq": [1], "fingerprint": "f2"}}
    with scripted_server(
        answer({**INSPECTION, "groups": groups}), answer({**INSPECTION, "groups": {"x": 3}})
    ) as server:
        inspection = await call(kind, server.url, "inspect")
        with pytest.raises(ResponseError, match=r"groups\.x should be an object"):
            await call(kind, server.url, "inspect")
    local = inspection.groups["sliding_attention"]
    assert list(inspection.groups) == list(groups) and (local.inv_freq, local.fingerprint) == ((1.0,), "f2")
