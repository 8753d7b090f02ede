"""Conformance client: greedy completions with log-probabilities from any OpenAI-compatible server, and their comparison.

Time is bounded for each request and for all of them.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx

from windlass.clients.sse import SSEDecoder
from windlass.clients.terminal import CommandError

# Where only texts can be compared, this share of greedy tokens may differ by near ties, without another rotation.
MAX_TIE_SHARE = 0.2


class CheckUnavailableError(Exception):
    """The server does not support a check; the message gives the reason and what would help."""


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy step: its token's text, and the log-probabilities (nats) of the most likely tokens by text.

    `top` is empty if the server offers no log-probabilities.
    """

    token: str
    top: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer.

    cached: prompt tokens that the server reports as cached, None if it does not report them.
    times: seconds of a monotonic clock at which each part of the stream arrived.
    """

    text: str
    steps: tuple[Step, ...]
    prompt_tokens: int
    cached: int | None
    times: tuple[float, ...] = ()


def distance(one: Step, other: Step) -> float:
    """The largest change of a log-probability between two steps, in nats; a lower bound where the lists differ.

    A token in only one list has at most the lowest listed value in the other. The chosen tokens themselves are not compared,
    because a tie can choose either without changing a log-probability.
    """
    largest = 0.0
    for first, second in ((one.top, other.top), (other.top, one.top)):
        lowest = min(second.values())
        for token, value in first.items():
            largest = max(largest, abs(value - second[token]) if token in second else value - lowest)
    return largest


@dataclass(slots=True)
class Agreement:
    """A comparison: the largest distance (nats), the number of steps, and the number of those whose tokens differ."""

    max_distance: float = 0.0
    compared: int = 0
    parted: int = 0

    @classmethod
    def between(cls, one: Answer, other: Answer) -> Agreement:
        """Compare two answers to one prompt, as `answers`."""
        agreement = cls()
        agreement.answers(one, other)
        return agreement

    def step(self, one: Step, other: Step) -> None:
        self.compared += 1
        self.parted += one.token != other.token
        if one.top and other.top:
            self.max_distance = max(self.max_distance, distance(one, other))

    def answers(self, one: Answer, other: Answer) -> None:
        """Compare two answers to one prompt, up to the first step whose tokens differ."""
        for first, second in zip(one.steps, other.steps, strict=False):
            self.step(first, second)
            if first.token != second.token:
                break


def overlap(one: Answer, other: Answer) -> bool:
    """Whether the parts of the answers arrived interleaved, which shows that they were generated at the same time."""

    def between(inner: Answer, outer: Answer) -> bool:
        return any(outer.times[0] < time < outer.times[-1] for time in inner.times)

    return bool(one.times and other.times) and (between(one, other) or between(other, one))


@dataclass(slots=True)
class AnswerParser:
    """Builds an answer from the parts of a stream, or from one complete body."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def part(self, body: Any, time: float) -> None:
        """Add one JSON object of OpenAI's completions API, with log-probabilities as vLLM or llama.cpp send them."""
        try:
            if body.get("error"):
                raise CheckUnavailableError(f"the stream ended with an error: {str(body['error'])[:200]}")
            self.usage = body.get("usage") or self.usage
            for choice in body.get("choices") or []:
                piece = choice.get("text") or ""
                steps = _steps(choice.get("logprobs") or {})
                self.text += piece
                self.steps += steps
                self.pieces += [piece] if piece else []
                self.times += [time] if piece or steps else []
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckUnavailableError(f"the answer is not a completion of OpenAI's API ({error!r})") from None

    def finish(self, *, by_text: bool) -> Answer:
        """The answer. by_text: the server offers no log-probabilities, so each piece of text counts as a step."""
        try:
            prompt = int(self.usage["prompt_tokens"])
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckUnavailableError(f"the answer has no usage with prompt_tokens ({error!r})") from None
        steps = [Step(piece, {}) for piece in self.pieces] if by_text else self.steps
        if not steps:
            raise CheckUnavailableError("the answer is empty: the model ended it immediately")
        return Answer(self.text, tuple(steps), prompt, cached, tuple(self.times))


def _steps(given: dict[str, Any]) -> list[Step]:
    if isinstance(given.get("content"), list):  # llama.cpp uses the form of chat completions
        steps = [
            Step(one["token"], {top["token"]: float(top["logprob"]) for top in one["top_logprobs"]})
            for one in given["content"]
        ]
    else:
        tops = given.get("top_logprobs") or []
        steps = [
            Step(token, {name: float(value) for name, value in top.items()})
            for token, top in zip(given.get("tokens") or [], tops, strict=True)
        ]
    if any(not step.top for step in steps):
        raise CheckUnavailableError("a step of the answer has no top_logprobs")
    if not all(math.isfinite(value) for step in steps for value in step.top.values()):
        raise CheckUnavailableError("a log-probability of the answer is not finite, so it cannot be compared")
    return steps


TOP = 5

# Sent until the server rejects them. Without stream_options, usage may still be sent.
OPTIONAL = ("cache_salt", "cache_prompt", "ignore_eos", "logprobs", "stream_options")


class ConformanceClient:
    """Completions of one model of one server (/v1/completions with text prompts). Thread-safe.

    timeout: seconds per request. time_limit: seconds for all requests together. by_text: whether the server offers no
    log-probabilities, so that only texts can be compared; None before the first answer.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        timeout: float,
        client: httpx.Client | None = None,
        *,
        time_limit: float = float("inf"),
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # One connection per request: a server may close an idle one just when the next request is sent.
        self._http = client or httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._http.headers.update(headers)
        self._timeout, self._end = timeout, time.monotonic() + time_limit
        self._optional = set(OPTIONAL)
        self.by_text: bool | None = None
        self.card = self._find(model)
        self.model: str = self.card["id"]

    def close(self) -> None:
        self._http.close()

    def _find(self, model: str | None) -> dict[str, Any]:
        end = min(self._end, time.monotonic() + self._timeout)
        try:
            with self._http.stream("GET", self._base + "/models", timeout=self._timeout) as reply:
                body = b"".join(_until(end, reply, "it did not list its models in time"))
            cards = json.loads(body)["data"] if reply.status_code == 200 else []
            cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (httpx.HTTPError, httpx.InvalidURL, CheckUnavailableError) as error:
            raise CommandError(f"no server answers at {self._base}: {error}; give the address it listens on") from None
        except (ValueError, KeyError, TypeError):
            cards = []
        if model is None and not cards:
            raise CommandError(
                f"{self._base}/models lists no model (status {reply.status_code}): give --model, and --api-key where needed"
            )
        found = [card for card in cards if model in (None, card["id"])]
        return found[0] if found else {"id": model}

    def context(self) -> int | None:
        """The longest context in tokens, if /v1/models reports it as vLLM or llama.cpp do."""
        return self._card_value("max_model_len", "n_ctx")

    def trained(self) -> int | None:
        """The trained length in tokens, if /v1/models reports it as Windlass or llama.cpp do."""
        return self._card_value("trained_len", "n_ctx_train")

    def _card_value(self, name: str, in_meta: str) -> int | None:
        meta = self.card.get("meta")
        for value in (self.card.get(name), meta.get(in_meta) if isinstance(meta, dict) else None):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def ask(self, prompt: str, tokens: int, *, fresh: bool = False, began: Event | None = None) -> Answer:
        """The greedy answer of at most `tokens` tokens.

        fresh: request that no cache of an earlier request is used. began: set when the first part of the answer arrives.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        extras: dict[str, Any] = {"logprobs": TOP, "ignore_eos": True, "stream_options": {"include_usage": True}}
        if fresh:
            extras.update(cache_salt=secrets.token_hex(8), cache_prompt=False)
        unsure: set[str] = set()  # left out after an error that names none of them
        while True:
            sent = {name: value for name, value in extras.items() if name in self._optional - unsure}
            reader, status, error_text = self._send(body | sent, began)
            if status in (400, 422) and sent:
                named = [name for name in sent if name in error_text]
                if named:
                    self._optional -= set(named)
                else:
                    unsure = set(sent)  # if the error persists without them, they are sent again later
                continue
            break
        if status == 200:
            self._optional -= unsure
        if status in (401, 403):
            raise CommandError("the server rejects the key: give --api-key")
        if status != 200:
            raise CheckUnavailableError(f"status {status}: {error_text[:200]}")
        if self.by_text is None:
            self.by_text = not reader.steps
        return reader.finish(by_text=self.by_text)

    def _send(self, body: dict[str, Any], began: Event | None) -> tuple[AnswerParser, int, str]:
        """The parsed answer, the status, and the text of an error."""
        end = min(self._end, time.monotonic() + self._timeout)
        late = "the time limit of the run is exceeded: give a longer --time-limit"
        if end <= time.monotonic():
            raise CheckUnavailableError(late)
        if end != self._end:
            late = "the server did not answer in time: give a longer --timeout"
        reader = AnswerParser()
        wait = end - time.monotonic()
        try:
            with self._http.stream("POST", self._base + "/completions", json=body, timeout=wait) as reply:
                chunks = _until(end, reply, late)
                if reply.status_code != 200:
                    return reader, reply.status_code, b"".join(chunks).decode("utf-8", "replace")
                streams = "event-stream" in reply.headers.get("content-type", "")
                for part in _parts(chunks) if streams else [json.loads(b"".join(chunks))]:
                    reader.part(part, time.monotonic())
                    if began is not None and reader.times:
                        began.set()
        except httpx.TimeoutException:
            raise CheckUnavailableError(late) from None
        except httpx.HTTPError as error:
            raise CommandError(f"the server at {self._base} stopped answering: {error}") from None
        except ValueError as error:
            raise CheckUnavailableError(f"the answer is not JSON ({error})") from None
        return reader, 200, ""


def _until(end: float, reply: httpx.Response, late: str) -> Iterator[bytes]:
    """The body as it arrives. Raises CheckUnavailableError(late) for data that arrives after `end`."""
    for chunk in reply.iter_bytes():
        if time.monotonic() > end:
            raise CheckUnavailableError(late)
        yield chunk


def _parts(chunks: Iterable[bytes]) -> Iterator[Any]:
    """The JSON objects of a stream as they arrive."""
    decoder = SSEDecoder()
    for chunk in chunks:
        for event in decoder.feed(chunk):
            if event.data != "[DONE]":
                yield json.loads(event.data)
