"""What a parser finds in the text of an answer, and what every parser can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever reads the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of the answer, from 0. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Reads one sample's text in pieces of any size. The events put together never depend on the pieces.

    in_call: whether the arguments of a call have begun and not yet been closed.
    """

    @property
    def in_call(self) -> bool: ...

    def feed(self, text: str) -> list[Event]:
        """What has become certain with `text`."""

    def finish(self) -> list[Event]:
        """What was held back, once nothing more comes. Call it once."""


@runtime_checkable
class TellsThinking(Protocol):
    """A parser that knows where it stands, for counting the tokens of the thinking.

    thinking: whether what comes next is thinking, or may turn out to open it. thought: whether there was any thinking.
    """

    @property
    def thinking(self) -> bool: ...

    @property
    def thought(self) -> bool: ...


class PlainText:
    """The parser of answers in which nothing is looked for."""

    in_call = False

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class ParsingPlan:
    """How the answers to one request are parsed.

    make: a new parser, one for each sample.
    markers: text of special tokens that the parser has to see, even where a reader of the answer shall not.
    older_functions: whether a call is laid out as `function_call`, as OpenAI did before there were tools.
    """

    make: Callable[[], OutputParser]
    markers: frozenset[str] = frozenset()
    older_functions: bool = False
