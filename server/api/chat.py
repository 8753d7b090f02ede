"""`POST /v1/chat/completions`: route and rendering."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.api.assistant_message import MessageBuilder
from windlass.server.api.router import GENERATION_ERRORS, ApiRouter, example_chunk
from windlass.server.app.request_body import read_body
from windlass.server.app.state import state_of
from windlass.server.schemas.chat import ChatCompletion, ChatEvent, ChatRequest
from windlass.server.serving.generation import run_generation
from windlass.server.serving.job import Delta, GenerationJob, TokenUsage
from windlass.server.serving.prompts import check_chat, prepare_chat
from windlass.server.serving.response_writer import ChoiceWriter, CollectedChoice, JsonList, chat_logprobs, encode
from windlass.server.serving.streaming import Exchange
from windlass.server.text.service import Prompt
from windlass.server.text.stream_parser import Content, Event

router = ApiRouter("Chat", "The next turn of a conversation, in OpenAI's form.")


class ChatWriter(ChoiceWriter):
    """Writes the answers to a chat. As a chat has one prompt, values of the prompt are at the top level of the answer."""

    def __init__(self, job: GenerationJob, prompts: Sequence[Prompt], token_usage: TokenUsage) -> None:
        kind = "chat.completion.chunk" if job.body.stream else "chat.completion"
        super().__init__(job, prompts, token_usage, "chatcmpl", kind)
        self._logprobs_by_choice: dict[int, JsonList] = {}
        self._parsing = job.parsing
        self._builders: dict[int, MessageBuilder] = {}

    def begin(self, choice: int) -> bytes:
        return self._begin(choice, "")

    def _begin(self, choice: int, content: str | None) -> bytes:
        self._begun.add(choice)
        delta = {"role": "assistant", "content": content}
        first = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk([first], encode, **self.extra_fields())

    def plain(self, choice: int, text: bytes) -> bytes:
        return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice, text)

    # ---- streams of parsed text --------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        if self._parsing is None:
            return super().event(delta)
        builder, events = self._parsed(delta, collect=False)
        if not events and delta.finish_reason is None and not self._detailed:
            return b""  # the parser holds the text back
        first = b""
        if delta.choice not in self._begun:
            # Content stays null if only calls follow.
            first = self._begin(delta.choice, "" if events and isinstance(events[0], Content) else None)
        if len(events) == 1 and isinstance(events[0], Content) and not self._detailed and delta.finish_reason is None:
            return first + self._head + self.plain(delta.choice, to_json(events[0].text)) + self._tail
        return first + b"".join(self._chunks(builder, delta, events))

    def _chunks(self, builder: MessageBuilder, delta: Delta, events: list[Event]) -> Iterator[bytes]:
        """One chunk per event, and one for the end. Values of the tokens go with the first chunk."""
        of_tokens, reason = delta, delta.finish_reason
        for event in events:
            yield self.chunk([self._choice(replace(of_tokens, finish_reason=None), builder.delta(event))])
            of_tokens = replace(delta, logprobs=(), token_ids=())
        if reason is not None:
            ending = replace(of_tokens, finish_reason=builder.finish_reason(reason))
            yield self.chunk([self._choice(ending, builder.final_delta())], **self.report(delta))
        elif not events:
            yield self.chunk([self._choice(of_tokens, {})])

    def _parsed(self, delta: Delta, *, collect: bool) -> tuple[MessageBuilder, list[Event]]:
        builder = self._builder(delta.choice, collect=collect)
        return builder, builder.parse(delta)

    def _builder(self, choice: int, *, collect: bool) -> MessageBuilder:
        assert self._parsing is not None
        builder = self._builders.get(choice)
        if builder is None:
            builder = self._builders[choice] = MessageBuilder(
                self._parsing.new_parser(), self.token_usage, self._parsing.legacy_function_call, collect
            )
        return builder

    # ---- choices -----------------------------------------------------------------------------------------------------
    def detailed_choice(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, {"content": delta.text} if delta.text or delta.finish_reason is None else {})

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": delta.choice,
            "delta": content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self.job.logprobs is not None:
            fields["logprobs"] = self._logprobs(delta)
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if self.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def add(self, delta: Delta) -> None:
        super().add(delta)
        if self._parsing is not None:
            self._parsed(delta, collect=True)

    def whole(self, index: int, choice: int, result: CollectedChoice) -> dict[str, Any]:
        if self._parsing is None:
            message, reason = {"role": "assistant", "content": result.text, "refusal": None}, result.finish_reason
        else:
            builder = self._builder(choice, collect=True)
            message, reason = builder.message(), builder.finish_reason(result.finish_reason)
        fields: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": result.stop_reason,
        }
        if self.job.logprobs is not None:
            fields["logprobs"] = {"content": self._logprobs_by_choice.get(choice) or JsonList(), "refusal": None}
        if self.token_ids:
            fields["token_ids"] = result.token_ids
        return fields

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, delta.logprobs, self.job.logprobs or 0, names=self.names)

    def store_logprobs(self, delta: Delta) -> int:
        content = self._logprobs_by_choice.setdefault(delta.choice, JsonList())
        before = content.size
        content.extend(self._logprobs(delta)["content"])
        return content.size - before

    def extra_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.token_ids:
            fields["prompt_token_ids"] = self.prompts[0].token_ids
        if 0 in self.prompt_objects:
            fields["prompt_logprobs"] = self.prompt_objects[0]
        return fields


_QUESTION = {"messages": [{"role": "user", "content": "Where does the river begin?"}]}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


_example_chunk = partial(example_chunk, "chatcmpl", "chat.completion.chunk")


def _example_choice(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **fields}


@router.endpoint(
    "POST",
    "/v1/chat/completions",
    body=ChatRequest,
    response=ChatCompletion,
    events=ChatEvent,
    done_event=True,
    errors=GENERATION_ERRORS,
    examples={
        "plain": ("The next turn", {**_QUESTION, "max_tokens": 200}),
        "streamed": (
            "Streamed",
            {**_QUESTION, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}},
        ),
        "held": (
            "An answer that follows a schema",
            {
                **_QUESTION,
                "max_tokens": 200,
                "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
            },
        ),
        "likely": (
            "With log-probabilities",
            {**_QUESTION, "max_tokens": 50, "temperature": 0, "logprobs": True, "top_logprobs": 2},
        ),
    },
    stream_examples=[
        _example_chunk(_example_choice({"role": "assistant", "content": ""})),
        _example_chunk(_example_choice({"content": "Far"})),
        _example_chunk(_example_choice({"content": "."}, "length", stop_reason=None)),
        _example_chunk(),
    ],
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, ChatRequest)
    chat = await check_chat(request, body, arrival=arrival)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        prompts, job = await prepare_chat(chat)
        make_writer = partial(ChatWriter, job, prompts)
        await run_generation(exchange, job, prompts, param="messages", make_writer=make_writer)

    return Exchange(state, work, deadline=chat.deadline)
