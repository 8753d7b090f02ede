"""Mistral's calls: `[TOOL_CALLS]` and a JSON list, or in newer models `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from collections.abc import Generator

from windlass.server.text.parsing.json_calls import JsonCallParser
from windlass.server.text.parsing.stream import Reading

_NAME = re.compile(r"[\w.\-]")


class MistralParser(JsonCallParser):
    """Both forms, told apart by what stands behind the marker."""

    def run(self) -> Reading:
        while (yield from self.until(("[TOOL_CALLS]",), self.say)):
            yield from self.space()
            character = yield from self.peek()
            if character and character in "[{":
                yield from self.call_list()
            else:
                yield from self._named()
            self.give_back()

    def _named(self) -> Generator[None, None, None]:
        name = yield from self.run_of(_NAME)
        if (yield from self.literal("[CALL_ID]")):
            yield from self.run_of(_NAME)
        yield from self.literal("[ARGS]")
        yield from self.space()
        if self.may_call(name) and (yield from self.opens_object()):
            self.begin_call(name)
            yield from self.take_arguments()
            self.forget()
