"""Request router: assigns engine messages to the calls in flight (requests, adapters, introspection, statistics).

Runs in one asyncio event loop. Shared by the clients, which only carry messages. A request is opened, fed, finished, failed, or
abandoned and then aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from windlass.engine.core.messages import (
    Abort,
    Aborted,
    AdapterLoaded,
    Add,
    AskStats,
    DropAdapter,
    EndSample,
    InspectRequest,
    InspectResult,
    LoadAdapter,
    Message,
    PromptLogprobs,
    Ready,
    Rejected,
    Stats,
    StepDone,
)
from windlass.engine.errors import EngineError, RequestError, SlowConsumerError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.interface.outputs import MAX_TIMING_SAMPLES, EngineStats, RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest

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


@dataclass(slots=True)
class _Loading:
    """An adapter that the engine is to load. callers: those who know of it."""

    source: AdapterSource
    result: asyncio.Future[AdapterInfo]
    callers: int = 0

    def end(self, error: EngineError | None = None) -> None:
        """It comes to nothing; nobody may be there to be told."""
        if not self.result.done():
            self.result.set_exception(error or EngineError("nobody waits for this adapter"))
        self.result.exception()


class AdapterCalls:
    """send, require_engine: see `RequestRouter`. config: names those that are loaded at the start."""

    def __init__(
        self, send: Callable[[Message], None], require_engine: Callable[[], None], config: EngineConfig
    ) -> None:
        self._send, self._require_engine = send, require_engine
        self._loaded = {source.adapter_id: source for source in config.adapters.sources}
        self._loading: dict[int, _Loading] = {}

    @property
    def loaded(self) -> frozenset[int]:
        """The ids of those that there are."""
        return frozenset(self._loaded)

    async def load(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`. Whoever asks for one that is being loaded waits for the same."""
        self._require_engine()
        loading = self._loading.get(source.adapter_id)
        if loading is None:
            loading = self._loading[source.adapter_id] = _Loading(source, asyncio.get_running_loop().create_future())
            self._send(LoadAdapter(source))
        loading.callers += 1
        try:
            return await asyncio.shield(loading.result)
        except asyncio.CancelledError:
            loading.callers -= 1
            if not loading.callers:  # nobody knows of it any more
                loading.end()
                self.drop(source.adapter_id)
            raise

    def drop(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        if (loading := self._loading.pop(adapter_id, None)) is not None:
            loading.end(RequestError("the adapter was unloaded while it was loaded", "lora_name", "model_not_found"))
        self._loaded.pop(adapter_id, None)
        self._send(DropAdapter(adapter_id))

    def deliver(self, message: Message) -> bool:
        """Take a message about adapters; False if it is about something else, too."""
        if isinstance(message, Ready):  # of one that was started again, perhaps, and could not read all of them
            there = {info.adapter_id for info in message.info.adapters}
            self._loaded = {adapter_id: source for adapter_id, source in self._loaded.items() if adapter_id in there}
        if not isinstance(message, AdapterLoaded):
            return False
        loading = self._loading.pop(message.adapter_id, None)
        if loading is None:  # whoever asked for it went away
            self._send(DropAdapter(message.adapter_id))
        elif isinstance(message.result, AdapterInfo):
            self._loaded[message.adapter_id] = loading.source
            loading.result.set_result(message.result)
        else:
            loading.end(message.result)
        return True

    def fail_all(self, make_error: Callable[[], EngineError]) -> None:
        """The engine is gone, and with it what it was loading."""
        gone, self._loading = self._loading, {}
        for loading in gone.values():
            loading.end(make_error())

    def restart_config(self, config: EngineConfig) -> EngineConfig:
        """The configuration of the next engine: with the adapters of the last one, as far as their files are still there."""
        sources = tuple(replace(source, required=False) for source in self._loaded.values())
        return replace(config, adapters=replace(config.adapters, sources=sources))


class InspectionCalls:
    """send, require_engine: see `RequestRouter`."""

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send, self._require_engine = send, require_engine
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def waiting(self) -> int:
        """Questions that the engine has not answered."""
        return len(self._waiting)

    async def inspect(self, question: IntrospectionQuery[A]) -> A:
        """See `EngineClient.inspect`."""
        self._require_engine()
        inspection_id = next(self._ids)
        waiter = self._waiting[inspection_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(InspectRequest(inspection_id, question))
            return cast(A, await waiter)
        finally:
            self._waiting.pop(inspection_id, None)

    def deliver(self, message: Message) -> bool:
        """Take an answer; False if the message is about something else."""
        if not isinstance(message, InspectResult):
            return False
        waiter = self._waiting.pop(message.inspection_id, None)
        if waiter is not None and not waiter.done():
            if isinstance(message.result, EngineError):
                waiter.set_exception(message.result)
            else:
                waiter.set_result(message.result)
        return True

    def fail_all(self, make_error: Callable[[], EngineError]) -> None:
        """The engine is gone, and with it the answers."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(make_error())


@dataclass(slots=True)
class StatsAccumulator:
    """Joins snapshots so that every sample of `*_seconds` is handed out exactly once.

    The engine drains its samples into each snapshot it takes, whether it was asked for or pushed along with a step. Where
    nobody takes them, the last MAX_TIMING_SAMPLES of each kind wait and older ones are dropped; all counters and gauges stay right.
    """

    _latest: EngineStats | None = None
    _queue: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _prefill: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _decode: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _inference: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))

    def add(self, stats: EngineStats) -> None:
        self._latest = stats
        self._queue += stats.queue_seconds
        self._prefill += stats.prefill_seconds
        self._decode += stats.decode_seconds
        self._inference += stats.inference_seconds

    def take(self) -> EngineStats:
        """The latest gauges and counters (zeros before the first) with all samples since the last call."""
        stats = replace(
            self._latest or EngineStats(),
            queue_seconds=tuple(self._queue),
            prefill_seconds=tuple(self._prefill),
            decode_seconds=tuple(self._decode),
            inference_seconds=tuple(self._inference),
        )
        for samples in (self._queue, self._prefill, self._decode, self._inference):
            samples.clear()
        return stats

    def forget_engine(self) -> None:
        """The engine died: its gauges and counters are void. Samples already received still count."""
        self._latest = None


STATS_TIMEOUT = 1.0  # seconds to wait for fresh statistics before the last known ones do


class StatsCalls:
    """send, require_engine: see `RequestRouter`."""

    def __init__(self, send: Callable[[Message], None], require_engine: Callable[[], None]) -> None:
        self._send, self._require_engine = send, require_engine
        self._stats = StatsAccumulator()
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self) -> EngineStats:
        """Fresh ones, or the last known while a step takes longer than STATS_TIMEOUT. Raises EngineDeadError.

        The `*_seconds` samples are those since the previous call, each handed out once.
        """
        self._require_engine()
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._send(AskStats())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._waiter), STATS_TIMEOUT)
        self._require_engine()
        return self._stats.take()

    def deliver(self, message: Message) -> bool:
        """Take what a message has of them; False if it is about something else too."""
        if isinstance(message, StepDone):
            if message.stats is not None:
                self._stats.add(message.stats)
            return False
        if not isinstance(message, Stats):
            return False
        self._stats.add(message.stats)
        self._resolve()
        return True

    def engine_gone(self) -> None:
        """Its gauges and counters are void, and nobody answers whoever asked."""
        self._stats.forget_engine()
        self._resolve()

    def _resolve(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None
