"""Calls of LFM2: a list of them in Python between two markers, or in JSON where a prompt asks for that."""

from __future__ import annotations

from windlass.server.text.parsing.json_calls import JsonCallParser
from windlass.server.text.parsing.stream import Reading
from windlass.server.text.parsing.tools.pythonic import PythonicParser

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
MARKERS = frozenset({BEGIN, END})


class Lfm2Parser(PythonicParser, JsonCallParser):
    """`<|tool_call_start|>[look(city="Rome")]<|tool_call_end|>`, anywhere in the text, whatever function it names."""

    def run(self) -> Reading:
        while (yield from self.until((BEGIN,), self.say)):
            yield from self.space()
            is_list = yield from self.literal("[")
            yield from self.space()
            if (yield from self.peek()) != "{":
                if is_list:
                    yield from self.rest_of_calls(END)
            elif (yield from (self.rest_of_list() if is_list else self.call_object())):
                yield from self.space()
                yield from self.literal(END)
                self.forget()
            self.give_back()

    def is_call(self, name: str) -> bool:
        return self.may_call(name)
