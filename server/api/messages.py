"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.assistant_message import AnswerBlock, BlockWriter
from windlass.server.api.field_names import FieldNames, Translated
from windlass.server.app.request_body import read_body
from windlass.server.app.state import ServerState, caller_of, state_of
from windlass.server.errors import ApiError, bad_request, error_body
from windlass.server.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from windlass.server.schemas.generation import SharedRequest
from windlass.server.schemas.messages import (
    CountTokensRequest,
    InputMessage,
    MessageAnswer,
    MessageEvent,
    MessageRequest,
    MessageToolChoice,
    TextBlock,
    Thinking,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
    definitions,
    text_of,
)
from windlass.server.schemas.openapi import BODY_ERRORS, GENERATION_ERRORS, answers, body_of
from windlass.server.schemas.tools import MadeFunctionCall, MadeToolCall, whole_escapes
from windlass.server.serving.conversation import check_chat, count_chat, prepare
from windlass.server.serving.deltas import Tally
from windlass.server.serving.generation import run
from windlass.server.serving.response_format import JsonList
from windlass.server.serving.streaming import Exchange, LargeJson, StreamForm, while_connected
from windlass.server.text.reasoning import ThinkingModel
from windlass.server.text.service import Prompt

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


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(BlockWriter):
    """A content block for each block: `thinking`, `text` or `tool_use`. message: the answer's `id` and `model`."""

    keeps = False  # its last events repeat nothing

    def __init__(self, *args: Any, message: dict[str, Any]) -> None:
        super().__init__(*args)
        self._message = {"type": "message", "role": "assistant", **message}

    # ---- streams -----------------------------------------------------------------------------------------------------
    def head(self) -> bytes:
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message={**self._message, **begun})

    def opened(self, block: AnswerBlock) -> bytes:
        events = _event("content_block_start", index=block.index, content_block=_empty(block))
        return events if block.index else events + PING

    def grown(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        if block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif block.kind == "thinking":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: AnswerBlock) -> bytes:
        return _event("content_block_stop", index=block.index)

    def last_event(self) -> bytes:
        rotary = {} if self.rotary is None else {"rotary": self.rotary}
        return _event("message_delta", delta=self._ending(), usage=self._usage(), **rotary) + _event("message_stop")

    # ---- whole answers -----------------------------------------------------------------------------------------------
    def pieces(self) -> list[bytes]:
        content = [_whole(block) for block in self.blocks]
        answer = {**self._message, "content": content, **self._ending(), "usage": self._usage()}
        return [to_json(answer if self.rotary is None else {**answer, "rotary": self.rotary})]

    def _ending(self) -> dict[str, Any]:
        # What is no text is the id of a token that ends answers.
        stopped = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        reason = "stop_sequence" if stopped else _STOP_REASONS.get(self.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": self.stop_reason if stopped else None}

    def _usage(self) -> dict[str, Any]:
        """`input_tokens` are those that were not found in the cache; thinking is counted where it is told apart."""
        tally = self.tally
        thought = tally.reasoning_tokens
        details = {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}
        return {
            "input_tokens": tally.prompt_tokens - tally.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tally.cached_tokens,
            "output_tokens": tally.completion_tokens,
            **details,
        }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **fields}) + b"\n\n"


def _empty(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {**_empty(block), "text": block.text}
    if block.kind == "thinking":
        return {**_empty(block), "thinking": block.text}
    return {**_empty(block), "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object: as much of one as there is, where the answer was cut short or is no JSON."""
    try:
        found = from_json(whole_escapes(text), allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


router = APIRouter(tags=["Messages"])

MANY_MESSAGES = 500  # from which making a chat of them leaves the event loop


@router.post(
    "/v1/messages",
    openapi_extra=body_of(MessageRequest),
    responses=answers(MessageAnswer, events=MessageEvent, errors=GENERATION_ERRORS, named=True),
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's Messages API."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, MessageRequest, stall_seconds=state.settings.body_stall_seconds)
    translated = await _translated(state, body)
    with translated.names.told():
        chat = await check_chat(state, request, translated.body, arrival=arrival)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with translated.names.told():
            prompts, job = await prepare(chat)

            def make_writer(prompts: Sequence[Prompt], tally: Tally) -> MessageWriter:
                message = {"id": f"msg_{uuid.uuid4().hex}", "model": job.model_name}
                return MessageWriter(state.tokenizer, tally, job.options, job.parsing, message=message)

            await run(exchange, job, prompts, param="messages", make_writer=make_writer)

    def failure(error: ApiError) -> bytes:
        return b"event: error\ndata: " + to_json(error_body(error, request.scope)) + b"\n\n"

    return Exchange(state, work, deadline=chat.job.deadline, form=StreamForm(failure, done=b"", keep_alive=PING))


async def _translated(state: ServerState, body: MessageRequest | CountTokensRequest) -> Translated:
    made = body, state.thinking
    many = len(body.messages) > MANY_MESSAGES
    return await state.text.on_thread(chat_of_messages, *made) if many else chat_of_messages(*made)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=body_of(CountTokensRequest),
    responses=answers(TokenCount, errors=BODY_ERRORS),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens an input comes to, without generating. It needs the tokenizer only, so it works while the engine starts."""
    state = state_of(request)
    body = await read_body(request, CountTokensRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    translated = await _translated(state, body)
    with translated.names.told():
        count = await while_connected(request, count_chat(state, translated.body, caller_of(request)))
    return LargeJson(to_json({"input_tokens": count}))
