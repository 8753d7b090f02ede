"""Calls as JSON objects behind a marker: Hermes and Qwen (`<tool_call>`), Granite (`<|tool_call|>` and a list)."""

from __future__ import annotations

from typing import ClassVar

from windlass.server.text.parsing.json_calls import JsonCallParser
from windlass.server.text.parsing.stream import Reading


class TaggedJsonParser(JsonCallParser):
    """Each marker is followed by a call object or a list of them, and perhaps by a closing marker."""

    openers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<|tool_call|>")
    closers: ClassVar[tuple[str, ...]] = ("</tool_call>", "<|/tool_call|>")

    def run(self) -> Reading:
        while (yield from self.until(self.openers, self.say)):
            yield from self.space()
            made = yield from self.call_list()
            self.give_back()
            if made:
                yield from self.space()
                yield from self.literal(*self.closers)
                self.forget()
