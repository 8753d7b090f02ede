"""What an answer of a server is, how it is read, and how far two are apart. Sends nothing and knows no check."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

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
