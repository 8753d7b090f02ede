"""Whole responses accumulated from the chunks or events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from windlass.clients import types
from windlass.clients._parse import loads
from windlass.clients.response_types import ContentBlock, Message, MessageEvent, MessageUsage, Response, ResponseEvent

T = TypeVar("T")  # of a chunk
Chunk = TypeVar("Chunk", types.CompletionChunk, types.ChatCompletionChunk)
A = TypeVar("A")  # of the whole response

# The kinds of blocks by their names in the two APIs.
_BLOCK_KINDS = {"message": "text", "reasoning": "thinking", "function_call": "call", "tool_use": "call"}


class StreamAccumulator(ABC, Generic[T, A]):
    """Add the chunks of a stream in order; `result` is the response so far. The properties are those of a stream.

    final_event: the name of the stream's last event in error messages. ended: whether an event marked the end of the stream.
    num_started: number of choices of which a part has arrived.
    """

    final_event = "[DONE]"

    def __init__(self) -> None:
        self.ended = False
        self.num_started = 0
        self.rotary: types.Rotary | None = None

    @property
    @abstractmethod
    def text(self) -> str:
        """Text of the first choice."""

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return ""

    @property
    def tool_calls(self) -> tuple[types.ToolCall, ...]:
        """Tool calls of the first choice; the last one may be incomplete."""
        return ()

    @property
    def parsed(self) -> Any:
        """The first choice as the requested answer type, once it has ended."""
        return None

    @property
    @abstractmethod
    def finish_reasons(self) -> dict[int, str]:
        """Finish reasons of the choices that have ended, by index."""

    @property
    @abstractmethod
    def usage(self) -> types.Usage | None:
        """The latest token counts."""

    @abstractmethod
    def add(self, chunk: T) -> None:
        """Add the next chunk."""

    @abstractmethod
    def result(self, request_id: str | None) -> A:
        """The whole response."""


@dataclass(slots=True)
class _PartialToolCall:
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, function: types.FunctionCall | None) -> None:
        if function is not None:
            self.name = function.name or self.name
            self.arguments.append(function.arguments)

    def function(self) -> types.FunctionCall:
        return types.FunctionCall(name=self.name, arguments=_join(self.arguments))


@dataclass(slots=True)
class _PartialChoice:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    role: str | None = None
    refusal: str | None = None
    tool_calls: dict[int, _PartialToolCall] = field(default_factory=dict)
    function_call: _PartialToolCall | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    completion_logprobs: list[types.Logprobs] = field(default_factory=list)
    chat_logprobs: list[types.TokenLogprob] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    rotary: types.Rotary | None = None

    def calls(self) -> tuple[types.ToolCall, ...]:
        return tuple(
            types.ToolCall(id=call.id, type=call.type, function=call.function())
            for _, call in sorted(self.tool_calls.items())
        )


class ChoiceAccumulator(StreamAccumulator[Chunk, A]):
    """Chunks with choices. usage: the last one sent. rotary: of the first choice, once it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._usage: types.Usage | None = None
        self._choices: dict[int, _PartialChoice] = {}
        self._id, self._model, self._created = "", "", 0
        self._fingerprint: str | None = None

    @property
    def text(self) -> str:
        return _join(self._choices[0].texts) if 0 in self._choices else ""

    @property
    def reasoning(self) -> str:
        return _join(self._choices[0].reasoning) if 0 in self._choices else ""

    @property
    def tool_calls(self) -> tuple[types.ToolCall, ...]:
        return self._choices[0].calls() if 0 in self._choices else ()

    @property
    def finish_reasons(self) -> dict[int, str]:
        choices = sorted(self._choices.items())
        return {index: choice.finish_reason for index, choice in choices if choice.finish_reason is not None}

    @property
    def usage(self) -> types.Usage | None:
        return self._usage

    def add(self, chunk: Chunk) -> None:
        if not self._id:
            self._id, self._model, self._created = chunk.id, chunk.model, chunk.created
            self._fingerprint = chunk.system_fingerprint
        if chunk.usage is not None:
            self._usage = chunk.usage
        for part in chunk.choices:
            choice = self._choices.setdefault(part.index, _PartialChoice())
            if part.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                choice.rotary = chunk.rotary
            if part.token_ids is not None:
                choice.token_ids = choice.token_ids or []
                choice.token_ids.extend(part.token_ids)
        # A chunk without choices has the usage, and the rotary report of the first choice.
        if chunk.rotary is not None and (not chunk.choices or chunk.choices[0].index == 0):
            self.rotary = chunk.rotary
        self.num_started = len(self._choices)
        self._add_chunk(chunk)

    @abstractmethod
    def _add_chunk(self, chunk: Chunk) -> None:
        """Add the fields that only this kind of chunk has."""

    def _choices_with_rotary(self) -> Iterator[tuple[int, _PartialChoice, types.Rotary | None]]:
        """Choices with their rotary report if the reports differ, as in a response that is not streamed."""
        if 0 in self._choices:
            self._choices[0].rotary = self.rotary
        differ = any(choice.rotary != self.rotary for choice in self._choices.values())
        for index, choice in sorted(self._choices.items()):
            yield index, choice, choice.rotary if differ else None

    def _common_fields(self, request_id: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "model": self._model,
            "created": self._created,
            "system_fingerprint": self._fingerprint,
            "usage": self.usage,
            "rotary": self.rotary,
            "request_id": request_id,
        }


class CompletionAccumulator(ChoiceAccumulator[types.CompletionChunk, types.Completion]):
    """Chunks of /v1/completions."""

    def _add_chunk(self, chunk: types.CompletionChunk) -> None:
        for part in chunk.choices:
            choice = self._choices[part.index]
            choice.texts.append(part.text)
            if part.logprobs is not None:
                choice.completion_logprobs.append(part.logprobs)
            choice.prompt_token_ids = part.prompt_token_ids or choice.prompt_token_ids
            choice.prompt_logprobs = part.prompt_logprobs or choice.prompt_logprobs

    def result(self, request_id: str | None) -> types.Completion:
        choices = [
            types.CompletionChoice(
                index=index,
                text="".join(choice.texts),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=_join_logprobs(choice.completion_logprobs),
                token_ids=_tuple(choice.token_ids),
                prompt_token_ids=choice.prompt_token_ids,
                prompt_logprobs=choice.prompt_logprobs,
                rotary=rotary,
            )
            for index, choice, rotary in self._choices_with_rotary()
        ]
        return types.Completion(choices=tuple(choices), **self._common_fields(request_id))


class ChatAccumulator(ChoiceAccumulator[types.ChatCompletionChunk, types.ChatCompletion]):
    """Chunks of /v1/chat/completions, whose fields about the prompt are at the top level."""

    def __init__(self, parse_content: Callable[[str], Any] | None = None) -> None:
        """parse_content: from the text of an answer to the requested answer type."""
        super().__init__()
        self._parse_content = parse_content
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None

    def _add_chunk(self, chunk: types.ChatCompletionChunk) -> None:
        self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        self._prompt_logprobs = chunk.prompt_logprobs or self._prompt_logprobs
        for part in chunk.choices:
            self._add_choice(self._choices[part.index], part)

    @staticmethod
    def _add_choice(choice: _PartialChoice, part: types.ChatChunkChoice) -> None:
        delta = part.delta
        choice.role = delta.role or choice.role
        if delta.content is not None:
            choice.texts.append(delta.content)
        if delta.reasoning_content is not None:
            choice.reasoning.append(delta.reasoning_content)
        choice.refusal = delta.refusal or choice.refusal
        for added in delta.tool_calls or ():
            call = choice.tool_calls.setdefault(added.index, _PartialToolCall())
            call.id, call.type = added.id or call.id, added.type or call.type
            call.add(added.function)
        if delta.function_call is not None:
            choice.function_call = choice.function_call or _PartialToolCall()
            choice.function_call.add(delta.function_call)
        if part.logprobs is not None:
            choice.chat_logprobs = choice.chat_logprobs or []
            choice.chat_logprobs.extend(part.logprobs.content or ())

    @property
    def parsed(self) -> Any:
        return self._message(self._choices[0]).parsed if 0 in self.finish_reasons else None

    def _message(self, choice: _PartialChoice) -> types.ChatMessage:
        return types.ChatMessage(
            role=choice.role or "assistant",
            content="".join(choice.texts) if choice.texts else None,
            reasoning_content="".join(choice.reasoning) if choice.reasoning else None,
            tool_calls=choice.calls() or None,
            function_call=None if choice.function_call is None else choice.function_call.function(),
            refusal=choice.refusal,
            _parse_content=self._parse_content,
        )

    def result(self, request_id: str | None) -> types.ChatCompletion:
        choices = [
            types.ChatChoice(
                index=index,
                message=self._message(choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=None
                if choice.chat_logprobs is None
                else types.ChatLogprobs(content=tuple(choice.chat_logprobs)),
                token_ids=_tuple(choice.token_ids),
                rotary=rotary,
            )
            for index, choice, rotary in self._choices_with_rotary()
        ]
        return types.ChatCompletion(
            choices=tuple(choices),
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            **self._common_fields(request_id),
        )


@dataclass(slots=True)
class _PartialBlock:
    kind: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return _join(self.pieces)


class BlockAccumulator(StreamAccumulator[T, A]):
    """Events of one choice that consists of blocks of text, thinking and calls."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, _PartialBlock] = {}

    @property
    def text(self) -> str:
        return self._text_of_blocks("text")

    @property
    def reasoning(self) -> str:
        return self._text_of_blocks("thinking")

    @property
    def tool_calls(self) -> tuple[types.ToolCall, ...]:
        return tuple(
            types.ToolCall(id=block.id, function=types.FunctionCall(name=block.name, arguments=block.text))
            for block in self._blocks.values()
            if block.kind == "call"
        )

    def _text_of_blocks(self, kind: str) -> str:
        return "".join(block.text for block in self._blocks.values() if block.kind == kind)

    def _start_block(self, index: int, kind: str, id: str | None, name: str | None) -> None:
        self._blocks[index] = _PartialBlock(_BLOCK_KINDS.get(kind, kind), id or "", name or "")


class ResponseAccumulator(BlockAccumulator[ResponseEvent, Response]):
    """Events of /v1/responses. The last one has the whole response."""

    final_event = "response.completed"

    def __init__(self) -> None:
        super().__init__()
        self._response: Response | None = None

    def add(self, chunk: ResponseEvent) -> None:
        self.num_started = 1
        index = chunk.output_index or 0
        if chunk.type == "response.output_item.added" and chunk.item is not None:
            self._start_block(index, chunk.item.type, chunk.item.call_id, chunk.item.name)
        elif chunk.delta is not None and index in self._blocks:
            self._blocks[index].pieces.append(chunk.delta)
        elif chunk.type in ("response.completed", "response.incomplete") and chunk.response is not None:
            self._response, self.rotary, self.ended = chunk.response, chunk.response.rotary, True

    @property
    def finish_reasons(self) -> dict[int, str]:
        return {} if self._response is None else {0: self._response.status}

    @property
    def usage(self) -> types.Usage | None:
        found = None if self._response is None else self._response.usage
        if found is None:
            return None
        prompt, completion = found.input_tokens_details, found.output_tokens_details
        return _usage(
            found.input_tokens,
            found.output_tokens,
            cached=None if prompt is None else prompt.cached_tokens,
            reasoning=None if completion is None else completion.reasoning_tokens,
        )

    def result(self, request_id: str | None) -> Response:
        assert self._response is not None
        return replace(self._response, request_id=request_id)


class MessageAccumulator(BlockAccumulator[MessageEvent, Message]):
    """Events of /v1/messages."""

    final_event = "message_stop"

    def __init__(self) -> None:
        super().__init__()
        self._message = Message(id="")
        self._usage: MessageUsage | None = None

    def add(self, chunk: MessageEvent) -> None:
        delta = chunk.delta
        if chunk.message is not None:
            self.num_started, self._message, self._usage = 1, chunk.message, chunk.message.usage
        elif chunk.content_block is not None:
            block = chunk.content_block
            self._start_block(chunk.index or 0, block.type, block.id, block.name)
        elif chunk.type == "content_block_delta" and delta is not None and chunk.index in self._blocks:
            self._blocks[chunk.index].pieces.append(delta.text or delta.thinking or delta.partial_json)
        elif chunk.type == "message_delta" and delta is not None:
            self._message = replace(self._message, stop_reason=delta.stop_reason, stop_sequence=delta.stop_sequence)
            self._usage, self.rotary = chunk.usage or self._usage, chunk.rotary
        self.ended = chunk.type == "message_stop"

    @property
    def finish_reasons(self) -> dict[int, str]:
        reason = self._message.stop_reason
        return {} if reason is None else {0: reason}

    @property
    def usage(self) -> types.Usage | None:
        found = self._usage
        if found is None:
            return None
        cached = found.cache_read_input_tokens
        prompt = found.input_tokens + cached + found.cache_creation_input_tokens
        return _usage(prompt, found.output_tokens, cached=cached)

    def result(self, request_id: str | None) -> Message:
        """The whole message. The input of a call that was cut short is empty."""
        content = tuple(map(_content_block, self._blocks.values()))
        usage = self._usage or MessageUsage()
        return replace(self._message, content=content, usage=usage, rotary=self.rotary, request_id=request_id)


class InfillAccumulator(StreamAccumulator[types.Infill, types.Infill]):
    """Events of /infill."""

    final_event = "the event with stop: true"

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._last: types.Infill | None = None

    def add(self, chunk: types.Infill) -> None:
        self.num_started = 1
        self._pieces.append(chunk.content)
        self._tokens += chunk.tokens
        self._last, self.ended, self.rotary = chunk, chunk.stop, chunk.rotary

    @property
    def text(self) -> str:
        return _join(self._pieces)

    @property
    def finish_reasons(self) -> dict[int, str]:
        return {0: self._last.stop_type or ""} if self._last is not None and self.ended else {}

    @property
    def usage(self) -> types.Usage | None:
        last = self._last
        if last is None:
            return None
        return _usage(last.tokens_evaluated, last.tokens_predicted, cached=last.tokens_cached)

    def result(self, request_id: str | None) -> types.Infill:
        assert self._last is not None
        return replace(self._last, content=self.text, tokens=tuple(self._tokens), request_id=request_id)


def _join(parts: list[str]) -> str:
    """Join the parts in place, so that a caller that asks after every chunk does not join all of them each time."""
    if len(parts) > 1:
        parts[:] = ["".join(parts)]
    return parts[0] if parts else ""


def _tuple(items: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if items is None else tuple(items)


def _usage(prompt: int, completion: int, *, cached: int | None, reasoning: int | None = None) -> types.Usage:
    return types.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=types.PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=None
        if reasoning is None
        else types.CompletionTokensDetails(reasoning_tokens=reasoning),
    )


def _join_logprobs(parts: list[types.Logprobs]) -> types.Logprobs | None:
    """Concatenate log-probabilities; a list that no part has stays None."""
    if not parts:
        return None
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    offsets = [part.text_offset for part in parts if part.text_offset is not None]
    return types.Logprobs(
        tokens=tuple(token for part in parts for token in part.tokens),
        token_logprobs=tuple(value for part in parts for value in part.token_logprobs),
        top_logprobs=tuple(top for part in tops for top in part) if tops else None,
        text_offset=tuple(offset for part in offsets for offset in part) if offsets else None,
    )


def _content_block(block: _PartialBlock) -> ContentBlock:
    if block.kind == "call":
        try:
            found = loads(block.text) if block.text else {}
        except ValueError:
            found = {}
        arguments = found if isinstance(found, dict) else {}
        return ContentBlock(type="tool_use", id=block.id, name=block.name, input=arguments)
    if block.kind == "thinking":
        return ContentBlock(type="thinking", thinking=block.text)
    return ContentBlock(type=block.kind, text=block.text)
