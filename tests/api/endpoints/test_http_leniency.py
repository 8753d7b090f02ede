"""Nulls and history fields of clients have no effect, and errors always have a code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.doc_examples import ROOT
from helpers.live_server import Live

from windlass.server.schemas import base, chat, messages, responses, tools
from windlass.server.schemas import messages as message_answers
from windlass.server.schemas import responses as response_answers
from windlass.server.schemas.base import StrictModel

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def prompt_of(live: Live, path: str, body: dict[str, Any]) -> Any:
    """The prompt in the engine."""
    live.engine.requests.clear()
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    (request,) = live.engine.requests
    return request.prompt_token_ids, request.sampling, request.rope_scaling


MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "seed": 1}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
PLAIN: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "text"},
    "seed": 1,
    "max_tokens": 1,
    "truncate_prompt_tokens": 250,  # the toy model's context is short
}


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in list(value.values()):
            yield from objects_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from objects_in(item)


def copy_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    return [copy_of(item) for item in value] if isinstance(value, list) else value


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("place", range(len(list(objects_in(PLAIN)))))
def test_null_counts_as_absent_in_every_object(live: Live, place: int) -> None:
    body = copy_of(PLAIN)
    where = list(objects_in(body))[place]
    if set(where) == {"type"} and where["type"] == "object":
        return  # a tool's schema goes to the template as it is
    where["no_such_field"] = None
    if "role" in where:
        where.update(name=None, tool_calls=where.get("tool_calls"), refusal=None, annotations=None, cache_control=None)
    assert prompt_of(live, CHAT, body) == prompt_of(live, CHAT, PLAIN)


@pytest.mark.parametrize(
    ("path", "body", "nulls"),
    [
        ("/v1/responses", {"input": "a", "metadata": {"b": "c"}}, {"metadata": {"a": None, "b": "c"}}),
        ("/v1/responses", {"input": "a"}, {"moderation": {"model": None}, "context_management": {"a": None}}),
        ("/v1/messages", MESSAGE, {"container": {"id": None}, "context_management": {"edits": None}}),
        ("/v1/messages", {**MESSAGE, "output_config": {"format": FORM}},
         {"output_config": {"effort": None, "format": {**FORM, "name": None}}}),
    ],
)  # fmt: skip
def test_null_counts_as_absent_in_free_form_objects(live: Live, path: str, body: Any, nulls: Any) -> None:
    assert prompt_of(live, path, {**body, **nulls}) == prompt_of(live, path, body)


def test_every_field_of_a_request_may_be_null(live: Live) -> None:
    from windlass.server.schemas.chat import ChatRequest
    from windlass.server.schemas.completions import CompletionRequest

    for path, model, kept in ((CHAT, ChatRequest, {"messages"}), (COMPLETIONS, CompletionRequest, {"prompt"})):
        body = {"messages": PLAIN["messages"][:1]} if path == CHAT else {"prompt": "a"}
        nulls = dict.fromkeys(set(model.model_fields) - kept)
        assert prompt_of(live, path, {**nulls, **body})[0] == prompt_of(live, path, body)[0]
    for path, name in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        assert live.refusal(path, {name: None}) == (name, "missing_field")


def test_bookkeeping_in_messages_and_parts_has_no_effect(live: Live) -> None:
    body = copy_of(PLAIN)
    marks = {"cache_control": {"type": "ephemeral"}, "id": "m1", "timestamp": 17.5, "weight": 0}
    provider = {"provider_specific_fields": {"refusal": None, "reasoning": "so"}}  # by litellm
    empty: dict[str, Any] = {"audio": {"id": None}, "images": [], "thinking_blocks": [], "reasoning_details": []}
    for message in body["messages"]:
        message.update(marks | provider | empty)
    copied = {"role": "assistant", "refusal": None, "annotations": [{"type": "x"}], "logprobs": [], "parsed": {"a": 1}}
    body["messages"][0]["content"][0].update(marks, **copied, name="n", prompt_cache_breakpoint={"mode": "explicit"})
    call = body["messages"][1]["tool_calls"][0]
    call.update(provider, index=0)
    call["function"].update(provider, parsed_arguments={})
    body["tools"][0]["cache_control"] = {"type": "ephemeral"}
    assert prompt_of(live, CHAT, body) == prompt_of(live, CHAT, PLAIN)


def test_settings_of_other_services_have_no_effect(live: Live) -> None:
    cache = {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}
    guess = {"prediction": {"type": "content", "content": [{"type": "text", "text": "b"}]}}
    body = {**PLAIN, **cache, **guess, "modalities": ["text"]}
    assert prompt_of(live, CHAT, body) == prompt_of(live, CHAT, PLAIN)
    for path, plain in ((COMPLETIONS, {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        assert prompt_of(live, path, {**plain, **cache})[0] == prompt_of(live, path, plain)[0]
    plain = {"input": "a"}
    body = {**plain, "client_metadata": {"a": "b"}, "reasoning": {"context": "all_turns", "mode": "standard"}}
    assert prompt_of(live, "/v1/responses", body)[0] == prompt_of(live, "/v1/responses", plain)[0]


PLAINEST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": PLAIN["messages"][:1], "max_tokens": 2},
    "/v1/messages": {"messages": PLAIN["messages"][:1], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", PLAINEST)
def test_neutral_values_of_other_servers_are_accepted(live: Live, path: str) -> None:
    plain = {**PLAINEST[path], "temperature": 0}
    assert prompt_of(live, path, {**plain, **base.NEUTRAL_VALUES, "prediction": None}) == prompt_of(live, path, plain)
    others = (not value if isinstance(value, bool) else [0, "", {"a": 1}] for value in base.NEUTRAL_VALUES.values())
    for name, value in zip(base.NEUTRAL_VALUES, others, strict=True):
        assert live.refuse(path, {**plain, name: value})["param"] == name
    for name, value in {
        "mirostat": False,
        "length_penalty": True,
        "detokenize": 1,
        "documents": {},
        "n_probs": 5,
    }.items():
        assert live.refuse(path, {**plain, name: value})["param"] == name


def test_documentation_lists_the_neutral_values() -> None:
    page = (ROOT / "docs" / "reference" / "fields.md").read_text(encoding="utf-8")
    table = page[page.index("| field | accepted value |") :]
    shown = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", table, re.MULTILINE))
    assert {name: json.loads(value) for name, value in shown.items()} == base.NEUTRAL_VALUES


@pytest.mark.parametrize(
    ("answered", "taken"),
    [
        (chat.ChatAnswer, chat.ChatMessage),
        (tools.AnsweredCall, tools.MadeToolCall),
        (tools.AnsweredFunction, tools.MadeFunctionCall),
        (message_answers.MessageAnswer, messages.InputMessage),
        (message_answers.AnsweredText, messages.TextBlock),
        (message_answers.AnsweredThinking, messages.ThinkingBlock),
        (message_answers.AnsweredToolUse, messages.ToolUseBlock),
        (response_answers.OutputMessage, responses.MessageItem),
        (response_answers.OutputText, responses.TextPart),
        (response_answers.OutputReasoning, responses.ReasoningItem),
        (response_answers.ReasoningText, responses.TextPart),
        (response_answers.OutputCall, responses.CallItem),
        (response_answers.OutputCustomCall, responses.CustomCallItem),
        (response_answers.ListedMessage, responses.MessageItem),
        (response_answers.ListedCall, responses.CallItem),
        (response_answers.ListedCallOutput, responses.CallOutputItem),
        (response_answers.ListedCustomCall, responses.CustomCallItem),
        (response_answers.ListedCustomCallOutput, responses.CustomCallOutputItem),
        (response_answers.ListedReasoning, responses.ReasoningItem),
    ],
)
def test_every_field_of_an_answer_can_be_sent_back(answered: type[StrictModel], taken: type[StrictModel]) -> None:
    assert set(answered.model_fields) <= set(taken.model_fields) | taken.ignored


def test_running_usage_comes_only_with_usage(live: Live) -> None:
    def usages(**options: bool) -> list[bool]:
        events = live.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream_options": options})
        return [event.get("usage") is not None for event in events[:-1]]

    assert usages(continuous_usage_stats=True, include_obfuscation=True) == [False] * 3
    assert usages(include_obfuscation=False, include_usage=True) == [False, False, False, True]
    assert usages(continuous_usage_stats=True, include_usage=True) == [True] * 4


def test_wrong_paths_and_methods_have_a_code(live: Live) -> None:
    assert live.http.get("/v2").json()["error"]["code"] == "not_found"
    assert live.http.get(COMPLETIONS).json()["error"]["code"] == "method_not_allowed"
