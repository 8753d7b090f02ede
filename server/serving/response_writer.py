"""Response writers: the envelope, usage, best_of, and the expected size of a response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic_core import to_json

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.errors import response_too_large
from windlass.server.serving.deltas import Delta, SampleReport, TokenUsage
from windlass.server.serving.response_format import (
    JsonList,
    encode,
    encode_pieces,
    prompt_logprobs_object,
    sample_object,
)
from windlass.server.text.service import Prompt

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


class Writer(Protocol):
    """Writes one request's answer: `event` and `last_event` of a stream, `add` and `pieces` of a whole answer."""

    @property
    def size(self) -> int:
        """Bytes of what is kept."""

    def event(self, delta: Delta) -> bytes:
        """The events of one delta; empty where there is nothing to say yet."""

    def last_event(self) -> bytes:
        """What comes behind the events of all deltas."""

    def add(self, delta: Delta) -> None:
        """Keep what a delta brings. Raises ApiError where the answer becomes too large."""

    def pieces(self) -> list[bytes]:
        """The whole answer's JSON, once all deltas have come."""

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Lay out a prompt's log-probabilities."""


T = TypeVar("T")

ITEMS_PER_WRITE = 256  # tokens with log-probabilities that are written in one go

LARGE_RESPONSE_BYTES = 256 * 1024  # bytes from which writing it would hold up the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What the caller wants to see.

    n: choices per prompt; samples: outputs per prompt, of which the n likeliest are shown.
    logprobs, prompt_logprobs: alternatives per token, None for no log-probabilities at all.
    dropped_turns: how many were left out of a chat, None where none may be.
    tokens_as_ids: in log-probabilities tokens are called "token_id:17" rather than by their texts, which may be equal.
    usage_at_end, usage_always: `stream_options`.
    max_bytes: a whole answer that grows larger is refused.
    """

    n: int = 1
    samples: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    dropped_turns: int | None = None
    usage_at_end: bool = False
    usage_always: bool = False
    max_bytes: int = 2**63


@dataclass(slots=True)
class CollectedChoice:
    """A choice put together from its deltas. logprob_sum, num_logprobs: of its own tokens, for best_of."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprob_sum: float = 0.0
    num_logprobs: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    report: SampleReport | None = None

    def add(self, delta: Delta) -> None:
        """Append what a delta brings."""
        self.parts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprob_sum += sum(entry.logprob for entry in delta.logprobs)
        self.num_logprobs += len(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.report = delta.report

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def mean_logprob(self) -> float:
        """What best_of ranks by: log-probability per token."""
        return self.logprob_sum / self.num_logprobs if self.num_logprobs else float("-inf")


class ChoiceWriter(ABC):
    """Writes one request's answer. `event` for streams; `add` and `answer` for whole answers.

    Log-probabilities are turned into JSON as they come, so that a whole answer keeps their text and not millions of
    objects. envelope: the fields every chunk begins with (id, object, created, model).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        token_usage: TokenUsage,
        options: ResponseOptions,
        envelope: dict[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.token_usage = token_usage
        self.options = options
        self.envelope = envelope
        self.prompt_objects: dict[int, JsonList] = {}
        self.results: dict[int, CollectedChoice] = {}
        # A plain chunk is joined from bytes: everything but its text is known beforehand.
        self._head = b"data: " + to_json(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if options.usage_at_end else b"]}\n\n"
        self._detailed = options.logprobs is not None or options.return_token_ids or options.usage_always
        self._begun: set[int] = set()
        self._reports: dict[int, dict[str, Any]] = {}  # of the choices of a stream that ended
        self.size = 0  # bytes of what is kept for a whole answer, or for the first events of a stream

    # ---- to be filled in ---------------------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, choice: int) -> bytes:
        """Events that come before everything else of a choice."""

    @abstractmethod
    def plain(self, choice: int, text: bytes) -> bytes:
        """The choice object of a chunk that brings nothing but text; `text` is a JSON string."""

    @abstractmethod
    def detailed_choice(self, delta: Delta) -> dict[str, Any]:
        """The choice object of any other chunk."""

    @abstractmethod
    def whole(self, index: int, choice: int, result: CollectedChoice) -> dict[str, Any]:
        """The choice object of a whole answer; `index` is the number it gets, `choice` the output it shows."""

    @abstractmethod
    def store_logprobs(self, delta: Delta) -> int:
        """Keep the log-probabilities of a delta for `whole`; returns the bytes they take."""

    def extra_fields(self) -> dict[str, Any]:
        """Further top-level fields of a whole answer."""
        return {}

    # ---- streams -----------------------------------------------------------------------------------------------------
    def event(self, delta: Delta) -> bytes:
        """The events of one delta; empty where there is nothing to say yet."""
        first = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            first = self.begin(delta.choice)
        if delta.finish_reason is None and not self._detailed:
            if not delta.text:
                return first
            return first + self._head + self.plain(delta.choice, to_json(delta.text)) + self._tail
        return first + self.chunk([self.detailed_choice(delta)], **self.report(delta))

    def report(self, delta: Delta) -> dict[str, Any]:
        """The `rotary` field of a chunk that ends a choice."""
        report_object = self.report_object(delta.report)
        if report_object is None:
            return {}
        self._reports[delta.choice] = report_object
        return {"rotary": report_object}

    def report_object(self, report: SampleReport | None) -> dict[str, Any] | None:
        """A report as answers have it."""
        return None if report is None else sample_object(report, self.options.dropped_turns)

    def last_event(self) -> bytes:
        """The usage chunk, where it was asked for."""
        if not self.options.usage_at_end:
            return b""
        payload = {**self.envelope, "choices": [], "usage": usage_object(self.token_usage)}
        if self._reports:
            payload["rotary"] = self._reports[min(self._reports)]
        return b"data: " + to_json(payload) + b"\n\n"

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """One chunk as an event."""
        payload = {**self.envelope, "choices": choices, **fields}
        if self.options.usage_always:
            payload["usage"] = usage_object(self.token_usage)
        elif self.options.usage_at_end:
            payload["usage"] = None
        return b"data: " + to_json(payload) + b"\n\n"

    def opening(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """A chunk that may hold lists written in pieces."""
        payload = {**self.envelope, "choices": choices, **fields}
        if self.options.usage_at_end or self.options.usage_always:
            payload["usage"] = usage_object(self.token_usage) if self.options.usage_always else None
        return b"data: " + encode(payload) + b"\n\n"

    # ---- whole answers -----------------------------------------------------------------------------------------------
    def add(self, delta: Delta) -> None:
        """Keep what a delta brings until `answer`. Raises ApiError where the answer becomes too large."""
        self.results.setdefault(delta.choice, CollectedChoice()).add(delta)
        self.count_bytes(len(delta.text))
        if self.options.logprobs is not None:
            self.count_bytes(self.store_logprobs(delta))

    def pieces(self) -> list[bytes]:
        """The answer's JSON once every choice has finished. Slow for large ones: call it beside the event loop then."""
        return list(encode_pieces(self.answer()))

    def answer(self) -> dict[str, Any]:
        """The answer as an object; long lists in it are `JsonList`."""
        n, samples = self.options.n, self.options.samples
        choices: list[dict[str, Any]] = []
        reports: list[dict[str, Any] | None] = []
        for prompt_index in range(len(self.prompts)):
            outputs = range(prompt_index * samples, (prompt_index + 1) * samples)
            if n < samples:
                best = sorted(outputs, key=lambda choice: -self.results[choice].mean_logprob())
                outputs = best[:n]  # type: ignore[assignment]
            for choice in outputs:
                choices.append(self.whole(len(choices), choice, self.results[choice]))
                reports.append(self.report_object(self.results[choice].report))
        rotary = self._attach_reports(choices, reports)
        return {
            **self.envelope,
            "choices": choices,
            **self.extra_fields(),
            **rotary,
            "usage": usage_object(self.token_usage),
        }

    def _attach_reports(self, choices: list[dict[str, Any]], reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """The top level's `rotary`, the first choice's; where the choices differ, each gets its own too."""
        first = reports[0]
        if any(report != first for report in reports):
            for choice, report in zip(choices, reports, strict=True):
                if report is not None:
                    choice["rotary"] = report
        return {} if first is None else {"rotary": first}

    def count_bytes(self, size: int) -> None:
        """Count bytes that are kept. Raises ApiError where they become too many."""
        self.size += size
        if self.size > self.options.max_bytes:
            raise response_too_large(self.size, self.options.max_bytes, grown=True)

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Lay out a prompt's log-probabilities. Slow for long prompts: call it beside the event loop."""
        if self.options.prompt_logprobs is not None:
            found = self.prompt_objects[prompt_index] = JsonList()
            for piece in in_batches(entries):
                found.extend(prompt_logprobs_object(self.tokenizer, piece, self.options.prompt_logprobs))
            self.count_bytes(found.size)


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
    """The items, as many at once as are written in one go."""
    for start in range(0, len(items), ITEMS_PER_WRITE):
        yield items[start : start + ITEMS_PER_WRITE]


# Bytes of JSON per token, for vocabularies whose tokens have about six characters and log-probabilities of 18 digits.
TEXT = 6

TOKEN_ID = 6

COMPLETION_LOGPROBS = 42  # its text, its own log-probability, its offset, and the braces of its alternatives

COMPLETION_ALTERNATIVE = 32

CHAT_LOGPROBS = 25

CHAT_ALTERNATIVE = 90  # text, log-probability and bytes

PROMPT_LOGPROBS = 3

PROMPT_ALTERNATIVE = 72  # id, log-probability, rank and text


def estimate_bytes(
    options: ResponseOptions, lengths: Iterable[tuple[int, int]], *, chat: bool, echo: bool, stream: bool
) -> int:
    """Bytes of the answer, or of what a stream keeps for its first events.

    lengths: per prompt its tokens and the most that may be generated.
    """
    logprobs, prompt_logprobs = options.logprobs, options.prompt_logprobs
    token = 0
    if logprobs is not None:
        each, alternative = (CHAT_LOGPROBS, CHAT_ALTERNATIVE) if chat else (COMPLETION_LOGPROBS, COMPLETION_ALTERNATIVE)
        token = each + alternative * (logprobs + 1)
    ids = TOKEN_ID if options.return_token_ids else 0
    of_prompt = ids + (TEXT + token if echo else 0)
    if prompt_logprobs is not None:
        of_prompt += PROMPT_LOGPROBS + PROMPT_ALTERNATIVE * (prompt_logprobs + 1)
    of_generated = TEXT + ids + token
    if stream:
        return sum(of_prompt * prompt for prompt, _ in lengths)
    return sum(options.n * of_prompt * prompt + options.samples * of_generated * most for prompt, most in lengths)
