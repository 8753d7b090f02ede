"""From the bytes of a generation stream to typed chunks, and the rules of a stream that ended well. No input or output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from windlass.clients._accumulate import StreamAccumulator
from windlass.clients._parse import parse
from windlass.clients.errors import ResponseError, StreamError
from windlass.clients.sse import SSEDecoder

T = TypeVar("T")
A = TypeVar("A")


class ChunkReader(Generic[T, A]):
    """Feed it bytes; it gives chunks until `done`. Call `end` when the bytes end. `accumulator` is what has arrived so far.

    A stream ended well when `expected_choices` choices, and every choice that was begun, brought a finish_reason and then [DONE]
    came, or the event with which streams of its kind end. Anything else is a StreamError: text cut short must not
    pass for an answer.
    """

    def __init__(
        self, chunk: type[T], accumulator: StreamAccumulator[A], expected_choices: int, request_id: str | None
    ) -> None:
        self.done = False
        self.accumulator = accumulator
        self.request_id = request_id
        self._chunk = chunk
        self._expected = expected_choices
        self._sse = SSEDecoder()

    def feed(self, data: bytes) -> Iterator[T]:
        """Chunks completed by these bytes, one by one, so that those before an error event arrive before it raises."""
        try:
            events = self._sse.feed(data)
        except ValueError as error:
            raise self._stream_error(str(error)) from error
        for event in events:
            if event.data.strip() == "[DONE]":
                self._check_complete()
                self.done = True
                return
            yield self._read_chunk(event.data)
            if self.accumulator.ended:
                self._check_complete()
                self.done = True
                return

    def end(self) -> None:
        """The bytes ended: raises StreamError unless the stream's last event came before."""
        if not self.done:
            raise self._stream_error(
                f"the stream ended without {self.accumulator.final_event}: the answer is incomplete"
            )

    def check_done(self) -> None:
        """Raise StreamError unless the stream ended well."""
        if not self.done:
            raise self._stream_error("the stream was closed or failed before its end: the answer is incomplete")

    def result(self) -> A:
        """The whole answer; raises StreamError unless the stream ended well."""
        self.check_done()
        return self.accumulator.result(self.request_id)

    def _read_chunk(self, text: str) -> T:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._response_error(f"an event is not JSON ({error})") from error
        failure = _find_error(data)
        if failure is not None:
            raise self._server_error(failure)
        try:
            chunk = parse(self._chunk, data)
        except ValueError as error:
            raise self._response_error(str(error)) from error
        self.accumulator.add(chunk)
        return chunk

    def _check_complete(self) -> None:
        finished = len(self.accumulator.finish_reasons)
        missing = max(self.accumulator.num_started, self._expected) - finished
        if missing > 0:
            raise self._stream_error(
                f"the stream ended without a finish_reason for {missing} of its choices: the answer is incomplete"
            )

    def _server_error(self, error: Any) -> StreamError:
        fields = error if isinstance(error, dict) else {"message": error}
        text = {name: None if fields.get(name) is None else str(fields[name]) for name in ("type", "param", "code")}
        message = str(fields.get("message") or "the server reported an error in the stream")
        return StreamError(message, status=200, request_id=self.request_id, **text)

    def _stream_error(self, message: str) -> StreamError:
        return StreamError(message, status=200, request_id=self.request_id)

    def _response_error(self, what: str) -> ResponseError:
        return ResponseError(f"the stream is not understood: {what}", status=200, request_id=self.request_id)


def _find_error(data: Any) -> Any:
    """The error that an event tells of, None where it tells of none."""
    if not isinstance(data, dict):
        return None
    if data.get("error") is not None:
        return data["error"]
    if data.get("type") == "error":
        return data
    if data.get("type") == "response.failed":
        response = data.get("response")
        return (response.get("error") if isinstance(response, dict) else None) or {}
    return None
