"""From the bytes of a generation stream to typed chunks, and the rules of a stream that ended well. No input or output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from windlass.clients._parse import parse
from windlass.clients.errors import ResponseError, StreamError
from windlass.clients.sse import SSEDecoder
from windlass.clients.types import Rotary

T = TypeVar("T")


class ChunkReader(Generic[T]):
    """Feed it bytes; it gives chunks until `done`. Call `end` when the bytes end.

    A stream ended well when `expected` choices, and every choice that was begun, brought a finish_reason and then [DONE]
    came. Anything else is a StreamError: text cut short must not pass for an answer.
    """

    def __init__(self, chunk: type[T], expected: int, request_id: str | None) -> None:
        self.done = False
        self.rotary: Rotary | None = None  # of the first choice, once it has ended
        self._chunk = chunk
        self._expected = expected
        self._request_id = request_id
        self._sse = SSEDecoder()
        self._begun: set[Any] = set()
        self._finished: set[Any] = set()

    def feed(self, data: bytes) -> Iterator[T]:
        """Chunks completed by these bytes, one by one, so that those before an error event arrive before it raises."""
        try:
            events = self._sse.feed(data)
        except ValueError as error:
            raise self._error(str(error)) from error
        for event in events:
            if event.data.strip() == "[DONE]":
                self._check_complete()
                self.done = True
                return
            yield self._read(event.data)

    def end(self) -> None:
        """The bytes ended: raises StreamError unless [DONE] came before."""
        if not self.done:
            raise self._error("the stream ended without [DONE]: the answer is incomplete")

    def _read(self, text: str) -> T:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._unknown(f"an event is not JSON ({error})") from error
        if isinstance(data, dict) and data.get("error") is not None:
            raise self._reported(data["error"])
        try:
            chunk = parse(self._chunk, data)
        except ValueError as error:
            raise self._unknown(str(error)) from error
        for choice in data.get("choices") or ():
            self._begun.add(choice["index"])
            if choice.get("finish_reason") is not None:
                self._finished.add(choice["index"])
        self._keep_rotary(data, getattr(chunk, "rotary", None))
        return chunk

    def _keep_rotary(self, data: Any, rotary: Rotary | None) -> None:
        choices = data.get("choices")
        # A chunk without choices tells the usage and speaks of the first choice.
        if rotary is not None and (not choices or choices[0]["index"] == 0):
            self.rotary = rotary

    def _check_complete(self) -> None:
        missing = max(len(self._begun - self._finished), self._expected - len(self._finished))
        if missing > 0:
            raise self._error(
                f"the stream ended without a finish_reason for {missing} of its choices: the answer is incomplete"
            )

    def _reported(self, error: Any) -> StreamError:
        fields = error if isinstance(error, dict) else {"message": error}
        text = {name: None if fields.get(name) is None else str(fields[name]) for name in ("type", "param", "code")}
        message = str(fields.get("message") or "the server reported an error in the stream")
        return StreamError(message, status=200, request_id=self._request_id, **text)

    def _error(self, message: str) -> StreamError:
        return StreamError(message, status=200, request_id=self._request_id)

    def _unknown(self, what: str) -> ResponseError:
        return ResponseError(f"the stream is not understood: {what}", status=200, request_id=self._request_id)
