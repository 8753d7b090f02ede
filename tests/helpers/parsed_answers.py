"""Combined events of output parsers: content, reasoning and calls."""

from __future__ import annotations

import itertools
from typing import Any

from windlass.server.text.stream_parser import (
    CallOptions,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from windlass.server.text.tool_parsers.formats import FORMATS

SCHEMAS: dict[str, Any] = {"look": {"type": "object", "properties": {"city": {}, "days": {}}}, "find": {}}

Made = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls as name and arguments


def numbered(**options: Any) -> CallOptions:
    """Return options that number the ids of calls."""
    ids = (f"call_{number}" for number in itertools.count())
    return CallOptions(schemas=SCHEMAS, new_id=lambda: next(ids), **options)


def make(name: str, **options: Any) -> OutputParser:
    """Return a parser of the named format."""
    return FORMATS[name].parser(numbered(**options))


def put_together(events: list[Event]) -> Made:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Content):
            assert event.text
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls) and event.id == f"call_{len(calls)}"
            calls.append((event.name, ""))
        else:
            assert event.index == len(calls) - 1 and event.text
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, reasoning, calls


def read(parser: OutputParser, *pieces: str) -> Made:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return put_together(events + parser.finish())


def only(*calls: tuple[str, str]) -> Made:
    return "", "", list(calls)
