"""Items of a response's input merged into turns at linear cost, and arguments of calls with lone surrogates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.server.api import responses
from windlass.server.api.messages import _arguments_object
from windlass.server.api.responses import chat_request_from_response
from windlass.server.errors import ApiError
from windlass.server.schemas.chat import MAX_CALLS, ChatMessage
from windlass.server.schemas.responses import ResponseRequest
from windlass.server.schemas.tools import check_arguments, parse_arguments, replace_lone_surrogates

USER = {"role": "user", "content": "hi"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}", **fields}


def result(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": "sunny"}


def messages_of(*items: dict[str, Any]) -> list[ChatMessage]:
    return chat_request_from_response(ResponseRequest.model_validate({"model": "m", "input": [*items]}), [])[0].messages


@pytest.mark.parametrize(
    ("thoughts", "expected"),
    [(["a"], "a"), (["a", "b"], "a\nb"), (["", "a", "", "b", ""], "a\n\nb\n"), (["", ""], "")],
)
def test_consecutive_thoughts_are_merged(thoughts: list[str], expected: str) -> None:
    said = {"role": "assistant", "content": "hello"}
    (_, turn, _) = messages_of(USER, *map(thought, thoughts), said, USER)
    assert (turn.reasoning_content, turn.content) == (expected, "hello")
    assert len(messages_of(USER, *map(thought, thoughts), USER)) == (3 if expected else 2)


def test_thoughts_and_calls_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: earlier items must not be copied again with each further one."""
    made: list[int] = []  # ids of the turn's values while items are added

    class Watching(responses._MessagesBuilder):
        def add(self, item: Any, place: str) -> None:
            super().add(item, place)
            made.extend(map(id, self._assistant_fields.values()))

    monkeypatch.setattr(responses, "_MessagesBuilder", Watching)
    numbers = range(MAX_CALLS)
    turn = messages_of(USER, *[thought("x" * 100)] * 1000, *map(call, numbers), *map(result, numbers))[1]
    assert turn.reasoning_content == "\n".join(["x" * 100] * 1000) and turn.tool_calls is not None
    assert [each.id for each in turn.tool_calls] == [f"c{number}" for number in numbers]
    assert len(set(made)) == 2, "one object for the thoughts and one for the calls"


def test_a_turn_has_at_most_the_calls_of_a_chat_message() -> None:
    """They become one message of a chat, which has this limit."""
    items = [*map(call, range(MAX_CALLS + 1)), *map(result, range(MAX_CALLS + 1))]
    with pytest.raises(ApiError) as caught:
        messages_of(USER, *items)
    assert caught.value.param == f"input[{MAX_CALLS + 1}]" and str(MAX_CALLS) in caught.value.message
    halves = [*items[1:100], result(1)]
    assert len(messages_of(USER, *halves)) == 3
    assert len(messages_of(*[item for number in range(200) for item in (call(number), result(number))])) == 400


def test_an_incomplete_call_is_kept_if_it_has_a_result() -> None:
    for arguments in ('{"a": [' + "0," * 100_001 + "0]}", '{"a": 1e301}', '{"a": "b'):
        cut = call(1, status="incomplete", arguments=arguments)
        assert len(messages_of(USER, cut)) == 1  # without a result it is left out
        (_, turn, _) = messages_of(USER, cut, result(1))
        assert turn.tool_calls is not None
        assert json.loads(turn.tool_calls[0].function.arguments) == {"arguments": arguments}
    whole = call(1, status="incomplete", arguments=json.dumps({"a": 1}))
    assert len(messages_of(USER, whole, result(1))) == 3


# ---- lone surrogates in arguments of calls ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ude00", "\ufffd"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00!", "\ufffd\U0001f600!"),
        (r"\\ud83d", "\\ud83d"),
        (r"\\\ud83d\u0041", "\\\ufffdA"),
        (r"\"\ud7ff\ue000", '"\ud7ff\ue000'),
    ],
)
def test_lone_surrogates_are_replaced(written: str, read: str) -> None:
    text = f'{{"a": "{written}", "b{written}": [1]}}'
    assert parse_arguments(text) == _arguments_object(text) == {"a": read, f"b{read}": [1]}
    assert check_arguments(text) == text  # as it was sent


@given(st.text(st.sampled_from('a"\\\u00e9\U0001f600\ud83d\ude00\ud800\udfff')))
def test_other_text_is_unchanged(text: str) -> None:
    written = json.dumps(text)
    found = json.loads(replace_lone_surrogates(written))
    halves = {i for i, character in enumerate(json.loads(written)) if "\ud800" <= character <= "\udfff"}
    assert found == "".join("\ufffd" if i in halves else c for i, c in enumerate(json.loads(written)))
