"""Conformance client: greedy completions with log-probabilities of any OpenAI-compatible server, in bounded time, and their comparison."""

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
from windlass.clients.terminal.errors import CommandError

MAX_TIE_SHARE = (
    0.2  # share of greedy tokens that may differ where only texts can be compared: near ties, not another rotation
)


class CheckUnavailableError(Exception):
    """This server cannot be asked this; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy step: its token's text, and the log-probabilities (nats) of the likeliest tokens by text.

    `top` is empty where the server offers no log-probabilities.
    """

    token: str
    top: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer.

    cached: prompt tokens the server says it did not compute, None where it does not say.
    times: seconds of a monotonic clock at which each part of the stream arrived.
    """

    text: str
    steps: tuple[Step, ...]
    prompt_tokens: int
    cached: int | None
    times: tuple[float, ...] = ()


def distance(one: Step, other: Step) -> float:
    """The largest change of a log-probability between two steps, in nats; a lower bound where the lists differ.

    A token in only one of the lists has, in the other, at most the least value listed there. A tie can choose either
    token without changing any log-probability, so the chosen tokens themselves are not compared.
    """
    far = 0.0
    for mine, theirs in ((one.top, other.top), (other.top, one.top)):
        least = min(theirs.values())
        for token, value in mine.items():
            far = max(far, abs(value - theirs[token]) if token in theirs else value - least)
    return far


@dataclass(slots=True)
class Agreement:
    """What was compared: the greatest distance (nats), and of how many steps how many chose another token."""

    far: float = 0.0
    compared: int = 0
    parted: int = 0

    @classmethod
    def between(cls, one: Answer, other: Answer) -> Agreement:
        """Of two answers to one prompt, see `answers`."""
        agreement = cls()
        agreement.answers(one, other)
        return agreement

    def step(self, one: Step, other: Step) -> None:
        self.compared += 1
        self.parted += one.token != other.token
        if one.top and other.top:
            self.far = max(self.far, distance(one, other))

    def answers(self, one: Answer, other: Answer) -> None:
        """Two answers to one prompt, up to the first step after their texts part."""
        for mine, theirs in zip(one.steps, other.steps, strict=False):
            self.step(mine, theirs)
            if mine.token != theirs.token:
                break


def overlap(one: Answer, other: Answer) -> bool:
    """Whether the answers are shown to have been generated at the same time: their parts arrived interleaved."""

    def between(inner: Answer, outer: Answer) -> bool:
        return any(outer.times[0] < time < outer.times[-1] for time in inner.times)

    return bool(one.times and other.times) and (between(one, other) or between(other, one))


@dataclass(slots=True)
class AnswerParser:
    """Puts an answer together from the parts of a stream, or from a whole answer as the one part."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def part(self, body: Any, time: float) -> None:
        """One JSON object as OpenAI's completions have it, in vLLM's or llama.cpp's way with log-probabilities."""
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
            raise CheckUnavailableError(f"the answer is no completion as OpenAI has it ({error!r})") from None

    def whole(self, *, by_text: bool) -> Answer:
        """The answer. by_text: this server offers no log-probabilities, so each piece of text counts as a step."""
        try:
            prompt = int(self.usage["prompt_tokens"])
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckUnavailableError(f"the answer has no usage with prompt_tokens ({error!r})") from None
        steps = [Step(piece, {}) for piece in self.pieces] if by_text else self.steps
        if not steps:
            raise CheckUnavailableError("the answer is empty: the model ended it at once")
        return Answer(self.text, tuple(steps), prompt, cached, tuple(self.times))


def _steps(given: dict[str, Any]) -> list[Step]:
    if isinstance(given.get("content"), list):  # llama.cpp answers in the form of chats
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
        raise CheckUnavailableError(
            "a log-probability of the answer is no finite number, so nothing can be compared with it"
        )
    return steps


TOP = 5

# Sent until the server refuses a body that has them. Without stream_options, usage may still come.
OPTIONAL = ("cache_salt", "cache_prompt", "ignore_eos", "logprobs", "stream_options")


class ConformanceClient:
    """One model of one server, asked over /v1/completions with text prompts. Safe to use from several threads.

    timeout: seconds for one request. time_limit: seconds for all of them; past it nothing more is asked.
    by_text: whether the server turned out to offer no log-probabilities, so that only texts can be compared.
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
        # A connection each: a server may close one that it kept just when the next request is sent.
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
                body = b"".join(_until(end, reply, "it did not tell its models in time"))
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
        """The longest context in tokens, where /v1/models tells it in vLLM's or llama.cpp's way."""
        return self._card_value("max_model_len", "n_ctx")

    def trained(self) -> int | None:
        """The positions the model was trained on, where /v1/models tells them in Windlass's or llama.cpp's way."""
        return self._card_value("trained_len", "n_ctx_train")

    def _card_value(self, name: str, in_meta: str) -> int | None:
        meta = self.card.get("meta")
        for value in (self.card.get(name), meta.get(in_meta) if isinstance(meta, dict) else None):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def ask(self, prompt: str, tokens: int, *, fresh: bool = False, began: Event | None = None) -> Answer:
        """The greedy answer of at most `tokens` tokens.

        fresh: ask that no earlier request's cache be used. began: is set when the first part of the answer arrives.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        extras: dict[str, Any] = {
            "logprobs": TOP,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        if fresh:
            extras.update(cache_salt=secrets.token_hex(8), cache_prompt=False)
        unsure: set[str] = set()  # left out for an error that names none of them
        while True:
            sent = {name: value for name, value in extras.items() if name in self._optional - unsure}
            reader, status, error_text = self._send(body | sent, began)
            if status in (400, 422) and sent:
                named = [name for name in sent if name in error_text]
                if named:
                    self._optional -= set(named)
                else:
                    unsure = set(sent)  # an error of another kind comes again without them: then they stay
                continue
            break
        if status == 200:
            self._optional -= unsure
        if status in (401, 403):
            raise CommandError("the server refuses the key: give --api-key")
        if status != 200:
            raise CheckUnavailableError(f"status {status}: {error_text[:200]}")
        if self.by_text is None:
            self.by_text = not reader.steps
        return reader.whole(by_text=self.by_text)

    def _send(self, body: dict[str, Any], began: Event | None) -> tuple[AnswerParser, int, str]:
        """What was read of the answer, the status, and the text of an error."""
        end = min(self._end, time.monotonic() + self._timeout)
        late = "the time of the run is used up: give a longer --time-limit"
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
            raise CheckUnavailableError(f"the answer is no JSON ({error})") from None
        return reader, 200, ""


def _until(end: float, reply: httpx.Response, late: str) -> Iterator[bytes]:
    """The body as it arrives. Raises CheckUnavailableError, saying `late`, once more of it comes after `end`."""
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
