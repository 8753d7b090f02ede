"""Server-sent events decoded from bytes as they arrive (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import codecs

from httpx_sse import ServerSentEvent

# Private names: the public `EventSource` reads a whole httpx response. It neither takes bytes nor stops at [DONE].
from httpx_sse._decoders import SSEDecoder as FieldDecoder
from httpx_sse._decoders import SSELineDecoder

MAX_EVENT_CHARS = 64 * 1024 * 1024


class SSEDecoder:
    """httpx-sse's decoder for bytes that are cut anywhere.

    An event without a final empty line is never returned, as the standard requires. Raises ValueError for an event of more than
    `max_event_chars` characters.
    """

    def __init__(self, max_event_chars: int = MAX_EVENT_CHARS) -> None:
        self._max_chars = max_event_chars
        self._text = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._lines = SSELineDecoder()
        self._fields = FieldDecoder()
        self._after_cr = False
        self._has_data = False
        self._size = 0  # characters in the finished lines of the current event
        self._pending = 0  # characters in the unfinished line

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events completed by `chunk`, in order."""
        text = self._text.decode(chunk)
        if self._after_cr and text.startswith("\n"):  # the second half of a CRLF
            text, self._after_cr = text[1:], False
        if not text:
            return []
        self._after_cr = text.endswith("\r")
        if self._after_cr:
            text += "\n"  # otherwise SSELineDecoder holds the line back until the next chunk
        events = []
        for line in self._lines.decode(text):
            event = self._fields.decode(line)
            if line:
                self._add_line(line)
                continue
            # httpx-sse also returns events without data, such as one for each comment that follows an `id`.
            if self._has_data and event is not None:
                events.append(event)
            self._has_data, self._size = False, 0
        if text[-1] == "\n":
            self._pending = 0
        else:
            end_of_lines = max(text.rfind("\n"), text.rfind("\r")) + 1
            self._pending = len(text) - end_of_lines + (0 if end_of_lines else self._pending)
            self._check_size(self._size + self._pending)
        return events

    def _add_line(self, line: str) -> None:
        self._size += len(line)
        self._check_size(self._size)
        if line.startswith("data:") or line == "data":
            self._has_data = True
        elif line[0] == ":" and not self._has_data:
            self._size = 0  # comments may keep a connection alive for any length of time

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise ValueError(f"an event of the stream has more than {self._max_chars} characters")
