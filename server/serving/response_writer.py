"""Responses as JSON: log-probabilities, large JSON in parts, and writers with envelope, choices, usage and best_of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic_core import to_json

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.errors import response_too_large
from windlass.server.serving.job import Delta, GenerationJob, TokenUsage, envelope
from windlass.server.text.service import Prompt
from windlass.server.text.tokenizer import TextOffsets, Tokenizer

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class JsonList:
    """A JSON array that is encoded as items are added; only its text is stored. size: bytes of that text."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Append items. At most a few hundred at once: encoding them blocks the event loop."""
        if items:
            part = to_json(items)[1:-1]
            self._parts.append(part)
            self.size += len(part) + 1

    def take(self, other: JsonList) -> None:
        """Append the items of another array."""
        self._parts += other._parts
        self.size += other.size

    def __add__(self, other: JsonList) -> JsonList:
        both = JsonList()
        both._parts = self._parts + other._parts
        both.size = self.size + other.size
        return both

    def __bool__(self) -> bool:
        return bool(self._parts)

    def pieces(self) -> Iterator[bytes]:
        """The array's text."""
        yield b"["
        for number, part in enumerate(self._parts):
            if number:
                yield b","
            yield part
        yield b"]"


def encode_pieces(value: Any) -> Iterator[bytes]:
    """The JSON text of a value in which any array may be a `JsonList`. Other arrays and strings come in one piece."""
    if isinstance(value, JsonList):
        yield from value.pieces()
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + to_json(key) + b":"
            yield from encode_pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | JsonList):
        before = b"["
        for item in value:
            yield before
            yield from encode_pieces(item)
            before = b","
        yield b"]"
    else:
        yield to_json(value)


def encode(value: Any) -> bytes:
    """The text of `encode_pieces` in one piece."""
    return b"".join(encode_pieces(value))


def token_name(token_id: int) -> str:
    """Unambiguous name of a token; several tokens may have the same text."""
    return f"token_id:{token_id}"


def clamp_logprob(logprob: float) -> float:
    """The log-probability, or MIN_LOGPROB for minus infinity and NaN, which JSON does not have."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class CompletionLogprobLists:
    """Builds the parallel lists of a completions choice, chunk by chunk.

    top: alternatives per token. Each entry of `top_logprobs` also has the token itself, so it may have top + 1 items; of two
    alternatives with the same text the more probable one is used.
    start: characters before the first token. names: name tokens by their ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool, start: int = 0, names: bool = False
    ) -> None:
        self._text = token_name if names else tokenizer.token_text
        self._top = top
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens, start=start)

    @property
    def position(self) -> int:
        """Offset of the next token in characters."""
        return self._offsets.position

    def layout(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The lists of further tokens, one entry each; None for a token without a preceding one."""
        text = self._text
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offsets.advance(token_id))
            tokens.append(text(token_id))
            if entry is None:
                logprobs.append(None)
                tops.append(None)
                continue
            own = clamp_logprob(entry.logprob)
            logprobs.append(own)
            top: dict[str, float] = {}
            for other, logprob in entry.top[: self._top]:
                top.setdefault(text(other), clamp_logprob(logprob))
            top.setdefault(tokens[-1], own)
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int, *, names: bool = False
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. names: name tokens by their ids."""
    text = token_name if names else tokenizer.token_text

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": text(token_id),
            "logprob": clamp_logprob(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for entry in entries:
        described = describe(entry.token_id, entry.logprob)
        described["top_logprobs"] = [describe(*other) for other in entry.top[:top]]
        content.append(described)
    return {"content": content, "refusal": None}


def prompt_logprobs_object(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a response: an object by token id for each prompt token, null for the first."""

    def describe(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": clamp_logprob(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranked = enumerate(entry.top[:top], start=1)
        described = {str(token_id): describe(token_id, logprob, rank) for rank, (token_id, logprob) in ranked}
        described.setdefault(str(entry.token_id), describe(entry.token_id, entry.logprob, entry.rank))
        result.append(described)
    return result


ITEMS_PER_WRITE = 256  # tokens with log-probabilities that are encoded at once
LARGE_RESPONSE_BYTES = 256 * 1024  # from which encoding a response would block the event loop
T = TypeVar("T")


class ByteBudget:
    """Counts the bytes that are collected for a response."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.size = 0

    def add(self, size: int) -> None:
        """Count `size` more bytes; raises ApiError above the limit."""
        self.size += size
        if self.size > self._limit:
            raise response_too_large(self.size, self._limit)


class Writer(ABC):
    """Writes the response of one request: `event` and `last_event` for streams, `add` and `pieces` otherwise.

    budget: bytes of a response, or of the parts of a stream that are stored.
    """

    def __init__(self, job: GenerationJob, token_usage: TokenUsage) -> None:
        self.job = job
        self.token_usage = token_usage
        self.budget = ByteBudget(job.state.settings.max_response_bytes)

    @abstractmethod
    def event(self, delta: Delta) -> bytes:
        """The events of one delta; empty if there are none yet."""

    def progress_event(self, delta: Delta) -> bytes:
        """The event of a delta with `prompt_progress`; empty if the API has none."""
        return b""

    def last_event(self) -> bytes:
        """The events after those of all deltas."""
        return b""

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Collect a delta. Raises ApiError if the response becomes too large."""

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The response as JSON, after all deltas. Call it on a thread if it is large."""

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Encode the log-probabilities of a prompt. Call it on a thread: long prompts take a while."""
        raise AssertionError("this API has no log-probabilities of prompts")


@dataclass(slots=True)
class CollectedChoice:
    """A choice collected from its deltas. logprob_sum, num_logprobs: of the generated tokens, for best_of."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprob_sum: float = 0.0
    num_logprobs: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    rotary: dict[str, Any] | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.parts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprob_sum += sum(entry.logprob for entry in delta.logprobs)
        self.num_logprobs += len(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.rotary = delta.rotary

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def mean_logprob(self) -> float:
        """Log-probability per token, by which best_of ranks."""
        return self.logprob_sum / self.num_logprobs if self.num_logprobs else float("-inf")


class ChoiceWriter(Writer):
    """Writes responses that have choices.

    Log-probabilities are encoded as they come, so that a large response is stored as text instead of millions of objects.
    prefix, kind: of the response's id, and its `object`.
    """

    def __init__(
        self, job: GenerationJob, prompts: Sequence[Prompt], token_usage: TokenUsage, prefix: str, kind: str
    ) -> None:
        super().__init__(job, token_usage)
        state, usage = job.state, job.body.stream_options
        self.tokenizer = state.tokenizer
        self.prompts = prompts
        self.samples = job.sampling.n  # per prompt; the best `n` of them are shown
        self.token_ids = bool(job.body.return_token_ids)
        self.names = bool(job.body.return_tokens_as_token_ids)  # "token_id:17" instead of texts, which may be ambiguous
        self.usage_at_end = bool(usage and usage.include_usage)
        self.usage_always = bool(usage and usage.include_usage and usage.continuous_usage_stats)
        self.envelope = {
            **envelope(prefix, kind, job),
            "system_fingerprint": state.fingerprint_with_adapter(job.info, job.adapter),
        }
        self.prompt_objects: dict[int, JsonList] = {}
        self.results: dict[int, CollectedChoice] = {}
        # A plain chunk is joined from bytes, because only its text varies.
        self._head = b"data: " + to_json(self.envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.usage_at_end else b"]}\n\n"
        self._detailed = job.logprobs is not None or self.token_ids or self.usage_always
        self._begun: set[int] = set()
        self._rotary: dict[int, dict[str, Any]] = {}  # of the finished choices of a stream

    # ---- per API -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, choice: int) -> bytes:
        """First events of a choice."""

    @abstractmethod
    def plain(self, choice: int, text: bytes) -> bytes:
        """The choice object of a chunk with text only. text: as a JSON string."""

    @abstractmethod
    def detailed_choice(self, delta: Delta) -> dict[str, Any]:
        """The choice object of any other chunk."""

    @abstractmethod
    def whole(self, index: int, choice: int, result: CollectedChoice) -> dict[str, Any]:
        """The choice object of a response. index: its number. choice: the output that it shows."""

    @abstractmethod
    def store_logprobs(self, delta: Delta) -> int:
        """Store the log-probabilities of a delta for `whole`; returns their bytes."""

    def extra_fields(self) -> dict[str, Any]:
        """Further top-level fields of a response."""
        return {}

    # ---- streams -----------------------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        first = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            first = self.begin(delta.choice)
        if delta.finish_reason is None and not self._detailed:
            if not delta.text:
                return first
            return first + self._head + self.plain(delta.choice, to_json(delta.text)) + self._tail
        return first + self.chunk([self.detailed_choice(delta)], **self.report(delta))

    def progress_event(self, delta: Delta) -> bytes:
        return self.chunk([], prompt_progress=delta.prompt_progress)

    def report(self, delta: Delta) -> dict[str, Any]:
        """The `rotary` field of a chunk that ends a choice."""
        if delta.rotary is None:
            return {}
        self._rotary[delta.choice] = delta.rotary
        return {"rotary": delta.rotary}

    def last_event(self) -> bytes:
        """The usage chunk, if requested."""
        if not self.usage_at_end:
            return b""
        payload = {**self.envelope, "choices": [], "usage": usage_object(self.token_usage)}
        if self._rotary:
            payload["rotary"] = self._rotary[min(self._rotary)]
        return b"data: " + to_json(payload) + b"\n\n"

    def chunk(self, choices: list[dict[str, Any]], encoder: Callable[[Any], bytes] = to_json, **fields: Any) -> bytes:
        """One chunk as an event. encoder: `encode` for a chunk that may contain `JsonList`s."""
        payload = {**self.envelope, "choices": choices, **fields}
        if self.usage_at_end:
            payload["usage"] = usage_object(self.token_usage) if self.usage_always else None
        return b"data: " + encoder(payload) + b"\n\n"

    # ---- responses ---------------------------------------------------------------------------------------------------
    def add(self, delta: Delta) -> None:
        self.results.setdefault(delta.choice, CollectedChoice()).add(delta)
        self.budget.add(len(delta.text) + (4 * len(delta.token_ids) if self.token_ids else 0))
        if self.job.logprobs is not None:
            self.budget.add(self.store_logprobs(delta))

    def pieces(self) -> list[bytes]:
        return list(encode_pieces(self.answer()))

    def answer(self) -> dict[str, Any]:
        """The response as an object; long lists in it are `JsonList`.

        `rotary` is that of the first choice; if the choices differ, each has its own too.
        """
        n, samples = self.job.body.n or 1, self.samples
        choices: list[dict[str, Any]] = []
        rotary: list[dict[str, Any] | None] = []
        for prompt_index in range(len(self.prompts)):
            outputs = range(prompt_index * samples, (prompt_index + 1) * samples)
            if n < samples:
                best = sorted(outputs, key=lambda choice: -self.results[choice].mean_logprob())
                outputs = best[:n]  # type: ignore[assignment]
            for choice in outputs:
                choices.append(self.whole(len(choices), choice, self.results[choice]))
                rotary.append(self.results[choice].rotary)
        if any(found != rotary[0] for found in rotary):
            for choice_object, found in zip(choices, rotary, strict=True):
                if found is not None:
                    choice_object["rotary"] = found
        return {
            **self.envelope,
            "choices": choices,
            **self.extra_fields(),
            **({} if rotary[0] is None else {"rotary": rotary[0]}),
            "usage": usage_object(self.token_usage),
        }

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        top = self.job.body.prompt_logprobs
        if top is not None:
            found = self.prompt_objects[prompt_index] = JsonList()
            for piece in in_batches(entries):
                before = found.size
                found.extend(prompt_logprobs_object(self.tokenizer, piece, top))
                self.budget.add(found.size - before)


def usage_object(token_usage: TokenUsage) -> dict[str, Any]:
    """OpenAI's usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": token_usage.prompt_tokens,
        "completion_tokens": token_usage.completion_tokens,
        "total_tokens": token_usage.prompt_tokens + token_usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": token_usage.cached_tokens},
    }
    if token_usage.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": token_usage.reasoning_tokens}
    return usage


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in batches of `ITEMS_PER_WRITE`."""
    for start in range(0, len(items), ITEMS_PER_WRITE):
        yield items[start : start + ITEMS_PER_WRITE]
