"""Calls that are written as JSON objects with a name and arguments, in whichever order."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from windlass.server.text.parsing.stream import StreamParser

_SCALAR = re.compile(r"[0-9A-Za-z+\-.]")


@dataclass(slots=True)
class _CallHead:
    """What is known of a call object before its arguments can be passed on."""

    name: str | None = None
    arguments: list[str] | None = None  # those that came before the name
    begun: bool = False


class JsonCallParser(StreamParser):
    """What parsers of such calls have in common."""

    def call_object(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take {"name": …, "arguments": {…}} and make the call; False where it is none.

        known_only: only functions on offer count, where nothing else tells a call from other JSON.
        What was taken of a call that was made is forgotten; what was taken otherwise can be given back.
        """
        head = _CallHead()
        made = yield from self._call_object(head, known_only)
        if made:
            self.forget()
        return made

    def _call_object(self, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        if (yield from self.peek()) != "{":
            return False
        self.take(1)
        while True:
            yield from self.space()
            if (yield from self.literal("}")):
                break
            key = yield from self.string()
            yield from self.space()
            if key is None or not (yield from self.literal(":")):
                return head.begun
            yield from self.space()
            if not (yield from self._member(key, head, known_only)):
                return head.begun
            yield from self.space()
            if not (yield from self.literal(",")):
                if (yield from self.literal("}")):
                    break
                return head.begun
        if not head.begun:
            if not head.name:
                return False
            self.begin_call(head.name)
            self.argue("".join(head.arguments) if head.arguments is not None else "{}")
            self.end_call()
        return True

    def _member(self, key: str, head: _CallHead, known_only: bool) -> Generator[None, None, bool]:
        character = yield from self.peek()
        if key == "name":
            name = yield from self.string()
            known = name in self.options.schemas if known_only else self.may_call(name)
            if not known or head.name is not None:
                return False
            head.name = name
            return True
        if key not in ("arguments", "parameters") or head.begun or head.arguments is not None:
            return (yield from self._skip(character))
        if character == "{":
            return (yield from self._members_of_arguments(head))
        if character == '"':  # JSON within JSON
            inner = yield from self.string()
            head.arguments = None if inner is None else [inner.strip() or "{}"]
            return inner is not None and inner.lstrip()[:1] in ("{", "")
        return bool((yield from self.literal("null")))

    def _members_of_arguments(self, head: _CallHead) -> Generator[None, None, bool]:
        if head.name is None:
            head.arguments = []
            return (yield from self.bracketed(head.arguments.append))
        if not (yield from self.opens_object()):
            return False
        self.begin_call(head.name)
        head.begun = True
        return (yield from self.take_arguments())

    def _skip(self, first: str) -> Generator[None, None, bool]:
        """Take a value of no interest."""
        if first == '"':
            return (yield from self.string()) is not None
        if first and first in "{[":
            return (yield from self.bracketed(lambda text: None))
        return bool((yield from self.run_of(_SCALAR)))

    def call_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """Take one call object or an array of them; False where not even one call was made. See `call_object`."""
        if (yield from self.peek()) != "[":
            return (yield from self.call_object(known_only))
        self.take(1)
        return (yield from self.rest_of_list(known_only))

    def rest_of_list(self, known_only: bool = False) -> Generator[None, None, bool]:
        """The same behind the bracket that opens an array."""
        made = False
        while True:
            yield from self.space()
            if not (yield from self.call_object(known_only)):
                return made
            made = True
            yield from self.space()
            if not (yield from self.literal(",")):
                if (yield from self.literal("]")):
                    self.forget()
                return made
