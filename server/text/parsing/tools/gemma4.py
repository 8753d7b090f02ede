"""Calls of Gemma 4: JSON without quotes around the names of members, and with a token of its own around strings."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from windlass.server.text.parsing.stream import Reading, StreamParser, as_json
from windlass.server.text.parsing.tools.xml_parameters import ANY_KIND, kinds_of, typed_json

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = frozenset({BEGIN, END, QUOTE})

_NAME = re.compile(r"[^\s{}<]")
_KEY = re.compile(r"[^:,{}\[\]<]")
_QUOTED_KEY = re.compile(r"[^<]")
_CLOSING = {"{": "}", "[": "]"}

_Kinds = dict[str, frozenset[str]]


class Gemma4Parser(StreamParser):
    """`<|tool_call>call:look{city:<|"|>Rome<|"|>,days:3}<tool_call|>` becomes JSON as it comes, strings piece by piece.

    Strings and names in the quotes of JSON are read, too, as models slip into it. What has no quotes is the JSON that it is,
    and text where it is none, or where the schema permits only text. The marker at the end closes all that is open.
    """

    def run(self) -> Reading:
        known: dict[str, _Kinds] = {}  # types of parameters that were written, by function
        while (yield from self.until((BEGIN,), self.say)):
            yield from self.space()
            name = yield from self._name()
            if not self.may_call(name):
                self.give_back()
                continue
            self.begin_call(name)
            yield from self._arguments(self.options.schemas.get(name, {}), known.setdefault(name, {}))

    def _name(self) -> Generator[None, None, str]:
        """A name and the `{` behind it, which is not taken; empty where it is none."""
        if not (yield from self.literal("call:", ":")):
            return ""
        name = yield from self.run_of(_NAME)
        yield from self.space()
        return name if (yield from self.literal("{")) else ""

    def _arguments(self, schema: Mapping[str, Any], known: _Kinds) -> Generator[None, None, None]:
        closing = ["}"]
        before = ""
        self.argue("{")
        self.forget()
        while closing:
            yield from self.space()
            found = yield from self.literal(closing[-1], END)
            if found == END:
                self._close(closing)
                return
            if found:
                self.argue(closing.pop())
                before = ", "
            else:
                depth = len(closing)
                if not (yield from self._member(closing, before, schema, known)):
                    break
                before = "" if len(closing) > depth else ", "
            self.forget()
            if closing:
                yield from self.space()
                yield from self.literal(",")
        if closing and not (yield from self.peek()):  # the answer ended within the call
            self.forget()
            return
        broken = bool(closing)
        self._close(closing)
        if broken:
            self.give_back()
            return
        yield from self.space()
        yield from self.literal(END)
        self.forget()

    def _close(self, closing: list[str]) -> None:
        self.argue("".join(reversed(closing)))
        closing.clear()
        self.end_call()

    def _member(
        self, closing: list[str], before: str, schema: Mapping[str, Any], known: _Kinds
    ) -> Generator[None, None, bool]:
        """Take a member of the object, or of the list, that is open; of one that opens another only its beginning.

        False where there is none, and nothing was passed on; also where the text ends within a string.
        """
        kinds = ANY_KIND
        if closing[-1] == "}":
            name = yield from self._key()
            if name is None:
                return False
            before += f"{json.dumps(name)}: "
            yield from self.space()
            if len(closing) == 1:
                kinds = known[name] if name in known else known.setdefault(name, kinds_of(schema, name))
        found = yield from self.literal(QUOTE, *_CLOSING)
        if found == QUOTE:
            self.argue(f'{before}"')
            end = yield from self.until((QUOTE, END), lambda piece: self.argue(json.dumps(piece)[1:-1]))
            if end:
                self.argue('"')
            if end == END:
                self.put_back(len(END))
            return bool(end)
        if found:
            self.argue(before + found)
            closing.append(_CLOSING[found])
            return True
        value = yield from self._bare(kinds)
        if value:
            self.argue(before + value)
        return bool(value)

    def _key(self) -> Generator[None, None, str | None]:
        """A name and the colon behind it; None where there is none."""
        name: str | None
        if (yield from self.literal(QUOTE)):
            name = yield from self.run_of(_QUOTED_KEY)
            if not (yield from self.literal(QUOTE)):
                return None
        elif (yield from self.peek()) == '"':
            name = yield from self.string()
        else:
            name = (yield from self.run_of(_KEY)).strip() or None
        yield from self.space()
        return name if (yield from self.literal(":")) else None

    def _bare(self, kinds: frozenset[str]) -> Generator[None, None, str]:
        """The JSON of a value without quotes of its own kind; empty where there is none, or it breaks off."""
        if (yield from self.peek()) == '"':
            text = yield from self.string()
            return "" if text is None else as_json(text)
        parts: list[str] = []
        end = yield from self.until((",", "}", "]", QUOTE, END), parts.append)
        if not end:
            return ""
        if end != QUOTE:  # a string that is only closed
            self.put_back(len(end))
        value = "".join(parts).strip()
        return typed_json(value, kinds) if value else ""
