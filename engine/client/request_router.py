"""Request router: assigns engine messages to the calls in flight (requests, adapters, introspection, statistics).

Runs in one asyncio event loop. The client only carries messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from windlass.engine.core import messages
from windlass.engine.core.messages import Message
from windlass.engine.errors import EngineDeadError, EngineError, RequestError, SlowConsumerError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.interface.outputs import (
    MAX_TIMING_SAMPLES,
    TIMED_FIELDS,
    EngineStats,
    RequestOutput,
    TokenLogprobs,
)
from windlass.engine.interface.request import EngineRequest

_TOO_SLOW = (
    "the answer was read so slowly that too much of it was buffered: read it more quickly, or ask for less at once"
)

MAX_BUFFERED_OUTPUT = 2**19  # buffered numbers of one request's outputs, some 100 bytes each
STATS_TIMEOUT = 1.0  # seconds to wait for new statistics before the last known ones are returned


# -- requests ----------------------------------------------------------------------------------------------------------
class _RequestStream:
    """Outputs of one request that its consumer has not read yet. The engine never waits for a consumer.

    buffered_size: their size; a log-probability with its token counts as one. prompt_parts: log-probabilities of the prompt that
    wait for the output with the last of them.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._outputs: deque[RequestOutput] = deque()
        self.buffered_size = 0
        self.prompt_parts: list[TokenLogprobs | None] = []
        self._unfinished = set(range(request.sampling.n))
        self._waiter: asyncio.Future[None] | None = None
        self.ended_early = False  # the consumer ended a sample, so outputs may be in flight after all have finished
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the engine sends nothing more about this request."""
        return self.error is not None or not self._unfinished

    def put(self, output: RequestOutput) -> None:
        if output.error is not None:
            self.fail(output.error)
            return
        if output.index not in self._unfinished:
            return  # computed before the engine received the end of this sample
        if self.prompt_parts and output.prompt_logprobs is not None:
            output = replace(output, prompt_logprobs=(*self.prompt_parts, *output.prompt_logprobs))
            self.prompt_parts = []
        self._outputs.append(output)
        self.buffered_size += _size(output)
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
        _end_wait(self._waiter)

    def end(self, index: int) -> bool:
        """Expect no further outputs of a sample; False if it has finished already."""
        if index not in self._unfinished:
            return False
        self._unfinished.discard(index)
        self.ended_early = True
        _end_wait(self._waiter)
        return True

    def fail(self, error: Exception, *, discard: bool = False) -> None:
        """End the stream with an error. discard: drop all buffered outputs."""
        if discard:
            self._outputs.clear()
        self.error = self.error or error
        _end_wait(self._waiter)

    async def get(self) -> RequestOutput | None:
        """The next output; None after the last. Raises the request's error after all outputs before it."""
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
        self.buffered_size -= _size(output)
        return output


def _size(output: RequestOutput) -> int:
    return 4 + len(output.token_ids) + sum(2 + len(each.top) for each in output.logprobs or ())


def _end_wait(waiter: asyncio.Future[Any] | None, result: Any = None) -> None:
    """Give a waiting call its result or error, if there is one and it was not cancelled."""
    if waiter is None or waiter.done():
        return
    if isinstance(result, EngineError):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)


@dataclass
class _EngineCalls:
    """Calls of one kind.

    send: passes a message to the engine without waiting. require_engine: raises EngineDeadError while there is none. All methods
    run in the client's event loop.
    """

    _send: Callable[[Message], None]
    _require_engine: Callable[[], None]


@dataclass
class RequestRouter(_EngineCalls):
    """The requests in flight."""

    _streams: dict[str, _RequestStream] = field(default_factory=dict)
    _aborting: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Requests that the engine has not finished, including those being aborted; finished ones may still be buffered."""
        return sum(not stream.finished for stream in self._streams.values()) + len(self._aborting)

    @property
    def requests(self) -> list[EngineRequest]:
        """The requests that the engine has not finished."""
        return [stream.request for stream in self._streams.values() if not stream.finished]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        request_id = request.request_id
        self._require_engine()
        # Until the abort of a previous request with this id is confirmed, its outputs may arrive; they must not be mixed up.
        while (aborting := self._aborting.get(request_id)) is not None:
            await asyncio.shield(aborting)
            self._require_engine()
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id!r} is already running", "request_id")
        stream = self._streams[request_id] = _RequestStream(request)
        try:
            self._send(messages.Add(request))
            while (output := await stream.get()) is not None:
                yield output
        finally:
            # If the engine has died, the stream has been removed already, and an abort would never be confirmed.
            if self._streams.get(request_id) is stream:
                self._forget(request_id, abort=not stream.finished or stream.ended_early)

    def _forget(self, request_id: str, *, abort: bool) -> None:
        del self._streams[request_id]
        if abort:
            self._aborting[request_id] = asyncio.get_running_loop().create_future()
            self._send(messages.Abort(request_id))

    def end_sample(self, request_id: str, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.end(index):
            self._send(messages.EndSample(request_id, index))

    def deliver(self, message: Message) -> bool:
        """Take a message about requests; False if it is about something else."""
        match message:
            case messages.StepDone(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                        if stream.buffered_size > MAX_BUFFERED_OUTPUT:
                            self._forget(output.request_id, abort=not stream.finished)
                            stream.fail(SlowConsumerError(_TOO_SLOW), discard=True)
            case messages.PromptLogprobs(request_id, entries):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.prompt_parts += entries
            case messages.Rejected(request_id, error):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(error)
            case messages.Aborted(request_id):
                self._abort_confirmed(request_id)
            case _:
                return False
        return True

    def fail_all(self, make_error: Callable[[str], EngineError]) -> None:
        """End all streams with errors because the engine is gone. make_error: called with the request id."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            if not stream.finished:
                stream.fail(make_error(request_id))
        for request_id in list(self._aborting):
            self._abort_confirmed(request_id)

    def _abort_confirmed(self, request_id: str) -> None:
        _end_wait(self._aborting.pop(request_id, None))


# -- adapters ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Loading:
    """An adapter that the engine is loading. callers: number of callers that wait for it."""

    source: AdapterSource
    result: asyncio.Future[AdapterInfo]
    callers: int = 0

    def end(self, error: EngineError | None = None) -> None:
        """Fail. There may be no caller left to retrieve the error."""
        _end_wait(self.result, error or EngineError("the call to load this adapter was cancelled"))
        self.result.exception()


class AdapterCalls(_EngineCalls):
    """Loads and drops adapters. config: lists those loaded at start."""

    def __init__(
        self, send: Callable[[Message], None], require_engine: Callable[[], None], config: EngineConfig
    ) -> None:
        super().__init__(send, require_engine)
        self._loaded = {source.adapter_id: source for source in config.adapters.sources}
        self._loading: dict[int, _Loading] = {}

    @property
    def loaded(self) -> frozenset[int]:
        """The ids of the loaded adapters."""
        return frozenset(self._loaded)

    async def load(self, source: AdapterSource) -> AdapterInfo:
        """Several callers can wait for the same adapter."""
        self._require_engine()
        loading = self._loading.get(source.adapter_id)
        if loading is None:
            loading = self._loading[source.adapter_id] = _Loading(source, asyncio.get_running_loop().create_future())
            self._send(messages.LoadAdapter(source))
        loading.callers += 1
        try:
            return await asyncio.shield(loading.result)
        except asyncio.CancelledError:
            loading.callers -= 1
            if not loading.callers:
                loading.end()
                self.drop(source.adapter_id)
            raise

    def drop(self, adapter_id: int) -> None:
        if (loading := self._loading.pop(adapter_id, None)) is not None:
            loading.end(RequestError("the adapter was unloaded while it was loaded", "lora_name", "model_not_found"))
        self._loaded.pop(adapter_id, None)
        self._send(messages.DropAdapter(adapter_id))

    def deliver(self, message: Message) -> bool:
        """Take a message about adapters; False if it is (also) about something else."""
        if isinstance(message, messages.Ready):  # a restarted engine may have failed to read some of them
            ids = {info.adapter_id for info in message.info.adapters}
            self._loaded = {adapter_id: source for adapter_id, source in self._loaded.items() if adapter_id in ids}
        if not isinstance(message, messages.AdapterLoaded):
            return False
        loading = self._loading.pop(message.adapter_id, None)
        if loading is None:  # its callers were cancelled
            self._send(messages.DropAdapter(message.adapter_id))
        elif isinstance(message.result, AdapterInfo):
            self._loaded[message.adapter_id] = loading.source
            loading.result.set_result(message.result)
        else:
            loading.end(message.result)
        return True

    def fail_all(self, reason: str) -> None:
        """Fail all loads because the engine is gone."""
        gone, self._loading = self._loading, {}
        for loading in gone.values():
            loading.end(EngineDeadError(reason))

    def restart_config(self, config: EngineConfig) -> EngineConfig:
        """The configuration of the next engine, with the adapters of the last one if their files still exist."""
        sources = tuple(replace(source, required=False) for source in self._loaded.values())
        return replace(config, adapters=replace(config.adapters, sources=sources))


# -- introspection -----------------------------------------------------------------------------------------------------
@dataclass
class InspectionCalls(_EngineCalls):
    """Introspection queries."""

    _ids: Iterator[int] = field(default_factory=itertools.count)
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Number of queries that the engine has not answered."""
        return len(self._waiting)

    async def inspect(self, query: IntrospectionQuery[A]) -> A:
        self._require_engine()
        inspection_id = next(self._ids)
        waiter = self._waiting[inspection_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.InspectRequest(inspection_id, query))
            return cast(A, await waiter)
        finally:
            self._waiting.pop(inspection_id, None)

    def deliver(self, message: Message) -> bool:
        """Take an answer; False if the message is about something else."""
        if not isinstance(message, messages.InspectResult):
            return False
        _end_wait(self._waiting.pop(message.inspection_id, None), message.result)
        return True

    def fail_all(self, reason: str) -> None:
        """Fail all queries because the engine is gone."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            _end_wait(waiter, EngineDeadError(reason))


# -- statistics --------------------------------------------------------------------------------------------------------
@dataclass
class StatsCalls(_EngineCalls):
    """Statistics, joined so that every sample of `*_seconds` is returned exactly once.

    The engine drains its samples into each snapshot, whether requested or sent with a step. Until they are read, the last
    MAX_TIMING_SAMPLES of each kind are stored and older ones dropped; counters and gauges are not affected.
    """

    _latest: EngineStats | None = None
    _samples: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=MAX_TIMING_SAMPLES) for name in TIMED_FIELDS}
    )
    _waiter: asyncio.Future[None] | None = None

    async def ask(self) -> EngineStats:
        """Current statistics, or the last known ones while a step takes longer than STATS_TIMEOUT. Raises EngineDeadError.

        The `*_seconds` samples are those since the previous call.
        """
        self._require_engine()
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._send(messages.AskStats())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._waiter), STATS_TIMEOUT)
        self._require_engine()
        return self.take()

    def deliver(self, message: Message) -> bool:
        """Take the statistics of a message; False if it is (also) about something else."""
        if isinstance(message, messages.StepDone):
            if message.stats is not None:
                self.add(message.stats)
            return False
        if not isinstance(message, messages.Stats):
            return False
        self.add(message.stats)
        self._resolve()
        return True

    def add(self, stats: EngineStats) -> None:
        """Take a snapshot of the engine."""
        self._latest = stats
        for name, samples in self._samples.items():
            samples += getattr(stats, name)

    def take(self) -> EngineStats:
        """The latest gauges and counters (zeros before the first snapshot) with all samples since the last call."""
        taken: dict[str, Any] = {name: tuple(samples) for name, samples in self._samples.items()}
        for samples in self._samples.values():
            samples.clear()
        return replace(self._latest or EngineStats(), **taken)

    def engine_gone(self) -> None:
        """Forget gauges and counters because the engine is gone; samples received already still count."""
        self._latest = None
        self._resolve()

    def _resolve(self) -> None:
        _end_wait(self._waiter)
        self._waiter = None
