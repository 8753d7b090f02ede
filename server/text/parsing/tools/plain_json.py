"""Calls as bare JSON: Llama 3's own form, and the form asked for where a model's template knows none."""

from __future__ import annotations

from typing import ClassVar

from windlass.server.text.parsing.json_calls import JsonCallParser
from windlass.server.text.parsing.stream import Reading


class PlainJsonParser(JsonCallParser):
    """A JSON object at the start of the text or of a line is a call if it names a function on offer, else content."""

    markers: ClassVar[tuple[str, ...]] = ("\n{", "\n[", "\n```json")
    tag: ClassVar[str] = "```json"

    def run(self) -> Reading:
        marker = yield from self.literal(self.tag)
        while True:
            while True:
                yield from self.space()
                made = yield from self.call_list(known_only=True)
                if self.give_back() or not made:  # behind a call there may be something that is none
                    break
                yield from self.space()
                if (yield from self.literal(";", ",")):  # Llama 3 puts it between calls
                    yield from self.space()
                elif marker.endswith(self.tag):
                    yield from self.literal("```")
                self.forget()
                if (yield from self.peek()) not in ("{", "["):
                    break
            marker = yield from self.until(self.markers, self.say)
            if not marker:
                return
            if marker in ("\n{", "\n["):
                self.put_back(1)


class Llama3JsonParser(PlainJsonParser):
    """The same behind `<|python_tag|>` or at the start of the text only."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    tag: ClassVar[str] = "<|python_tag|>"
