"""From a body of `/v1/messages` to that of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.server.errors import bad_request
from windlass.server.generation.translation.names import FieldNames, Translated
from windlass.server.protocol.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from windlass.server.protocol.generation_request import SharedRequest
from windlass.server.protocol.messages.blocks import (
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from windlass.server.protocol.messages.request import (
    CountTokensRequest,
    MessageRequest,
    MessageToolChoice,
    Thinking,
    definitions,
)
from windlass.server.protocol.tools import MadeFunctionCall, MadeToolCall
from windlass.server.text.parsing.reasoning.model import ThinkingModel

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_THINKING_NAMES = {"reasoning_effort": "thinking", "thinking_budget": "thinking"}
_PARTS = {"tool_call_id": "content", "tool_calls": "content", "content": "content"}


def chat_of_messages(body: MessageRequest | CountTokensRequest, model: ThinkingModel) -> Translated:
    """The chat that a body of messages asks for; raises ApiError naming the field. model: how it can be told to think."""
    messages: list[ChatMessage] = []
    places: list[str] = []
    if body.system is not None:
        messages.append(ChatMessage.model_construct(role="system", content=text_of(body.system)))
        places.append("system")
    for number, message in enumerate(body.messages):
        made = _assistant(message) if message.role == "assistant" else _others(message, number)
        messages += made
        places += [f"messages[{number}]"] * len(made)
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"the conversation has more than {MAX_MESSAGES} messages", "messages")
    fields: dict[str, Any] = {}
    if isinstance(body, MessageRequest):
        fields = {name: getattr(body, name) for name in SharedRequest.model_fields}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    output = body.output_config
    effort, budget = _thinking(body.thinking)
    if not model.told_apart:
        # Clients that have thinking switched on for one model have it for any: as much as it likes.
        budget = None
    if output is not None and output.effort is not None:
        # Anthropic's clients send one with every request, whatever the model, as a hint.
        effort = model.nearest_effort(output.effort) if effort is None else effort
    choice = body.tool_choice
    goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = ChatRequest.model_construct(
        **{"model": body.model, **fields},
        messages=messages,
        tools=None if body.tools is None else definitions(body.tools),
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None if output is None or output.format is None else _form(output.format),
        reasoning_effort=effort,
        thinking_budget=budget,
        chat_template_kwargs=_variables(body, model.switched_on()),
        continue_final_message=True if goes_on else None,
        add_generation_prompt=False if goes_on else None,
    )
    by_config = output is not None and output.effort is not None and body.thinking is None
    names = {**_NAMES, **_THINKING_NAMES, **({"reasoning_effort": "output_config.effort"} if by_config else {})}
    return Translated(chat, FieldNames(names, places, _PARTS))


def _assistant(message: InputMessage) -> list[ChatMessage]:
    said = [block for block in message.content if isinstance(block, TextBlock)]
    thought = "\n".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    calls = [
        MadeToolCall.model_construct(
            id=block.id, function=MadeFunctionCall.model_construct(name=block.name, arguments=block.input)
        )
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    fields: dict[str, Any] = {"content": text_of(said) if said else None if calls else ""}
    if thought:
        fields["reasoning_content"] = thought
    if calls:
        fields["tool_calls"] = calls
    return [ChatMessage.model_construct(role="assistant", **fields)]


def _others(message: InputMessage, number: int) -> list[ChatMessage]:
    """A message for each result of a call, and one for the text behind them."""
    made: list[ChatMessage] = []
    texts: list[TextBlock] = []
    for place, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            if texts:
                raise bad_request(
                    "results of calls come before the text of their message: put this tool_result before the text blocks",
                    f"messages[{number}].content[{place}]",
                )
            result = text_of(block.content or ())
            told = f"Error: {result}" if block.is_error else result
            made.append(ChatMessage.model_construct(role="tool", tool_call_id=block.tool_use_id, content=told))
        else:
            raise bad_request(
                f"a message of the {message.role} holds no block of type {block.type!r}",
                f"messages[{number}].content[{place}].type",
            )
    if texts or not made:
        made.append(ChatMessage.model_construct(role=message.role, content=text_of(texts)))
    return made


def _choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request("tool_choice.name goes with the type 'tool', and has to be there", "tool_choice.name")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _thinking(thinking: Thinking | None) -> tuple[Any, int | None]:
    """A chat's effort and budget."""
    if thinking is None:
        return None, None
    if thinking.type == "disabled":
        return "none", None
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise bad_request("thinking of type enabled needs budget_tokens", "thinking.budget_tokens", "missing_field")
    return None, thinking.budget_tokens


def _variables(body: MessageRequest | CountTokensRequest, thinks: Mapping[str, Any]) -> dict[str, Any] | None:
    if body.thinking is None or body.thinking.type == "disabled" or not thinks:
        return body.chat_template_kwargs
    return {**thinks, **(body.chat_template_kwargs or {})}


def _form(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}
