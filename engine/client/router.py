"""Splits the engine's messages into one stream per request, inside one asyncio event loop.

Shared by the clients, which only carry messages. Knows the life of a request on the caller's side: opened, fed,
finished, failed, or abandoned and then aborted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from windlass.engine.api.request import EngineRequest, RequestOutput, TokenLogprobs
from windlass.engine.core.wire import Abort, Aborted, Add, EndSample, Message, PromptLogprobs, Rejected, StepDone
from windlass.engine.errors import EngineError, RequestError, SlowConsumerError

_TOO_SLOW = "the answer was taken so slowly that too much of it waited: read it more quickly, or ask for less at once"
MAX_BUFFERED_OUTPUT = 2**19  # numbers of one request's outputs, some 100 bytes each, that may wait for its consumer


class _RequestStream:
    """Outputs of one request that its consumer has not taken yet. The engine never waits for a consumer.

    waiting: how large they are, in numbers as large as a log-probability with its token.
    """

    __slots__ = ("_outputs", "_prompt_parts", "_unfinished", "_waiter", "ended_early", "error", "request", "waiting")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._outputs: deque[RequestOutput] = deque()
        self.waiting = 0
        self._prompt_parts: list[TokenLogprobs | None] = []
        self._unfinished = set(range(request.sampling.n))
        self._waiter: asyncio.Future[None] | None = None
        self.ended_early = False  # the consumer ended a sample, so outputs may be under way after all have finished
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        """The engine has nothing more to say about this request."""
        return self.error is not None or not self._unfinished

    def put(self, output: RequestOutput) -> None:
        if output.error is not None:
            self.fail(output.error)
            return
        if output.index not in self._unfinished:
            return  # computed before the engine heard that this sample was ended
        if self._prompt_parts and output.prompt_logprobs is not None:
            output = replace(output, prompt_logprobs=(*self._prompt_parts, *output.prompt_logprobs))
            self._prompt_parts = []
        self._outputs.append(output)
        self.waiting += _size(output)
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
        self._wake()

    def put_prompt_part(self, entries: Sequence[TokenLogprobs | None]) -> None:
        """Keep these log-probabilities for the output that has the last of them."""
        self._prompt_parts += entries

    def end(self, index: int) -> bool:
        """Wait for nothing more from a sample; False if it has finished."""
        if index not in self._unfinished:
            return False
        self._unfinished.discard(index)
        self.ended_early = True
        self._wake()
        return True

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._wake()

    def discard_and_fail(self, error: Exception) -> None:
        """Fail, and keep nothing of what waits."""
        self._outputs.clear()
        self.fail(error)

    async def get(self) -> RequestOutput | None:
        """The next output; None after the last. Raises the request's error once all before it are taken."""
        while not self._outputs:
            if self.error is not None:
                raise self.error
            if not self._unfinished:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self._outputs.popleft()
        self.waiting -= _size(output)
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(output: RequestOutput) -> int:
    return 4 + len(output.token_ids) + sum(2 + len(each.top) for each in output.logprobs or ())


class RequestRouter:
    """The streams in flight.

    send: hands a message to the engine at once, without waiting. require_engine: raises EngineDeadError while there is
    none. Both belong to the client, and all methods run in its event loop.
    """

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send = send
        self._require_engine = require_engine
        self._streams: dict[str, _RequestStream] = {}
        self._aborting: dict[str, asyncio.Future[None]] = {}

    @property
    def in_flight(self) -> int:
        """Requests whose end the engine still owes, those being aborted included; not those that wait for a slow reader alone."""
        return sum(not stream.finished for stream in self._streams.values()) + len(self._aborting)

    @property
    def requests(self) -> list[EngineRequest]:
        """Those whose end the engine owes."""
        return [stream.request for stream in self._streams.values() if not stream.finished]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        request_id = request.request_id
        self._require_engine()
        # An id whose abort is under way may still have outputs on the road: they must not reach its successor.
        while (aborting := self._aborting.get(request_id)) is not None:
            await asyncio.shield(aborting)
            self._require_engine()
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id!r} is already running", "request_id")
        stream = self._streams[request_id] = _RequestStream(request)
        try:
            self._send(Add(request))
            while (output := await stream.get()) is not None:
                yield output
        finally:
            # One that is not among the streams any more went with its engine: nobody would confirm its abort.
            if self._streams.get(request_id) is stream:
                self._forget(request_id, abort=not stream.finished or stream.ended_early)

    def _forget(self, request_id: str, *, abort: bool) -> None:
        del self._streams[request_id]
        if abort:
            self._aborting[request_id] = asyncio.get_running_loop().create_future()
            self._send(Abort(request_id))

    def end_sample(self, request_id: str, index: int) -> None:
        """See `EngineClient.end_sample`."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.end(index):
            self._send(EndSample(request_id, index))

    def deliver(self, message: Message) -> bool:
        """Take a message about requests; False if it is about something else."""
        match message:
            case StepDone(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                        if stream.waiting > MAX_BUFFERED_OUTPUT:
                            self._forget(output.request_id, abort=not stream.finished)
                            stream.discard_and_fail(SlowConsumerError(_TOO_SLOW))
            case PromptLogprobs(request_id, entries):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.put_prompt_part(entries)
            case Rejected(request_id, error):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(error)
            case Aborted(request_id):
                self._abort_confirmed(request_id)
            case _:
                return False
        return True

    def fail_all(self, make_error: Callable[[str], EngineError]) -> None:
        """The engine is gone: every stream ends with an error of its own, and nothing is left to abort.

        make_error: of the request with this id.
        """
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            if not stream.finished:
                stream.fail(make_error(request_id))
        for request_id in list(self._aborting):
            self._abort_confirmed(request_id)

    def _abort_confirmed(self, request_id: str) -> None:
        aborting = self._aborting.pop(request_id, None)
        if aborting is not None and not aborting.done():
            aborting.set_result(None)
