"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.assistant_message import AnswerBlock, BlockWriter
from windlass.server.api.router import BODY_ERRORS, GENERATION_ERRORS, ApiRouter, FieldNames
from windlass.server.app.request_body import read_body, report_ignored
from windlass.server.app.state import ServerState, caller_of, state_of
from windlass.server.errors import ApiError, bad_request, error_body
from windlass.server.schemas import messages as schemas
from windlass.server.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from windlass.server.schemas.generation import SharedRequest
from windlass.server.schemas.tools import (
    MadeFunctionCall,
    MadeToolCall,
    hosted_names,
    named_choice,
    replace_lone_surrogates,
)
from windlass.server.serving.generation import run_generation
from windlass.server.serving.job import GenerationJob, TokenUsage
from windlass.server.serving.prompts import check_chat, count_chat, prepare_chat
from windlass.server.serving.response_writer import JsonList
from windlass.server.serving.streaming import Exchange, LargeJsonResponse, StreamFormat, run_while_connected
from windlass.server.text.reasoning import ThinkingControl

_FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

_MESSAGE_FIELD_NAMES = {"tool_call_id": "content", "tool_calls": "content", "content": "content"}
_BILLING_HEADER = "x-anthropic-billing-header:"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

router = ApiRouter("Messages", "Anthropic's Messages API.")

MAX_MESSAGES_ON_EVENT_LOOP = 500  # larger conversations are translated in a thread


def chat_request_from_messages(
    body: schemas.MessageRequest | schemas.CountTokensRequest, model: ThinkingControl
) -> tuple[ChatRequest, FieldNames]:
    """Translate a request into a chat; raises ApiError naming the field. model: how its thinking is controlled."""
    messages: list[ChatMessage] = []
    message_paths: list[str] = []
    if body.system is not None and (system := _instructions(body.system)):
        messages.append(ChatMessage.model_construct(role="system", content=schemas.text_of(system)))
        message_paths.append("system")
    for number, message in enumerate(body.messages):
        made = _assistant_messages(message) if message.role == "assistant" else _other_messages(message, number)
        messages += made
        message_paths += [f"messages[{number}]"] * len(made)
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"the conversation has more than {MAX_MESSAGES} messages", "messages")
    fields: dict[str, Any] = {}
    if isinstance(body, schemas.MessageRequest):
        fields = {name: getattr(body, name) for name in SharedRequest.model_fields}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    output = body.output_config
    effort, budget = _effort_and_budget(body.thinking)
    if not model.separates_thinking:
        budget = None  # see `ignored_fields`
    if output is not None and output.effort is not None:
        # Anthropic's clients send an effort with every request, as a hint.
        effort = output.effort if effort is None else effort
    choice = body.tool_choice
    continues_last = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = ChatRequest.model_construct(
        **{"model": body.model, **fields},
        messages=messages,
        tools=schemas.function_definitions(body.tools or ()) or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None if output is None or output.format is None else _response_format(output.format),
        reasoning_effort=effort,
        thinking_budget=budget,
        chat_template_kwargs=_template_variables(body, model.variables_to_enable()),
        continue_final_message=True if continues_last else None,
        add_generation_prompt=False if continues_last else None,
    )
    names = {**_FIELD_NAMES, "thinking_budget": "thinking", "reasoning_effort": _effort_field(body)}
    return chat, FieldNames(names, message_paths, _MESSAGE_FIELD_NAMES)


def _effort_field(body: schemas.MessageRequest | schemas.CountTokensRequest) -> str:
    """The field that sets the effort of the chat."""
    by_config = body.output_config is not None and body.output_config.effort is not None
    disabled = body.thinking is not None and body.thinking.type == "disabled"
    return "output_config.effort" if by_config and not disabled else "thinking"


def ignored_fields(body: schemas.MessageRequest, model: ThinkingControl) -> Iterator[str]:
    """Fields without effect on this model, and hosted tools.

    Clients that enable thinking do so for every model, also for those whose thinking cannot be limited.
    """
    if body.thinking is not None and body.thinking.budget_tokens is not None and not model.separates_thinking:
        yield "thinking.budget_tokens"
    yield from hosted_names(body.tools or ())


def _instructions(blocks: Sequence[Any]) -> list[schemas.TextBlock]:
    """The blocks of a system prompt without Claude Code's billing header.

    It changes with every conversation or request, so that no prefix after it would be found in the cache.
    """
    kept = []
    for block in blocks:
        text = block.text
        if text.startswith(_BILLING_HEADER):
            text = text.partition("\n")[2].lstrip("\n")
        if text or not block.text.startswith(_BILLING_HEADER):
            kept.append(block.model_copy(update={"text": text}))
    return kept


def _assistant_messages(message: schemas.InputMessage) -> list[ChatMessage]:
    text_blocks = [block for block in message.content if isinstance(block, schemas.TextBlock)]
    thinking_text = "\n".join(block.thinking for block in message.content if isinstance(block, schemas.ThinkingBlock))
    calls = [
        MadeToolCall.model_construct(
            id=block.id, function=MadeFunctionCall.model_construct(name=block.name, arguments=block.input)
        )
        for block in message.content
        if isinstance(block, schemas.ToolUseBlock)
    ]
    fields: dict[str, Any] = {"content": schemas.text_of(text_blocks) if text_blocks else None if calls else ""}
    if thinking_text:
        fields["reasoning_content"] = thinking_text
    if calls:
        fields["tool_calls"] = calls
    return [ChatMessage.model_construct(role="assistant", **fields)]


def _other_messages(message: schemas.InputMessage, number: int) -> list[ChatMessage]:
    """One message for each result of a call, and one for the text after them."""
    made: list[ChatMessage] = []
    texts: list[schemas.TextBlock] = []
    for place, block in enumerate(message.content):
        if isinstance(block, schemas.TextBlock):
            texts.append(block)
        elif isinstance(block, schemas.ToolResultBlock) and message.role == "user":
            if texts:
                raise bad_request(
                    "results of calls must precede the text of their message: move this tool_result before the text blocks",
                    f"messages[{number}].content[{place}]",
                )
            result = schemas.text_of(block.content or ())
            text = f"Error: {result}" if block.is_error else result
            made.append(ChatMessage.model_construct(role="tool", tool_call_id=block.tool_use_id, content=text))
        else:
            raise bad_request(
                f"a message of the {message.role} cannot contain a block of type {block.type!r}",
                f"messages[{number}].content[{place}].type",
            )
    if texts or not made:
        made.append(ChatMessage.model_construct(role=message.role, content=schemas.text_of(texts)))
    return made


def _tool_choice(choice: schemas.MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request(
            "tool_choice.name is required for type 'tool', and not allowed for other types", "tool_choice.name"
        )
    if choice.name is not None:
        return named_choice(choice.name)
    return "required" if choice.type == "any" else choice.type


def _effort_and_budget(thinking: schemas.Thinking | None) -> tuple[Any, int | None]:
    """Effort and budget of a chat."""
    if thinking is None:
        return None, None
    if thinking.type == "disabled":
        return "none", None
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise bad_request("thinking of type enabled needs budget_tokens", "thinking.budget_tokens", "missing_field")
    return None, thinking.budget_tokens


def _template_variables(
    body: schemas.MessageRequest | schemas.CountTokensRequest, thinking_variables: Mapping[str, Any]
) -> dict[str, Any] | None:
    if body.thinking is None or body.thinking.type == "disabled" or not thinking_variables:
        return body.chat_template_kwargs
    return {**thinking_variables, **(body.chat_template_kwargs or {})}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}


class MessageWriter(BlockWriter):
    """Writes a content block for each block: `thinking`, `text` or `tool_use`."""

    collects = False  # no event repeats earlier text

    def __init__(self, job: GenerationJob, token_usage: TokenUsage) -> None:
        super().__init__(job, token_usage)
        message_id = f"msg_{uuid.uuid4().hex}"
        self._message = {"type": "message", "role": "assistant", "id": message_id, "model": job.model_name}

    # ---- streams -----------------------------------------------------------------------------------------------------
    def opening_events(self) -> bytes:
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message={**self._message, **begun})

    def block_start_events(self, block: AnswerBlock) -> bytes:
        events = _event("content_block_start", index=block.index, content_block=_empty_block(block))
        return events if block.index else events + PING

    def block_delta_events(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        if block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif block.kind == "thinking":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def block_stop_events(self, block: AnswerBlock) -> bytes:
        return _event("content_block_stop", index=block.index)

    def last_event(self) -> bytes:
        rotary = {} if self.rotary is None else {"rotary": self.rotary}
        return _event("message_delta", delta=self._stop_fields(), usage=self._usage(), **rotary) + _event(
            "message_stop"
        )

    # ---- complete answers -----------------------------------------------------------------------------------------------
    def pieces(self) -> list[bytes]:
        content = [_complete_block(block) for block in self.blocks]
        answer = {**self._message, "content": content, **self._stop_fields(), "usage": self._usage()}
        return [to_json(answer if self.rotary is None else {**answer, "rotary": self.rotary})]

    def _stop_fields(self) -> dict[str, Any]:
        # A stop reason other than text is the id of an end-of-sequence token.
        stopped = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        reason = "stop_sequence" if stopped else _STOP_REASONS.get(self.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": self.stop_reason if stopped else None}

    def _usage(self) -> dict[str, Any]:
        """Token counts. `input_tokens` are those that were not found in the cache."""
        token_usage = self.token_usage
        thinking_tokens = token_usage.reasoning_tokens
        details = {} if thinking_tokens is None else {"output_tokens_details": {"thinking_tokens": thinking_tokens}}
        return {
            "input_tokens": token_usage.prompt_tokens - token_usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": token_usage.cached_tokens,
            "output_tokens": token_usage.completion_tokens,
            **details,
        }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **fields}) + b"\n\n"


def _empty_block(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _complete_block(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {**_empty_block(block), "text": block.text}
    if block.kind == "thinking":
        return {**_empty_block(block), "thinking": block.text}
    return {**_empty_block(block), "input": _arguments_object(block.text)}


def _arguments_object(text: str) -> dict[str, Any]:
    """Arguments of a call as an object, which is incomplete if the answer was cut or is not valid JSON."""
    try:
        found = from_json(replace_lone_surrogates(text), allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_QUESTION = {"messages": [{"role": "user", "content": "Where does the river begin?"}]}

_EXAMPLE_USAGE = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 2,
}


@router.endpoint(
    "POST",
    "/v1/messages",
    body=schemas.MessageRequest,
    response=schemas.MessageAnswer,
    events=schemas.MessageEvent,
    named_events=True,
    errors=GENERATION_ERRORS,
    examples={
        "plain": ("The next turn", {**_QUESTION, "max_tokens": 200}),
        "blocks": (
            "Content blocks",
            {
                "system": "Answer in one word.",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Where does the river begin?"}]}],
                "max_tokens": 200,
                "temperature": 0,
            },
        ),
        "streamed": ("Streamed", {**_QUESTION, "max_tokens": 200, "stream": True}),
    },
    stream_examples=[
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "demo",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_EXAMPLE_USAGE, "output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Far."}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": _EXAMPLE_USAGE,
        },
        {"type": "message_stop"},
    ],
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's Messages API."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, schemas.MessageRequest)
    chat_request, names = await _translate(state, body)
    report_ignored(request, *ignored_fields(body, state.thinking))
    with names.renamed_errors():
        chat = await check_chat(request, chat_request, arrival=arrival, effort_field=_effort_field(body))

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with names.renamed_errors():
            prompts, job = await prepare_chat(chat)
            await run_generation(exchange, job, prompts, param="messages", make_writer=partial(MessageWriter, job))

    def failure(error: ApiError) -> bytes:
        return b"event: error\ndata: " + to_json(error_body(error, request.scope)) + b"\n\n"

    return Exchange(
        state, work, deadline=chat.deadline, stream_format=StreamFormat(failure, done=b"", keep_alive=lambda: PING)
    )


async def _translate(
    state: ServerState, body: schemas.MessageRequest | schemas.CountTokensRequest
) -> tuple[ChatRequest, FieldNames]:
    made = body, state.thinking
    large = len(body.messages) > MAX_MESSAGES_ON_EVENT_LOOP
    return (
        await state.text.run_in_thread(chat_request_from_messages, *made)
        if large
        else chat_request_from_messages(*made)
    )


@router.endpoint(
    "POST",
    "/v1/messages/count_tokens",
    body=schemas.CountTokensRequest,
    response=schemas.TokenCount,
    errors=BODY_ERRORS,
    examples={"plain": ("A conversation", _QUESTION)},
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of an input without generating. Works while the engine starts, as only the tokenizer is needed."""
    state = state_of(request)
    body = await read_body(request, schemas.CountTokensRequest)
    state.check_model(body.model)
    chat_request, names = await _translate(state, body)
    with names.renamed_errors():
        count = await run_while_connected(request, count_chat(state, chat_request, caller_of(request)))
    return LargeJsonResponse(schemas.TokenCount(input_tokens=count).json_bytes())
