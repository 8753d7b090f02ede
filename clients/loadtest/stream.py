"""Reads one streamed answer as its bytes arrive and says how it ended: completed, or failed and how.

Knows events and JSON; knows no sockets and no clock: arrival times are told to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from windlass.clients.sse import SSEDecoder

_MAX_ERROR_BYTES = 64 * 1024
_MAX_MESSAGE = 300
# The finish reasons of servers that gave a request up themselves.
_ABORTED = frozenset({"abort", "aborted", "error", "cancelled"})
_NO_STREAMS = frozenset({"application/json", "text/html"})
_TEXTS = ("text", "content")
_THOUGHTS = ("reasoning_content", "reasoning")


class AnswerReader:
    """One answer. `finished` is called once, when it is clear how it ended.

    leave_after: go away after so many chunks with tokens. keep: whether to keep the text.
    """

    def __init__(self, finished: Callable[[], None], *, leave_after: int | None = None, keep: bool = False) -> None:
        self._finished = finished
        self._leave_after = leave_after
        self._keep = keep
        self._decoder = SSEDecoder()
        self._status: int | None = None
        self._body = bytearray()  # of an answer that is no stream
        self._streams = False
        self.chunks: list[float] = []
        self.ended: float | None = None
        self.outcome: str | None = None
        self.message: str | None = None
        self.finish_reason: str | None = None
        self.request_id: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.reused_tokens: int | None = None  # None: the server tells nothing of passages
        self.text: list[str] = []
        self.token_ids: list[int] | None = None
        self.sent: float | None = None

    # ---- told by the connection --------------------------------------------------------------------------------------
    @property
    def begun(self) -> bool:
        """Whether the server has said anything."""
        return self._status is not None

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status line and headers have come."""
        self._status = status
        self.request_id = headers.get("x-request-id")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._streams = status == 200 and kind not in _NO_STREAMS  # some servers mislabel their streams

    def data(self, data: bytes, when: float) -> None:
        """Bytes of the body that arrived at `when`."""
        if self.outcome is not None:
            return
        if not self._streams:
            self._body += data[: _MAX_ERROR_BYTES - len(self._body)]
            return
        try:
            events = self._decoder.feed(data)
        except ValueError as error:
            self.end("malformed", when, str(error))
            return
        for event in events:
            self._event(event.data, event.event, when)
            if self.outcome is not None:
                return

    def body_end(self, when: float) -> None:
        """The body is complete."""
        if self.outcome is not None:
            return
        if self._streams:
            self.end("truncated", when, f"the stream ended without {self._missing()}")
        elif self._status == 200:
            self.end("malformed", when, f"the answer is no event stream: {_shorten(_decode(self._body))}")
        else:
            self.end(f"http_{self._status}", when, _error_text(_decode(self._body)))

    def broken(self, when: float, what: str) -> None:
        """The connection broke."""
        if self.begun:
            self.end("truncated", when, f"{what}, after {len(self.chunks)} chunks and without {self._missing()}")
        else:
            self.end("connection", when, what)

    def end(self, outcome: str, when: float, message: str | None = None) -> None:
        """Note how it ended; only the first call counts."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, when
            self.message = None if message is None else _shorten(message)
            self._finished()

    # ---- the parts ---------------------------------------------------------------------------------------------------
    def _missing(self) -> str:
        return "[DONE]" if self.finish_reason is not None else "a finish reason and [DONE]"

    def _event(self, data: str, kind: str, when: float) -> None:
        if data == "[DONE]":
            self._done(when)
            return
        try:
            payload = json.loads(data)
        except (ValueError, RecursionError):
            self.end("malformed", when, f"an event is no JSON: {data}")
            return
        if kind == "error" or (isinstance(payload, dict) and payload.get("error")):
            self.end("error_event", when, _error_text(data))
            return
        try:
            self._chunk(payload, when)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            self.end("malformed", when, f"an event is no chunk of an answer: {data}")

    def _chunk(self, payload: Mapping[str, Any], when: float) -> None:
        if usage := payload.get("usage"):
            self.usage = {**usage}
        if rotary := payload.get("rotary"):
            self.reused_tokens = count((rotary.get("context") or {}).get("reused_tokens"), 0)
        for choice in payload.get("choices") or ():
            part = choice.get("delta") or choice
            ids = choice.get("token_ids")
            text = _first(part, _TEXTS)
            thought = "" if text else _first(part, _THOUGHTS)
            reason = choice.get("finish_reason")
            # Without a chunk that could be read, the first token counts as arriving at the end.
            if text or thought or ids or part.get("tool_calls") or (reason is not None and not self.chunks):
                self.chunks.append(when)
            if ids is not None:
                self.token_ids = (self.token_ids or []) + ids
            if self._keep and text:  # thoughts are no part of the answer, which the next turn of a chat sends back
                self.text.append(text)
            if reason is not None:
                self.finish_reason = reason
                if reason in _ABORTED:
                    self.end("aborted", when, f"the server ended it with finish_reason {reason!r}")
                    return
        if self._leave_after is not None and len(self.chunks) >= self._leave_after:
            self.end("disconnected", when, f"the client left after {len(self.chunks)} chunks, as planned")

    def _done(self, when: float) -> None:
        if self.finish_reason is None:
            self.end("truncated", when, "[DONE] came without a finish reason")
        else:
            self.end("completed", when)


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The text under the first of these names that has any. Raises TypeError for what is no text."""
    for name in names:
        if text := part.get(name):
            if not isinstance(text, str):
                raise TypeError
            return text
    return ""


def count(told: Any, otherwise: int) -> int:
    """A number of tokens that a server told, and `otherwise` for what is none."""
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else otherwise


def _decode(body: bytes | bytearray) -> str:
    return body.decode("utf-8", "replace")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _error_text(body: str) -> str:
    """The message of an OpenAI error object, else the body as it is."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        found = error.get("message") if isinstance(error, dict) else error
        return str(found) if found else body
    except (ValueError, AttributeError, RecursionError):
        return body
