"""`/v1/responses`: OpenAI's Responses API, with stored responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence, Set
from typing import Annotated, Any

from fastapi import Path
from pydantic_core import PydanticCustomError, from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.request import SamplingParams
from windlass.server.api.assistant_message import AnswerBlock, BlockWriter
from windlass.server.api.router import BODY_ERRORS, GENERATION_ERRORS, ApiRouter, FieldNames, query_parameter
from windlass.server.app.request_body import read_body, report_ignored
from windlass.server.app.response_store import ResponseStore, StoredResponse, items_until
from windlass.server.app.state import ServerState, caller_of, owner_of, state_of
from windlass.server.errors import ApiError, bad_request
from windlass.server.schemas import responses as schemas
from windlass.server.schemas.chat import MAX_CALLS, MAX_MESSAGES, ChatMessage, ChatRequest
from windlass.server.schemas.generation import SharedRequest
from windlass.server.schemas.tools import (
    ALLOWED_TOOLS,
    HostedTool,
    MadeFunctionCall,
    MadeToolCall,
    allowed_choice,
    hosted_names,
    named_choice,
    replace_lone_surrogates,
)
from windlass.server.serving.generation import run_generation
from windlass.server.serving.job import GenerationJob, TokenUsage
from windlass.server.serving.prompts import check_chat, count_chat, prepare_chat
from windlass.server.serving.response_writer import JsonList, encode, encode_pieces, usage_object
from windlass.server.serving.streaming import KEEP_ALIVE, Exchange, LargeJsonResponse, StreamFormat, run_while_connected

_FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

_MESSAGE_FIELD_NAMES = {"tool_call_id": "call_id", "tool_calls": "call_id", "content": "content"}
_OUTPUT_ID_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}

_DELTA_EVENTS = {
    "thinking": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}

# OpenAI's error codes of responses, by status.
_FAILURE_CODES = {429: "rate_limit_exceeded"}
_ID_SUFFIX_LENGTH = 32  # characters after the prefix of an item's id that are also in its response's id

router = ApiRouter("Responses", "OpenAI's Responses API, with stored responses.")

MAX_ITEMS_ON_EVENT_LOOP = 500  # larger conversations are translated in a thread
ITEM_BYTES = 1024  # memory of an item in addition to its text
_INPUT_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def chat_request_from_response(
    body: schemas.ResponseRequest, earlier: Sequence[schemas.Item]
) -> tuple[ChatRequest, FieldNames]:
    """Translate a request into a chat; raises ApiError naming the field. earlier: items of the continued conversation."""
    messages: list[ChatMessage] = []
    message_paths: list[str] = []
    if body.instructions is not None:
        messages.append(ChatMessage.model_construct(role="system", content=body.instructions))
        message_paths.append("instructions")
    items = schemas.as_items(body.input)
    outputs = {item.call_id for item in items if isinstance(item, schemas.CallOutputItem)}
    builder = _MessagesBuilder(messages, message_paths, outputs)
    for earlier_item in earlier:
        builder.add(earlier_item, "previous_response_id")
    for number, item in enumerate(items):
        if not isinstance(item, schemas.AdditionalTools):
            builder.add(item, f"input[{number}]")
    builder.end()
    if not messages:
        raise bad_request("input has no message to answer: add at least one", "input")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(
            f"the conversation has more than {MAX_MESSAGES} messages", "previous_response_id" if earlier else "input"
        )
    logprobs = bool(body.top_logprobs) or schemas.LOGPROBS in (body.include or ())
    fields: dict[str, Any] = {name: getattr(body, name) for name in SharedRequest.model_fields}
    fields["context_overflow"] = _context_overflow(body)
    chat = ChatRequest.model_construct(
        **fields,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=[tool.definition for tool in schemas.offered_tools(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        thinking_budget=body.thinking_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat, FieldNames(_FIELD_NAMES, message_paths, _MESSAGE_FIELD_NAMES)


class _MessagesBuilder:
    """Combines items into messages: consecutive thinking, text and calls of the assistant become one message.

    outputs: ids of calls whose results are known. Incomplete calls without a result are dropped.
    """

    def __init__(self, messages: list[ChatMessage], message_paths: list[str], outputs: Set[str]) -> None:
        self._messages = messages
        self._message_paths = message_paths
        self._answered = outputs
        self._assistant_fields: dict[str, Any] = {}  # of the current turn
        self._path = ""

    def add(self, item: schemas.Item, path: str) -> None:
        if isinstance(item, schemas.ReasoningItem):
            if "content" in self._assistant_fields or "tool_calls" in self._assistant_fields:
                self.end()
            thinking = self._list_field("reasoning_content", path)
            if thinking == [""]:
                thinking.clear()
            thinking.append(schemas.text_of(item.content or item.summary))
        elif isinstance(item, schemas.CallItem | schemas.CustomCallItem):
            if item.status == schemas.INCOMPLETE and item.call_id not in self._answered:
                return
            function = MadeFunctionCall.model_construct(name=item.offered_name, arguments=item.arguments)
            call = MadeToolCall.model_construct(id=item.call_id, function=function)
            calls = self._list_field("tool_calls", path)
            if len(calls) == MAX_CALLS:
                raise bad_request(f"{path} exceeds the limit of {MAX_CALLS} calls per turn", path)
            calls.append(call)
        elif isinstance(item, schemas.CallOutputItem):
            self.end()
            self._message(path, role="tool", tool_call_id=item.call_id, content=schemas.text_of(item.output))
        else:
            assert isinstance(item, schemas.MessageItem)
            if item.role != "assistant":
                self.end()
                self._message(path, role=item.role, content=schemas.text_of(item.content))
                return
            if "content" in self._assistant_fields or "tool_calls" in self._assistant_fields:
                self.end()
            self._assistant_fields["content"] = schemas.text_of(item.content)
            self._path = path

    def end(self) -> None:
        """End the assistant's turn, if there is one."""
        assistant, self._assistant_fields = self._assistant_fields, {}
        if "reasoning_content" in assistant:
            assistant["reasoning_content"] = "\n".join(assistant["reasoning_content"])
        if (
            assistant.get("content") is None
            and "tool_calls" not in assistant
            and not assistant.get("reasoning_content")
        ):
            return  # no fields, or only empty thinking
        self._message(self._path, role="assistant", **assistant)

    def _list_field(self, name: str, path: str) -> list[Any]:
        """The list of a field of the turn, to append to: repeated copying would take quadratic time."""
        self._path = path
        values: list[Any] = self._assistant_fields.setdefault(name, [])
        return values

    def _message(self, path: str, **fields: Any) -> None:
        self._messages.append(ChatMessage.model_construct(**fields))
        self._message_paths.append(path)


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] != ALLOWED_TOOLS:
        return named_choice(_offered_name(choice))
    return allowed_choice(choice["mode"], list(map(_offered_name, choice["tools"])))


def _offered_name(choice: dict[str, Any]) -> str:
    return schemas.offered_name(choice.get("namespace"), choice["name"])


def _response_format(body: schemas.ResponseRequest) -> dict[str, Any] | None:
    """The `response_format` of a chat, which has the schema in `json_schema`."""
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    kind, rest = wanted["type"], {name: value for name, value in wanted.items() if name != "type"}
    if not isinstance(rest.get("schema"), dict):
        raise bad_request("text.format of type json_schema needs a schema", "text.format", "invalid_grammar")
    return {"type": kind, "json_schema": rest}


def _context_overflow(body: schemas.ResponseRequest) -> Any:
    if body.truncation is None:
        return body.context_overflow
    if body.context_overflow is not None:
        raise bad_request("truncation and context_overflow are alternatives: remove one of them", "truncation")
    if body.truncation == "auto":
        return "drop_turns"
    # A prompt that does not fit is refused in both cases; an answer only if its length was given.
    return "stop" if body.max_output_tokens is None else "error"


class ResponseWriter(BlockWriter):
    """Writes an item for each block: `reasoning`, `message`, `function_call` or `custom_tool_call`.

    response: from `new_response`. tools: those of the request. store_response: receives the JSON and the items of the finished
    response, before its last event or its answer is sent.
    """

    def __init__(
        self,
        job: GenerationJob,
        token_usage: TokenUsage,
        *,
        response: dict[str, Any],
        tools: Sequence[schemas.OfferedTool] = (),
        store_response: Callable[[bytes, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        super().__init__(job, token_usage)
        self._response = response
        self._tools = {tool.definition.function.name: tool for tool in tools}
        self._id_suffix = str(response["id"]).removeprefix("resp_")
        self._store_response = store_response
        self._sequence_number = 0

    # ---- streams -----------------------------------------------------------------------------------------------------
    def opening_events(self) -> bytes:
        response = {**self._response, "status": "in_progress"}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def keep_alive(self) -> bytes:
        """Before the first item an event, as clients such as Codex leave a stream that has only comments for minutes."""
        if not self.started:
            self.started = True
            return self.opening_events()
        if self.blocks:
            return KEEP_ALIVE
        return self._event("response.in_progress", response={**self._response, "status": "in_progress"})

    def block_start_events(self, block: AnswerBlock) -> bytes:
        item = self._item(block, "in_progress", empty=True)
        event = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return event
        return event + self._part_event(block, "response.content_part.added", part=_content_part(block, "", JsonList()))

    def block_delta_events(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        if block.kind == "text":
            return self._part_event(block, _DELTA_EVENTS["text"], delta=text, logprobs=logprobs or [])
        if block.kind == "thinking":
            return self._part_event(block, _DELTA_EVENTS["thinking"], delta=text)
        if self._is_custom(block):
            return b""  # the input is known only once its JSON text is complete
        return self._item_event(block, _DELTA_EVENTS["call"], delta=text)

    def block_stop_events(self, block: AnswerBlock) -> bytes:
        text = block.text
        if self._is_custom(block):
            given = _custom_input(text)
            events = self._item_event(block, "response.custom_tool_call_input.delta", delta=given)
            events += self._item_event(block, "response.custom_tool_call_input.done", input=given)
        elif block.kind == "call":
            name = self._call_fields(block)["name"]
            events = self._item_event(block, "response.function_call_arguments.done", name=name, arguments=text or "{}")
        else:
            logprobs = block.logprobs or JsonList()
            if block.kind == "text":
                events = self._part_event(block, "response.output_text.done", text=text, logprobs=logprobs)
            else:
                events = self._part_event(block, "response.reasoning_text.done", text=text)
            events += self._part_event(block, "response.content_part.done", part=_content_part(block, text, logprobs))
        item = self._item(block, _item_status(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_event(self) -> bytes:
        answer = self._answer()
        return self._event(f"response.{answer['status']}", response=self._stored(answer))

    def failure(self, error: ApiError) -> bytes:
        """The event of a response that fails after its start."""
        detail = {
            "code": _FAILURE_CODES.get(error.status, "server_error"),
            "message": error.message,
            "param": error.param,
        }
        output = [
            self._item(block, "incomplete" if block is self._open_block else "completed") for block in self.blocks
        ]
        failed = {**self._response, "status": "failed", "error": {**detail, "type": error.type}, "output": output}
        return self._event("response.failed", response=failed)

    def _item_event(self, block: AnswerBlock, event: str, /, **fields: Any) -> bytes:
        return self._event(event, item_id=self._id(block), output_index=block.index, **fields)

    def _part_event(self, block: AnswerBlock, event: str, /, **fields: Any) -> bytes:
        return self._item_event(block, event, content_index=0, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        data = {"type": event, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + event.encode() + b"\ndata: " + encode(data) + b"\n\n"

    # ---- complete answers -----------------------------------------------------------------------------------------------
    def pieces(self) -> list[bytes]:
        return list(encode_pieces(self._stored(self._answer())))

    def _answer(self) -> dict[str, Any]:
        usage, incomplete = usage_object(self.token_usage), self.finish_reason == "length"
        answer = {
            **self._response,
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "completed_at": None if incomplete else int(time.time()),
            "output": [self._item(block, _item_status(block)) for block in self.blocks],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                # Writing to the prefix cache has no price, so no tokens are counted.
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.token_usage.reasoning_tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        return answer if self.rotary is None else {**answer, "rotary": self.rotary}

    def _stored(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self._store_response is not None:
            items = [self._item(block, _item_status(block), without_logprobs=True) for block in self.blocks]
            self._store_response(encode(answer), items)
        return answer

    # ---- items -------------------------------------------------------------------------------------------------------
    def _id(self, block: AnswerBlock) -> str:
        prefix = "ctc" if self._is_custom(block) else _OUTPUT_ID_PREFIXES[block.kind]
        return f"{prefix}_{self._id_suffix}{block.index:04x}"

    def _is_custom(self, block: AnswerBlock) -> bool:
        return block.kind == "call" and block.name in self._tools and self._tools[block.name].is_custom

    def _call_fields(self, block: AnswerBlock) -> dict[str, Any]:
        """Id, name and namespace of a call."""
        tool = self._tools.get(block.name)
        if tool is None or tool.namespace is None:
            return {"call_id": block.call_id, "name": block.name if tool is None else tool.name}
        return {"call_id": block.call_id, "name": tool.name, "namespace": tool.namespace}

    def _item(
        self, block: AnswerBlock, status: str, *, empty: bool = False, without_logprobs: bool = False
    ) -> dict[str, Any]:
        """An item. empty: as at its start. without_logprobs: as later requests may send it back."""
        item: dict[str, Any] = {"id": self._id(block)}
        text = "" if empty else block.text
        if block.kind == "call":
            call = {"status": status, **self._call_fields(block)}
            if self._is_custom(block):
                return {**item, "type": "custom_tool_call", **call, "input": "" if empty else _custom_input(text)}
            # A call without arguments gets an empty object, as arguments are the JSON text of an object.
            arguments = text if empty or status == "incomplete" else text or "{}"
            return {**item, "type": "function_call", **call, "arguments": arguments}
        logprobs = JsonList() if without_logprobs or block.logprobs is None else block.logprobs
        parts = [] if empty else [_content_part(block, text, logprobs)]
        if block.kind == "thinking":
            return {
                **item,
                "type": "reasoning",
                "summary": [],
                "content": parts,
                "encrypted_content": None,
                "status": status,
            }
        return {**item, "type": "message", "status": status, "role": "assistant", "content": parts}


def _content_part(block: AnswerBlock, text: str, logprobs: JsonList) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _custom_input(arguments: str) -> str:
    """The input of a custom tool, from the JSON text of the function's arguments; that text itself if it has another form."""
    try:
        found = from_json(replace_lone_surrogates(arguments), allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return arguments
    given = (
        found.get(schemas.CUSTOM_INPUT, "")
        if isinstance(found, dict) and found.keys() <= {schemas.CUSTOM_INPUT}
        else None
    )
    return given if isinstance(given, str) else arguments


def _item_status(block: AnswerBlock) -> str:
    return "incomplete" if block.incomplete else "completed"


def new_response(
    body: schemas.ResponseRequest, *, model: str, sampling: SamplingParams, drops_turns: bool
) -> dict[str, Any]:
    """A response without output: the values of the request, or the defaults in effect."""
    text, reasoning = body.text, body.reasoning
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": (None if text is None else text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "auto" if drops_turns else "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _shown_tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, schemas.ToolNamespace):
        return {**tool.model_dump(exclude_none=True, exclude={"tools"}), "tools": list(map(_shown_tool, tool.tools))}
    shown: dict[str, Any] = tool.model_dump(exclude_none=True, exclude={"defer_loading"})
    return {"parameters": None, "strict": None, **shown} if isinstance(tool, schemas.FunctionTool) else shown


def early_failure_event(error: ApiError) -> bytes:
    """The event of a stream that fails before its response was created."""
    data = {
        "type": "error",
        "sequence_number": 0,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    return b"event: error\ndata: " + to_json(data) + b"\n\n"


def resolve_references(body: schemas.ResponseRequest, responses: ResponseStore, owner: str) -> None:
    """Replace references in the input by the items that they name, in place; raises ApiError for unknown ones.

    Each item can be referenced once, and each response is searched once, so the work is bounded by the stored items.
    """
    found: dict[str, dict[str | None, schemas.Item]] = {}  # by response id and item id
    named: set[str] = set()
    for number, item in enumerate(body.input):
        if not isinstance(item, schemas.ItemReference):
            continue
        param, shown = f"input[{number}].id", item.id[:64]
        if item.id in named:
            raise bad_request(f"{param} references {shown!r} again: reference each item once", param)
        named.add(item.id)
        response_id = "resp_" + item.id.partition("_")[2][:_ID_SUFFIX_LENGTH]
        if response_id not in found:
            stored = responses.get(response_id, owner)
            items = () if stored is None else (*stored.inputs.items, *stored.outputs.items)
            found[response_id] = {each.id: each for each in items}
        item_found = found[response_id].get(item.id)
        if item_found is None:
            raise ApiError(
                404,
                f"there is no item {shown!r}: the oldest responses are removed with their items, and incomplete calls and "
                "items of responses with store: false are not stored: send the item itself",
                param=param,
                code="item_not_found",
            )
        body.input[number] = item_found.model_copy()  # its id may change


def add_tools(body: schemas.ResponseRequest) -> None:
    """Add the tools of `additional_tools` items to those of the request, in place; raises ApiError if they conflict."""
    added = [tool for item in body.input if isinstance(item, schemas.AdditionalTools) for tool in item.tools]
    if added:
        try:
            body.tools = schemas.check_tools([*(body.tools or ()), *added])
        except PydanticCustomError as error:
            raise bad_request(f"tools with those of additional_tools items {error.message()}", "tools") from None


_QUESTION = {"input": "Where does the river begin?"}
_EXAMPLE_PLACE = {"item_id": "msg_10000", "output_index": 0, "content_index": 0}


@router.endpoint(
    "POST",
    "/v1/responses",
    body=schemas.ResponseRequest,
    response=schemas.ResponseAnswer,
    events=schemas.ResponseEvent,
    named_events=True,
    errors=GENERATION_ERRORS,
    links={
        "get_response": "Read the response again.",
        "list_input_items": "List its input.",
        "delete_response": "Delete it.",
    },
    examples={
        "plain": ("A text", {**_QUESTION, "max_output_tokens": 200}),
        "items": (
            "Items",
            {
                "instructions": "Answer in one word.",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Where does the river begin?"}]}],
                "max_output_tokens": 200,
                "store": False,
            },
        ),
        "streamed": ("Streamed", {**_QUESTION, "max_output_tokens": 200, "stream": True}),
    },
    stream_examples=[
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            **_EXAMPLE_PLACE,
            "delta": "Far.",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 5,
            **_EXAMPLE_PLACE,
            "text": "Far.",
            "logprobs": [],
        },
    ],
)
async def create_response(request: Request) -> Response:
    """Answer an input, or continue the conversation of an earlier response."""
    arrival = time.monotonic()
    state, owner = state_of(request), owner_of(request)
    body = await read_body(request, schemas.ResponseRequest)
    previous = _previous_response(state, body, owner)
    chat_request, names = await _translate(state, body, owner, previous)
    report_ignored(request, *hosted_names(body.tools or ()))
    with names.renamed_errors():
        chat = await check_chat(request, chat_request, arrival=arrival, effort_field="reasoning.effort")
    writers: list[ResponseWriter] = []  # one, after it was created

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with names.renamed_errors():
            prompts, job = await prepare_chat(chat)
            response = new_response(
                body, model=job.model_name, sampling=job.sampling, drops_turns=job.overflow == "drop_turns"
            )

            def store_response(answer: bytes, output: list[dict[str, Any]]) -> None:
                _store(state, owner, str(response["id"]), body, previous, answer, output)

            def make_writer(token_usage: TokenUsage) -> ResponseWriter:
                store = None if body.store is False else store_response
                tools = schemas.offered_tools(body.tools or ())
                writers.append(ResponseWriter(job, token_usage, response=response, tools=tools, store_response=store))
                return writers[0]

            await run_generation(exchange, job, prompts, param="messages", make_writer=make_writer)

    def failure(error: ApiError) -> bytes:
        return writers[0].failure(error) if writers and writers[0].started else early_failure_event(error)

    def keep_alive() -> bytes:
        return writers[0].keep_alive() if writers else KEEP_ALIVE

    stream_format = StreamFormat(failure, done=b"", keep_alive=keep_alive)
    return Exchange(state, work, deadline=chat.deadline, stream_format=stream_format)


@router.endpoint(
    "POST",
    "/v1/responses/input_tokens",
    body=schemas.CountInputRequest,
    response=schemas.InputTokens,
    errors=BODY_ERRORS,
    examples={"plain": ("A text", _QUESTION)},
)
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of an input without generating. Works while the engine starts, as only the tokenizer is needed."""
    state, owner = state_of(request), owner_of(request)
    body = await read_body(request, schemas.CountInputRequest)
    state.check_model(body.model)
    chat_request, names = await _translate(state, body, owner, _previous_response(state, body, owner))
    with names.renamed_errors():
        count = await run_while_connected(request, count_chat(state, chat_request, caller_of(request)))
    return LargeJsonResponse(schemas.InputTokens(object="response.input_tokens", input_tokens=count).json_bytes())


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Refuse the operation, whose path would otherwise match a response id."""
    raise ApiError(
        404,
        "conversations cannot be compacted: send the turns that matter, or continue from previous_response_id with "
        "truncation 'auto' or context_overflow",
    )


async def _translate(
    state: ServerState, body: schemas.ResponseRequest, owner: str, previous: StoredResponse | None
) -> tuple[ChatRequest, FieldNames]:
    """Translate the body into a chat, after its references have been replaced."""
    earlier: list[schemas.Item] = [] if previous is None else items_until(previous.outputs)

    def translate() -> tuple[ChatRequest, FieldNames]:
        add_tools(body)
        resolve_references(body, state.responses, owner)
        return chat_request_from_response(body, earlier)

    large = len(earlier) + len(body.input) > MAX_ITEMS_ON_EVENT_LOOP
    return await state.text.run_in_thread(translate) if large else translate()


def _previous_response(state: ServerState, body: schemas.ResponseRequest, owner: str) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    return _stored_response(state, body.previous_response_id, owner, param="previous_response_id")


def _stored_response(state: ServerState, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
    stored = state.responses.get(response_id, owner)
    if stored is None:
        raise ApiError(
            404,
            f"there is no response {response_id[:64]!r}: responses are stored in memory, the oldest are removed, and those "
            "with store: false, or of conversations larger than response-store, are not stored",
            param=param,
            code="previous_response_not_found" if param else "response_not_found",
        )
    return stored


def _store(
    state: ServerState,
    owner: str,
    response_id: str,
    body: schemas.ResponseRequest,
    previous: StoredResponse | None,
    answer: bytes,
    output: list[dict[str, Any]],
) -> None:
    inputs = [item for item in schemas.as_items(body.input) if not isinstance(item, schemas.AdditionalTools)]
    outputs = schemas.input_items_of_output(output)
    # Pages begin after an id, so ids must be unique: a repeated one, such as that of an output item, would lead back.
    taken = {item.id for item in ([] if previous is None else items_until(previous.outputs))}
    for number, item in enumerate(inputs):
        if item.id is None or item.id in taken:
            item.id = f"{_INPUT_ID_PREFIXES[item.type]}_{response_id.removeprefix('resp_')}i{number:04x}"
        taken.add(item.id)
    sizes = [len(to_json(items)) + ITEM_BYTES * (1 + len(items)) for items in (inputs, outputs)]
    state.responses.put(
        response_id, owner, answer, previous=previous, inputs=inputs, outputs=outputs, sizes=(sizes[0], sizes[1])
    )


ResponseId = Annotated[str, Path(description="Id of a stored response.")]

_STREAM = query_parameter("stream", {"enum": ["false"]}, "Must be `false`: stored responses are not streamed again.")

_PAGING = [
    query_parameter(
        "order", {"enum": ["asc", "desc"], "default": "desc"}, "`desc`: newest item first; `asc`: oldest first."
    ),
    query_parameter(
        "limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Number of items per page."
    ),
    query_parameter(
        "after", {"type": "string"}, "Id of the item before the page, such as the previous page's `last_id`."
    ),
]


@router.endpoint(
    "GET", "/v1/responses/{response_id}", response=schemas.ResponseAnswer, errors=(400, 404), parameters=[_STREAM]
)
async def get_response(request: Request, response_id: ResponseId) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("stored responses are not streamed again: remove stream", "stream")
    return LargeJsonResponse(_stored_response(state_of(request), response_id, owner_of(request)).body)


@router.endpoint("DELETE", "/v1/responses/{response_id}", response=schemas.DeletedResponse, errors=(404,))
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Delete a stored response. Responses that continue it keep their conversation."""
    state, owner = state_of(request), owner_of(request)
    _stored_response(state, response_id, owner)
    state.responses.delete(response_id, owner)
    return LargeJsonResponse(schemas.DeletedResponse(id=response_id, object="response", deleted=True).json_bytes())


@router.endpoint(
    "GET", "/v1/responses/{response_id}/input_items", response=schemas.ItemList, errors=(400, 404), parameters=_PAGING
)
async def list_input_items(request: Request, response_id: ResponseId) -> Response:
    """List the input items of a response, including those of the responses that it continues."""
    params = request.query_params
    order, limit, after = params.get("order", "desc"), params.get("limit", "20"), params.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("order should be 'asc' or 'desc'", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise bad_request("limit should be a number from 1 to 100", "limit")
    state = state_of(request)
    stored = _stored_response(state, response_id, owner_of(request))
    items: list[schemas.Item] = items_until(stored.inputs)
    if order == "desc":
        items.reverse()
    if after is not None:
        positions = [position for position, item in enumerate(items) if item.id == after]
        if not positions:
            raise bad_request("after is not the id of an item of this response", "after")
        items = items[positions[0] + 1 :]
    page, more = items[: int(limit)], len(items) > int(limit)
    listed = {
        "object": "list",
        "data": [input_item_object(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": more,
    }
    return LargeJsonResponse(await state.text.run_in_thread(to_json, listed))


def input_item_object(item: schemas.Item) -> dict[str, Any]:
    """An input item as listed: with its status, and the results of calls as one string."""
    listed = item.model_dump(exclude_none=True)
    if isinstance(item, schemas.CallOutputItem):
        listed["output"] = schemas.text_of(item.output)
    return {**listed, "status": "completed"}
