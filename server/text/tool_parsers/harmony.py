"""The harmony format of gpt-oss: messages in channels."""

from __future__ import annotations

import re
from collections.abc import Generator

from windlass.server.text.stream_parser import CallOptions, ParsingPlan, Reading, StreamParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"

ENDS = ("<|end|>", "<|call|>", "<|return|>")

CONSTRAIN = "<|constrain|>"

MARKERS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})

MAX_HEADER = 512

_CALLED = re.compile(r"\bto=functions\.([^\s<]{1,256})")

_RECIPIENT = re.compile(r"[^\s<]")

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(StreamParser):
    """Text outside of messages, and a header that none follows, is content; so are calls where there is nothing to call.

    The prompt has begun the first header, so that a text may begin with the rest of one: ` to=functions.look<|channel|>…`.

    thinking, thought: see `TellsThinking`.
    """

    thinking = True
    thought = False

    def run(self) -> Reading:
        begin = yield from self._recipient()
        while begin or (begin := (yield from self.until((START, CHANNEL), self.say))):
            yield from self._message(begin)
            begin = ""

    def _message(self, begin: str) -> Reading:
        """Read a message of whose header `begin` was taken."""
        header = yield from self._header(begin)
        if header is None:
            self.give_back()
            return
        self.forget()
        called, channel = _CALLED.search(header), _CHANNEL.search(header)
        self.thinking = called is None and channel is not None and channel[1] == "analysis"
        self.thought = self.thought or self.thinking
        if called is not None and self.options.schemas and self.may_call(called[1]):
            self.begin_call(called[1])
            out = self.argue
        else:
            out = self.think if self.thinking else self.say
        end = yield from self.until((*ENDS, START), out)
        if end:
            self.end_call()
        if end == START:  # the message before it was not ended
            self.put_back(len(START))
        self.forget()

    def _recipient(self) -> Generator[None, None, str]:
        """Take the recipient that the text begins with; empty where there is none, or no special token shows that it is one."""
        yield from self.space()
        name = (yield from self.run_of(_RECIPIENT)) if (yield from self.literal("to=")) else ""
        yield from self.space()
        if name and (marker := (yield from self.literal(CHANNEL, CONSTRAIN, MESSAGE))):
            self.put_back(len(marker))
            return f"to={name} "
        self.give_back()
        return ""

    def _header(self, begin: str) -> Generator[None, None, str | None]:
        """The header's text, `<|message|>` included; None where it is none."""
        parts = [begin]
        taken = 0
        while taken < MAX_HEADER:
            if (yield from self.literal(MESSAGE)):
                return "".join(parts)
            if not (yield from self.peek()):
                return None
            parts.append(self.take(1))
            taken += 1
        return None


def without_calls() -> ParsingPlan:
    """How answers are parsed where there is nothing to call."""
    options = CallOptions(schemas={}, new_id=str)
    return ParsingPlan(lambda: HarmonyParser(options), MARKERS)
