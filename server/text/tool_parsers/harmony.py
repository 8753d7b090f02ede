"""The harmony format of gpt-oss: messages in channels."""

from __future__ import annotations

import re
from collections.abc import Generator

from windlass.server.text.stream_parser import CallOptions, ParserSteps, ParsingPlan, StreamParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})
MAX_HEADER = 512  # characters
_CALLED = re.compile(r"\bto=functions\.([^\s<]{1,256})")
_RECIPIENT = re.compile(r"[^\s<]")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(StreamParser):
    """Parser of messages in channels: reasoning, calls and content. See `OutputParser` and `TracksThinking`.

    Text outside messages and a header without a message are content, and so are calls if the request has no tools.
    The prompt contains the beginning of the first header, so an answer may begin with the rest of it:
    ` to=functions.weather<|channel|>…`.
    """

    thinking = True
    has_thought = False

    def run(self) -> ParserSteps:
        begin = yield from self._recipient()
        while begin or (begin := (yield from self.pass_until((START, CHANNEL), self.emit_content))):
            yield from self._message(begin)
            begin = ""

    def _message(self, begin: str) -> ParserSteps:
        """Read a message. begin: the part of its header that was already taken."""
        header = yield from self._header(begin)
        if header is None:
            self.emit_taken()
            return
        self.discard_taken()
        called, channel = _CALLED.search(header), _CHANNEL.search(header)
        self.thinking = called is None and channel is not None and channel[1] == "analysis"
        self.has_thought = self.has_thought or self.thinking
        if called is not None and self.options.schemas and self.may_call(called[1]):
            self.begin_call(called[1])
            out = self.emit_arguments
        else:
            out = self.emit_reasoning if self.thinking else self.emit_content
        end = yield from self.pass_until((*ENDS, START), out, drops_cut=self.in_call)
        if end:
            self.end_call()
        if end == START:  # the previous message has no end marker
            self.put_back(len(START))
        self.discard_taken()

    def _recipient(self) -> Generator[None, None, str]:
        """Take the recipient at the beginning of the text; return an empty string if no special token follows it."""
        yield from self.skip_space()
        name = (yield from self.take_while(_RECIPIENT)) if (yield from self.take_literal("to=")) else ""
        yield from self.skip_space()
        if name and (marker := (yield from self.take_literal(CHANNEL, CONSTRAIN, MESSAGE))):
            self.put_back(len(marker))
            return f"to={name} "
        self.emit_taken()
        return ""

    def _header(self, begin: str) -> Generator[None, None, str | None]:
        """Take a header up to `<|message|>`; return None if the text is not a header."""
        parts = [begin]
        taken = 0
        while taken < MAX_HEADER:
            if (yield from self.take_literal(MESSAGE)):
                return "".join(parts)
            if not (yield from self.peek()):
                return None
            parts.append(self.take(1))
            taken += 1
        return None


def channel_parsing_plan() -> ParsingPlan:
    """Return the parsing plan of a request without tools."""
    options = CallOptions(schemas={}, new_id=str)
    return ParsingPlan(lambda: HarmonyParser(options), MARKERS)
