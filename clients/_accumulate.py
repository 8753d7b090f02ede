"""Whole responses accumulated from the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from windlass.clients._parse import loads
from windlass.clients.message_types import ContentBlock, Message, MessageEvent, MessageUsage
from windlass.clients.response_types import Response, ResponseEvent
from windlass.clients.types import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionTokensDetails,
    FunctionCall,
    Logprobs,
    PromptTokensDetails,
    Rotary,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

Chunk = TypeVar("Chunk", CompletionChunk, ChatCompletionChunk)

A = TypeVar("A")


@dataclass(slots=True)
class _PartialToolCall:
    """What has arrived of one call so far."""

    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, function: FunctionCall | None) -> None:
        if function is not None:
            self.name = function.name or self.name
            self.arguments.append(function.arguments)

    def function(self) -> FunctionCall:
        return FunctionCall(name=self.name, arguments=join_pieces(self.arguments))


@dataclass(slots=True)
class _PartialChoice:
    """What has arrived of one choice so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    role: str | None = None
    refusal: str | None = None
    tool_calls: dict[int, _PartialToolCall] = field(default_factory=dict)
    function_call: _PartialToolCall | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    completion_logprobs: list[Logprobs] = field(default_factory=list)
    chat_logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    rotary: Rotary | None = None


class ChoiceAccumulator(ABC, Generic[Chunk, A]):
    """Add chunks in order; `result` is what they make so far.

    usage: the last one sent. rotary: the first choice's, once it has ended.
    """

    final_event = "[DONE]"
    ended = False  # no chunk says that nothing follows

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.rotary: Rotary | None = None
        self._choices: dict[int, _PartialChoice] = {}
        self._id, self._model, self._created = "", "", 0
        self._fingerprint: str | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return join_pieces(self._choices[0].texts) if 0 in self._choices else ""

    @property
    def reasoning(self) -> str:
        """Thinking of the first choice."""
        return join_pieces(self._choices[0].reasoning) if 0 in self._choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the first choice, the last one possibly in part."""
        return _calls(self._choices[0]) if 0 in self._choices else ()

    @property
    def parsed(self) -> Any:
        """The first choice as what was asked for, once it has ended."""
        return None

    @property
    def finish_reasons(self) -> dict[int, str]:
        """Why each choice ended, of those that have, by index."""
        ended = sorted(self._choices.items())
        return {index: choice.finish_reason for index, choice in ended if choice.finish_reason is not None}

    @property
    def num_started(self) -> int:
        """How many choices have begun."""
        return len(self._choices)

    def add(self, chunk: Chunk) -> None:
        """Take what a chunk brings."""
        if not self._id:
            self._id, self._model, self._created = chunk.id, chunk.model, chunk.created
            self._fingerprint = chunk.system_fingerprint
        if chunk.usage is not None:
            self.usage = chunk.usage
        for part in chunk.choices:
            choice = self._choices.setdefault(part.index, _PartialChoice())
            if part.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                choice.rotary = chunk.rotary
            if part.token_ids is not None:
                choice.token_ids = choice.token_ids or []
                choice.token_ids.extend(part.token_ids)
        # A chunk without choices carries the usage, and the first choice's report.
        if chunk.rotary is not None and (not chunk.choices or chunk.choices[0].index == 0):
            self.rotary = chunk.rotary
        self._add_chunk(chunk)

    @abstractmethod
    def _add_chunk(self, chunk: Chunk) -> None:
        """What only this kind of chunk brings."""

    @abstractmethod
    def result(self, request_id: str | None) -> A:
        """The whole answer."""

    def _choices_with_rotary(self) -> Iterator[tuple[int, _PartialChoice, Rotary | None]]:
        """Each choice with the report it shows: its own where they differ, as in an answer that was not streamed."""
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


class CompletionAccumulator(ChoiceAccumulator[CompletionChunk, Completion]):
    """Chunks of /v1/completions."""

    def _add_chunk(self, chunk: CompletionChunk) -> None:
        for part in chunk.choices:
            choice = self._choices[part.index]
            choice.texts.append(part.text)
            if part.logprobs is not None:
                choice.completion_logprobs.append(part.logprobs)
            choice.prompt_token_ids = part.prompt_token_ids or choice.prompt_token_ids
            choice.prompt_logprobs = part.prompt_logprobs or choice.prompt_logprobs

    def result(self, request_id: str | None) -> Completion:
        choices = [
            CompletionChoice(
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
        return Completion(choices=tuple(choices), **self._common_fields(request_id))


class ChatAccumulator(ChoiceAccumulator[ChatCompletionChunk, ChatCompletion]):
    """Chunks of /v1/chat/completions. What concerns the prompt stands at the top level."""

    def __init__(self, read: Callable[[str], Any] | None = None) -> None:
        """read: from the text of an answer to what the caller wants it to be."""
        super().__init__()
        self._parse_content = read
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None

    def _add_chunk(self, chunk: ChatCompletionChunk) -> None:
        self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        self._prompt_logprobs = chunk.prompt_logprobs or self._prompt_logprobs
        for part in chunk.choices:
            self._add_choice(self._choices[part.index], part)

    @staticmethod
    def _add_choice(choice: _PartialChoice, part: ChatChunkChoice) -> None:
        delta = part.delta
        choice.role = delta.role or choice.role
        if delta.content is not None:
            choice.texts.append(delta.content)
        if delta.reasoning_content is not None:
            choice.reasoning.append(delta.reasoning_content)
        choice.refusal = delta.refusal or choice.refusal
        for call in delta.tool_calls or ():
            _add_call_delta(choice.tool_calls.setdefault(call.index, _PartialToolCall()), call)
        if delta.function_call is not None:
            choice.function_call = choice.function_call or _PartialToolCall()
            choice.function_call.add(delta.function_call)
        if part.logprobs is not None:
            choice.chat_logprobs = choice.chat_logprobs or []
            choice.chat_logprobs.extend(part.logprobs.content or ())

    @property
    def parsed(self) -> Any:
        return self._message(self._choices[0]).parsed if 0 in self.finish_reasons else None

    def _message(self, choice: _PartialChoice) -> ChatMessage:
        return ChatMessage(
            role=choice.role or "assistant",
            content="".join(choice.texts) if choice.texts else None,
            reasoning_content="".join(choice.reasoning) if choice.reasoning else None,
            tool_calls=_calls(choice) or None,
            function_call=None if choice.function_call is None else choice.function_call.function(),
            refusal=choice.refusal,
            _parse_content=self._parse_content,
        )

    def result(self, request_id: str | None) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=self._message(choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=None if choice.chat_logprobs is None else ChatLogprobs(content=tuple(choice.chat_logprobs)),
                token_ids=_tuple(choice.token_ids),
                rotary=rotary,
            )
            for index, choice, rotary in self._choices_with_rotary()
        ]
        return ChatCompletion(
            choices=tuple(choices),
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            **self._common_fields(request_id),
        )


def join_pieces(parts: list[str]) -> str:
    """The parts as one, kept so: callers ask after every chunk, and the text is not joined from the start each time."""
    if len(parts) > 1:
        parts[:] = ["".join(parts)]
    return parts[0] if parts else ""


def _tuple(items: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if items is None else tuple(items)


def _join_logprobs(parts: list[Logprobs]) -> Logprobs | None:
    """Log-probabilities in order; a list that no part has stays absent."""
    if not parts:
        return None
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    offsets = [part.text_offset for part in parts if part.text_offset is not None]
    return Logprobs(
        tokens=tuple(token for part in parts for token in part.tokens),
        token_logprobs=tuple(value for part in parts for value in part.token_logprobs),
        top_logprobs=tuple(top for part in tops for top in part) if tops else None,
        text_offset=tuple(offset for part in offsets for offset in part) if offsets else None,
    )


def _add_call_delta(call: _PartialToolCall, delta: ToolCallDelta) -> None:
    """Add a piece of a tool call: arguments come in parts, everything else once."""
    call.id, call.type = delta.id or call.id, delta.type or call.type
    call.add(delta.function)


def _calls(choice: _PartialChoice) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=call.id, type=call.type, function=call.function()) for _, call in sorted(choice.tool_calls.items())
    )


A_co = TypeVar("A_co", covariant=True)


class StreamAccumulator(Protocol[A_co]):
    """Add what comes in order; `result` is what it makes. The other names are those of a stream.

    ending: the stream's last event, as errors call it. ended: whether an event said that nothing follows.
    """

    @property
    def final_event(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> tuple[ToolCall, ...]: ...
    @property
    def parsed(self) -> Any: ...
    @property
    def finish_reasons(self) -> dict[int, str]: ...
    @property
    def num_started(self) -> int: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def rotary(self) -> Rotary | None: ...

    def add(self, chunk: Any) -> None: ...

    def result(self, request_id: str | None) -> A_co: ...


# What the two APIs call blocks.
_BLOCK_KINDS = {"message": "text", "reasoning": "thinking", "function_call": "call", "tool_use": "call"}


@dataclass(slots=True)
class _PartialBlock:
    kind: str
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return join_pieces(self.pieces)


class BlockAccumulator:
    """What both kinds of streams share: blocks in a row, of kinds text, thinking and call."""

    parsed = None

    def __init__(self) -> None:
        self.ended = False
        self.num_started = 0
        self.rotary: Rotary | None = None
        self._blocks: dict[int, _PartialBlock] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text_of_blocks("text")

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return self._text_of_blocks("thinking")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far, the last one possibly in part."""
        return tuple(
            ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.text))
            for block in self._blocks.values()
            if block.kind == "call"
        )

    def _text_of_blocks(self, kind: str) -> str:
        return "".join(block.text for block in self._blocks.values() if block.kind == kind)


class ResponseAccumulator(BlockAccumulator):
    """Events of /v1/responses. The last one bears the whole response."""

    final_event = "response.completed"

    def __init__(self) -> None:
        super().__init__()
        self._response: Response | None = None

    def add(self, chunk: ResponseEvent) -> None:
        """Take what an event brings."""
        self.num_started = 1
        index = chunk.output_index or 0
        if chunk.type == "response.output_item.added" and chunk.item is not None:
            item = chunk.item
            self._blocks[index] = _PartialBlock(
                _BLOCK_KINDS.get(item.type, item.type), item.call_id or "", item.name or ""
            )
        elif chunk.delta is not None and index in self._blocks:
            self._blocks[index].pieces.append(chunk.delta)
        elif chunk.type in ("response.completed", "response.incomplete") and chunk.response is not None:
            self._response, self.rotary, self.ended = chunk.response, chunk.response.rotary, True

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The status of the response, once it has one."""
        return {} if self._response is None else {0: self._response.status}

    @property
    def usage(self) -> Usage | None:
        """The counts, in the names of chats."""
        found = None if self._response is None else self._response.usage
        if found is None:
            return None
        read, thought = found.input_tokens_details, found.output_tokens_details
        return Usage(
            prompt_tokens=found.input_tokens,
            completion_tokens=found.output_tokens,
            total_tokens=found.total_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=None if read is None else read.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=None if thought is None else thought.reasoning_tokens
            ),
        )

    def result(self, request_id: str | None) -> Response:
        """The whole response."""
        assert self._response is not None
        return replace(self._response, request_id=request_id)


class MessageAccumulator(BlockAccumulator):
    """Events of /v1/messages."""

    final_event = "message_stop"

    def __init__(self) -> None:
        super().__init__()
        self._message = Message(id="")
        self._usage: MessageUsage | None = None

    def add(self, chunk: MessageEvent) -> None:
        """Take what an event brings."""
        if chunk.message is not None:
            self.num_started, self._message, self._usage = 1, chunk.message, chunk.message.usage
        elif chunk.content_block is not None:
            block = chunk.content_block
            self._blocks[chunk.index or 0] = _PartialBlock(
                _BLOCK_KINDS.get(block.type, block.type), block.id or "", block.name or ""
            )
        elif chunk.type == "content_block_delta" and chunk.delta is not None and chunk.index in self._blocks:
            delta = chunk.delta
            self._blocks[chunk.index].pieces.append(delta.text or delta.thinking or delta.partial_json)
        elif chunk.type == "message_delta" and chunk.delta is not None:
            delta = chunk.delta
            self._message = replace(self._message, stop_reason=delta.stop_reason, stop_sequence=delta.stop_sequence)
            self._usage, self.rotary = chunk.usage or self._usage, chunk.rotary
        self.ended = chunk.type == "message_stop"

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The stop reason, once there is one."""
        reason = self._message.stop_reason
        return {} if reason is None else {0: reason}

    @property
    def usage(self) -> Usage | None:
        """The counts so far, in the names of chats."""
        found = self._usage
        if found is None:
            return None
        prompt = found.input_tokens + found.cache_read_input_tokens + found.cache_creation_input_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=found.output_tokens,
            total_tokens=prompt + found.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=found.cache_read_input_tokens),
        )

    def result(self, request_id: str | None) -> Message:
        """The whole message. The input of a call that was cut short is empty."""
        content = tuple(map(_content_block, self._blocks.values()))
        usage = self._usage or MessageUsage()
        return replace(self._message, content=content, usage=usage, rotary=self.rotary, request_id=request_id)


def _content_block(block: _PartialBlock) -> ContentBlock:
    if block.kind == "call":
        try:
            found = loads(block.text) if block.text else {}
        except ValueError:
            found = {}
        given = found if isinstance(found, dict) else {}
        return ContentBlock(type="tool_use", id=block.id, name=block.name, input=given)
    if block.kind == "thinking":
        return ContentBlock(type="thinking", thinking=block.text)
    return ContentBlock(type=block.kind, text=block.text)
