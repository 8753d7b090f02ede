"""`to_dict` and `to_json` of response types: they restore the JSON that a response was parsed from."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import windlass.clients
from windlass.clients import ChatCompletion, ContentBlock, Message, Metrics, Response, ResponseItem, RotaryInspection
from windlass.clients._parse import parse

TYPES = [
    export
    for export in (getattr(windlass.clients, name) for name in windlass.clients.__all__)
    if dataclasses.is_dataclass(export) and export is not windlass.clients.RetryPolicy
]
REQUEST_FORM = {"ChatMessage", "ContentBlock", "ResponseItem"}  # their own to_dict has the form that a request accepts
NOT_PARSED = {"MetricSample", "Metrics"}  # Prometheus' text

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
PLAIN = {
    str: st.text(max_size=3),
    int: st.integers(-5, 5),
    float: st.floats(-4, 4),
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON_VALUES,
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint of a response."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(item) for item in items])
    if origin is tuple:
        return (
            st.lists(values(items[0]), max_size=2).map(tuple)
            if items[-1] is Ellipsis
            else st.tuples(*map(values, items))
        )
    if origin is dict:
        return st.dictionaries(values(items[0]), values(items[1]), max_size=2)
    hints = typing.get_type_hints(hint)
    return st.builds(
        hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint) if field.name[0] != "_"}
    )


def test_every_response_type_has_both_methods() -> None:
    assert len(TYPES) > 60
    for response_type in TYPES:
        assert callable(response_type.to_dict) and callable(response_type.to_json), response_type


@pytest.mark.slow
@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("response_type", [each for each in TYPES if each.__name__ not in REQUEST_FORM | NOT_PARSED])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parsing_to_dict_restores_the_response(response_type: type, data: st.DataObject) -> None:
    response = data.draw(values(response_type))
    assert parse(response_type, response.to_dict()) == response
    assert parse(response_type, json.loads(response.to_json())) == response


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
ROTARY = {"rope_type": "yarn", "parameters": {"factor": 4.0}, "policy": "rotate", "moves": 2, "effective_length": 181.0}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT = {
    "id": "chat-1",
    "model": "m",
    "created": 5,
    "usage": USAGE,
    "rotary": {**ROTARY, "groups": {"full_attention": {"rope_type": "default", "parameters": {}}}},
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Größe", "tool_calls": [CALL], "refusal": "no"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "G", "logprob": -0.5, "bytes": [71], "top_logprobs": []}]},
        }
    ],
    "prompt_logprobs": [None, {"5": {"logprob": -1.0}}],
    "request_id": "r",
}
INSPECTION = {
    "rope_type": "linear",
    "parameters": {"factor": 2.0},
    "inv_freq": [0.5, 0.0],
    "wavelengths": [12.5, None],
    "attention_factor": 1.2,
    "softmax_scale": 1.0,
    "policy": "frozen",
}
RESPONSE = {
    "id": "resp-1",
    "status": "completed",
    "model": "m",
    "created_at": 5,
    "output": [{"type": "message", "id": "i", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}],
    "metadata": {"a": "b"},
}
MESSAGE = {
    "id": "msg-1",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "a", "thinking": "", "input": {}}],
    "usage": {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 3,
    },
}


@pytest.mark.parametrize(
    ("response_type", "data"),
    [(ChatCompletion, CHAT), (RotaryInspection, INSPECTION), (Response, RESPONSE), (Message, MESSAGE)],
)
def test_to_dict_is_the_json_without_nulls(response_type: type, data: dict[str, Any]) -> None:
    response = parse(response_type, data)
    assert response.to_dict() == data and json.loads(response.to_json(indent=2)) == data
    assert response.to_json() == json.dumps(response.to_dict(), ensure_ascii=False)


def test_metrics_to_dict() -> None:
    metrics = Metrics.parse('a{x="1"} 2\n')
    assert metrics.to_dict() == {"samples": [{"name": "a", "value": 2.0, "labels": {"x": "1"}}]}


def test_parts_that_a_request_accepts_have_its_form() -> None:
    message = parse(ChatCompletion, CHAT).choices[0].message
    assert message.to_dict() == {"role": "assistant", "content": "Größe", "tool_calls": [CALL]}
    assert ContentBlock(type="thinking", thinking="a").to_dict() == {
        "type": "thinking",
        "thinking": "a",
        "signature": "",
    }
    assert ResponseItem(type="reasoning", status="completed").to_dict() == {"type": "reasoning", "summary": []}
