"""Calls of Qwen3-Coder: a tag for the function and one for each parameter, whose values stand between them as text."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from windlass.server.text.parsing.stream import MAX_NAME, Reading, StreamParser, as_json

_NAME = re.compile(r"[^<>\s=]")
_CONSTANTS = {"True": True, "False": False, "None": None}


class XmlParametersParser(StreamParser):
    """A value is text where the schema says so, else the JSON it is, and text where it is none."""

    def run(self) -> Reading:
        while marker := (yield from self.until(("<tool_call>", "<function="), self.say)):
            if marker == "<tool_call>":
                yield from self.space()
                if not (yield from self.literal("<function=")):
                    self.give_back()
                    continue
            name = yield from self._name()
            if not name:
                self.give_back()
                continue
            self.begin_call(name)
            yield from self._parameters(self.options.schemas.get(name, {}))
            if not (yield from self.peek()):
                self.forget()  # the answer ended within a tag
            self.give_back()

    def _name(self) -> Generator[None, None, str]:
        """A name and the `>` behind it; empty where it is none."""
        name = yield from self.run_of(_NAME)
        return name if len(name) < MAX_NAME and (yield from self.literal(">")) else ""

    def _parameters(self, schema: Mapping[str, Any]) -> Generator[None, None, None]:
        self.argue("{")
        self.forget()
        written: set[str] = set()
        while True:
            yield from self.space()
            if not (yield from self.literal("<parameter=")):
                break
            name = yield from self._name()
            parts: list[str] = []
            if not name:
                return
            if not (yield from self.until(("</parameter>",), parts.append)):
                self.forget()  # the answer ended within a value
                return
            if name not in written:
                before = ", " if written else ""
                written.add(name)
                value = "".join(parts).removeprefix("\n").removesuffix("\n")
                self.argue(f"{before}{json.dumps(name)}: {_as_json(value, _type(schema, name))}")
            self.forget()
        closed = yield from self.literal("</function>")
        if not closed and self.take_cut_tag(("<parameter=", "</function>")):
            return
        self.argue("}")
        if closed:
            self.end_call()
            yield from self.space()
            yield from self.literal("</tool_call>")
            self.forget()


def _type(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found.get("type") if isinstance(found, Mapping) else None


def _as_json(text: str, kind: Any) -> str:
    if kind != "string":
        try:
            return as_json(_CONSTANTS[text] if text in _CONSTANTS else json.loads(text))
        except (ValueError, RecursionError):
            pass
    return json.dumps(text)


def no_grammar(forced: object) -> None:
    """Values that are text cannot be held to a schema."""
