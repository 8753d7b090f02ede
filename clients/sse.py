"""Server-sent events from bytes (WHATWG HTML, section 9.2.6). Does no input or output and knows nothing of JSON."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `data`: its data lines joined by line feeds."""

    data: str
    event: str = "message"
    id: str | None = None


class SSEDecoder:
    """Feed it bytes as they come, cut anywhere; it gives the events that are complete.

    An event that is not ended by an empty line when the bytes end does not count, as the standard says. Raises ValueError
    for an event above `max_event_bytes`.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._partial: list[bytes] = []
        self._size = 0  # bytes of the unfinished event
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._event = ""
        self._last_id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Events completed by these bytes, in order."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r") if chunk else False
        lines = chunk.splitlines()  # of bytes: at CRLF, LF and CR only
        unfinished = lines.pop() if lines and not chunk.endswith((b"\n", b"\r")) else b""
        events: list[ServerSentEvent] = []
        for line in lines:
            self._count_bytes(len(line))
            if self._partial:
                line = b"".join([*self._partial, line])
                self._partial.clear()
            event = self._process_line(line)
            if event is not None:
                events.append(event)
        if unfinished:
            self._count_bytes(len(unfinished))
            self._partial.append(unfinished)
        return events

    def _count_bytes(self, count: int) -> None:
        self._size += count
        if self._size > self._max_bytes:
            raise ValueError(f"an event of the stream holds more than {self._max_bytes} bytes")

    def _process_line(self, raw: bytes) -> ServerSentEvent | None:
        line = raw.decode("utf-8", "replace")
        if self._at_start:
            self._at_start = False
            line = line.removeprefix("\ufeff")
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._event = value
        elif field == "id" and "\0" not in value:
            self._last_id = value
        elif not field and not self._data:
            self._size = 0  # comments keep a connection alive for as long as it takes
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._size = [], "", 0
        return ServerSentEvent("\n".join(data), event or "message", self._last_id) if data else None
