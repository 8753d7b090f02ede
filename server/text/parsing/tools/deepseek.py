"""DeepSeek's calls: V3 and R1 write a kind, a name and fenced JSON, V3.1 a name and JSON."""

from __future__ import annotations

import re
from collections.abc import Generator

from windlass.server.text.parsing.stream import MAX_NAME, Reading, StreamParser

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = frozenset({CALLS, CALLS_END, CALL, CALL_END, SEPARATOR})

_NAME = re.compile(r"[^\s<{]")


class DeepSeekParser(StreamParser):
    """Both forms; what stands behind the separator tells them apart."""

    def run(self) -> Reading:
        while marker := (yield from self.until((CALLS, CALL), self.say)):
            if marker == CALLS:
                yield from self.space()
                if not (yield from self.literal(CALL)):
                    self.give_back()
                    continue
            made = yield from self._call()
            self.give_back()
            if made:
                yield from self.space()
                yield from self.literal("```")
                yield from self.space()
                yield from self.literal(CALL_END)
                yield from self.space()
                yield from self.literal(CALLS_END)
                self.forget()

    def _call(self) -> Generator[None, None, bool]:
        yield from self.space()
        name = yield from self.run_of(_NAME)
        if not (yield from self.literal(SEPARATOR)):
            return False
        yield from self.space()
        if (yield from self.peek()) != "{":  # the first word was the kind
            name = yield from self.run_of(_NAME)
            yield from self.space()
            yield from self.literal("```json")
            yield from self.space()
        if len(name) == MAX_NAME or not self.may_call(name) or not (yield from self.opens_object()):
            return False
        self.begin_call(name)
        yield from self.take_arguments()
        self.forget()
        return True
