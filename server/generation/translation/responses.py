"""From a body of `/v1/responses` to that of a chat."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from windlass.server.errors import bad_request
from windlass.server.generation.translation.names import FieldNames, Translated
from windlass.server.protocol.chat import MAX_CALLS, MAX_MESSAGES, ChatMessage, ChatRequest
from windlass.server.protocol.generation_request import SharedRequest
from windlass.server.protocol.responses.items import (
    INCOMPLETE,
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    known_items,
    text_of,
)
from windlass.server.protocol.responses.request import LOGPROBS, ResponseRequest
from windlass.server.protocol.tools import (
    FunctionDefinition,
    MadeFunctionCall,
    MadeToolCall,
    ToolDefinition,
    allowed_choice,
    named_choice,
)

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_PARTS = {"tool_call_id": "call_id", "tool_calls": "call_id", "content": "content"}


def chat_of_response(body: ResponseRequest, earlier: Sequence[Item]) -> Translated:
    """The chat that a response's body asks for; raises ApiError naming the field. earlier: the conversation it goes on from."""
    messages: list[ChatMessage] = []
    places: list[str] = []
    if body.instructions is not None:
        messages.append(ChatMessage.model_construct(role="system", content=body.instructions))
        places.append("instructions")
    given = known_items(body.input)
    answered = {item.call_id for item in given if isinstance(item, CallOutputItem)}
    turns = _Turns(messages, places, answered)
    for item in earlier:
        turns.add(item, "previous_response_id")
    for number, item in enumerate(given):
        turns.add(item, f"input[{number}]")
    turns.end()
    if not messages:
        raise bad_request("input has nothing that a model could answer: give at least one message", "input")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"the conversation has more than {MAX_MESSAGES} messages", "previous_response_id" if earlier else "input"
        )
    logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    fields: dict[str, Any] = {name: getattr(body, name) for name in SharedRequest.model_fields}
    fields["context_overflow"] = _overflow(body)
    chat = ChatRequest.model_construct(
        **fields,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        thinking_budget=body.thinking_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return Translated(chat, FieldNames(_NAMES, places, _PARTS))


class _Turns:
    """Puts items together to messages: thinking, text and calls of the assistant in a row are one.

    answered: ids of calls of which there are results. A call that was cut short and that nobody carried out is left out.
    """

    def __init__(self, messages: list[ChatMessage], places: list[str], answered: Set[str]) -> None:
        self._messages = messages
        self._places = places
        self._answered = answered
        self._turn: dict[str, Any] = {}  # of the assistant
        self._place = ""

    def add(self, item: Item, place: str) -> None:
        if isinstance(item, ReasoningItem):
            if "content" in self._turn or "tool_calls" in self._turn:
                self.end()
            thoughts = self._row("reasoning_content", place)
            if thoughts == [""]:
                thoughts.clear()
            thoughts.append(text_of(item.content or item.summary))
        elif isinstance(item, CallItem):
            if item.status == INCOMPLETE and item.call_id not in self._answered:
                return
            function = MadeFunctionCall.model_construct(name=item.name, arguments=item.arguments)
            call = MadeToolCall.model_construct(id=item.call_id, function=function)
            calls = self._row("tool_calls", place)
            if len(calls) == MAX_CALLS:
                raise bad_request(f"{place} is one call more than the {MAX_CALLS} that a turn may hold", place)
            calls.append(call)
        elif isinstance(item, CallOutputItem):
            self.end()
            self._message(place, role="tool", tool_call_id=item.call_id, content=text_of(item.output))
        else:
            assert isinstance(item, MessageItem)
            if item.role != "assistant":
                self.end()
                self._message(place, role=item.role, content=text_of(item.content))
                return
            if "content" in self._turn or "tool_calls" in self._turn:
                self.end()
            self._turn["content"] = text_of(item.content)
            self._place = place

    def end(self) -> None:
        """The assistant's turn is over, if there is one."""
        turn, self._turn = self._turn, {}
        if "reasoning_content" in turn:
            turn["reasoning_content"] = "\n".join(turn["reasoning_content"])
        if turn.get("content") is None and "tool_calls" not in turn and not turn.get("reasoning_content"):
            return  # nothing, or thinking of which nothing is told
        self._message(self._place, role="assistant", **turn)

    def _row(self, name: str, place: str) -> list[Any]:
        """What stands in a row in the turn: a list to add to, as copying all of it with each part takes quadratic time."""
        self._place = place
        row: list[Any] = self._turn.setdefault(name, [])
        return row

    def _message(self, place: str, **fields: Any) -> None:
        self._messages.append(ChatMessage.model_construct(**fields))
        self._places.append(place)


def _tool(tool: Any) -> ToolDefinition:
    function = FunctionDefinition.model_construct(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition.model_construct(type="function", function=function)


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return named_choice(choice["name"])
    return allowed_choice(choice["mode"], [tool["name"] for tool in choice["tools"]])


def _format(body: ResponseRequest) -> dict[str, Any] | None:
    """A chat's `response_format`: the schema stands beside the type here, and inside `json_schema` there."""
    given = None if body.text is None else body.text.format
    if given is None or given.get("type") != "json_schema":
        return given
    kind, rest = given["type"], {name: value for name, value in given.items() if name != "type"}
    if not isinstance(rest.get("schema"), dict):
        raise bad_request("text.format of type json_schema needs a schema", "text.format", "invalid_grammar")
    return {"type": kind, "json_schema": rest}


def _overflow(body: ResponseRequest) -> Any:
    if body.truncation is None:
        return body.context_overflow
    if body.context_overflow is not None:
        raise bad_request(
            "truncation and context_overflow both say what becomes of what is too long: give one of them", "truncation"
        )
    if body.truncation == "auto":
        return "drop_turns"
    # A prompt that does not fit is refused in either case; an answer that would not, where its length was asked for.
    return "stop" if body.max_output_tokens is None else "error"
