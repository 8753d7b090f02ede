"""The loop that drives an engine core: take what came in, step while there is work, hand out what the step made.

It knows queues of messages, not how they travel, and reaches the core only through the methods of `Core`, so it needs no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.api.looks import A, IntrospectionQuery
from windlass.engine.api.request import EngineRequest, EngineStats, ModelInfo, RequestOutput
from windlass.engine.core.black_box import PlanWatcher
from windlass.engine.core.forecast import Announce
from windlass.engine.core.threads import apply_thread_settings
from windlass.engine.core.wire import (
    Abort,
    Aborted,
    AdapterLoaded,
    Add,
    AskStats,
    Close,
    DropAdapter,
    EndSample,
    InspectRequest,
    InspectResult,
    LoadAdapter,
    Message,
    Rejected,
    Stats,
    StepDone,
    StepStarted,
    picklable_error,
)
from windlass.engine.errors import EngineError

_logger = logging.getLogger("windlass.engine")

ProgressCallback = Callable[[str, int, int], None]

IDLE_SECONDS = 0.25  # seconds without work or messages after which there is time for what may be needed later
STATS_INTERVAL = 0.2  # seconds between snapshots pushed along with steps


class Core(Protocol):
    """What `windlass.engine.core.engine_core.EngineCore` offers; one thread at a time uses it."""

    info: ModelInfo

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises RequestError or QueueFullError."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; unknown ids are ignored."""
        ...

    def end_sample(self, request_id: str, index: int) -> None:
        """Finish one sample of a request and free what it holds, without an output; unknown ones are ignored."""
        ...

    def read_adapter(self, source: AdapterSource) -> Future[Any]:
        """Read an adapter beside the steps; `add_adapter` takes the result."""
        ...

    def add_adapter(self, adapter: Any) -> AdapterInfo:
        """Let requests use an adapter that was read; raises RequestError."""
        ...

    def drop_adapter(self, adapter_id: int) -> None:
        """Let no further request use it; unknown ids are ignored."""
        ...

    def inspect(self, question: IntrospectionQuery[A]) -> A:
        """Answer somebody who looks on; changes nothing that a request could notice. Raises RequestError."""
        ...

    def has_work(self) -> bool: ...

    def step(self, announce: Announce) -> list[RequestOutput]:
        """Do one step. announce: told before what may take more than a second, or nobody can tell how long, its seconds."""
        ...

    def watch_plans(self, watcher: PlanWatcher) -> None:
        """Have somebody told of each plan before it is computed."""
        ...

    def watch_ranks(self, gone: Callable[[str], None]) -> None:
        """Have somebody told, by another thread, that a rank is not there any more, and why: no step succeeds from then on."""
        ...

    def prepare_in_idle_time(self) -> None:
        """Begin, beside the steps, what the first requests of some kind would otherwise wait for; called once."""
        ...

    def close(self) -> None:
        """Finish, within seconds, what shall outlive the engine. It is used no more."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot that drains the `*_seconds` samples."""
        ...


@dataclass(frozen=True, slots=True)
class _AdapterRead:
    """The loop's own message to itself: an adapter has been read, or could not be."""

    adapter_id: int
    found: Future[Any]


@dataclass(frozen=True, slots=True)
class _RankGone:
    """The same: a rank of the model has ended, and no step can be computed any more."""

    reason: str


CoreFactory = Callable[[EngineConfig, ProgressCallback], Core]


def default_core(config: EngineConfig, progress: ProgressCallback) -> Core:
    """The real engine, warmed up. Imported here, late, because it brings torch."""
    apply_thread_settings(config.compute.cores)
    from windlass.engine.core.engine_core import EngineCore

    core = EngineCore(config, progress)
    core.warm_up()
    return core


class EngineLoop:
    """Runs `core` until a `Close` message arrives. `emit` must never block: delivery is somebody else's time."""

    def __init__(self, core: Core, inbox: SimpleQueue[Any], emit: Callable[[Message], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._pushed_stats_at = -STATS_INTERVAL
        self._prepared = False

    def run(self) -> None:
        """Serve until closed. What a step raises is a defect of the engine and leaves this method, as the end of a rank does."""
        self._core.watch_ranks(lambda reason: self._inbox.put(_RankGone(reason)))
        while True:
            # Between steps take everything that waits; without work sleep until something comes.
            block = not self._core.has_work()
            while (message := self._next(block)) is not None:
                if isinstance(message, Close):
                    self._core.close()
                    return
                self._handle(message)
                block = False
            if self._core.has_work():
                self._step()

    def _next(self, block: bool) -> Any:
        try:
            return self._inbox.get(block, None if self._prepared else IDLE_SECONDS)
        except Empty:
            if not block:
                return None
        self._prepared = True
        self._core.prepare_in_idle_time()
        return self._inbox.get()

    def _handle(self, message: Message | _AdapterRead | _RankGone) -> None:
        match message:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._core.abort(request_id)
                self._emit(Aborted(request_id))
            case EndSample(request_id, index):
                self._core.end_sample(request_id, index)
            case LoadAdapter(source):
                found = self._core.read_adapter(source)
                found.add_done_callback(lambda found: self._inbox.put(_AdapterRead(source.adapter_id, found)))
            case _AdapterRead(adapter_id, found):
                self._emit(AdapterLoaded(adapter_id, self._add_adapter(found)))
            case DropAdapter(adapter_id):
                self._core.drop_adapter(adapter_id)
            case InspectRequest(inspection_id, question):
                self._emit(InspectResult(inspection_id, self._inspect(question)))
            case _RankGone(reason):
                raise RuntimeError(reason)
            case AskStats():
                self._emit(Stats(self._snapshot()))
            case _:
                raise TypeError(f"an engine does not take {type(message).__name__} messages")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except EngineError as error:
            self._emit(Rejected(request.request_id, picklable_error(error)))
        except Exception as error:  # a defect met by one request must not end the others
            known = {"request_id": request.request_id}
            _logger.exception("request %s could not be added", request.request_id, extra=known)
            self._core.abort(request.request_id)
            self._emit(Rejected(request.request_id, picklable_error(error)))

    def _add_adapter(self, found: Future[Any]) -> AdapterInfo | EngineError:
        try:
            return self._core.add_adapter(found.result())
        except EngineError as error:
            return picklable_error(error)
        except Exception as error:  # what is wrong with a file must not end the streams
            _logger.exception("an adapter could not be loaded")
            return picklable_error(error)

    def _inspect(self, question: IntrospectionQuery[Any]) -> Any:
        try:
            return self._core.inspect(question)
        except EngineError as error:
            return picklable_error(error)
        except Exception as error:  # whoever looks on must not end the streams
            _logger.exception("a question could not be answered")
            return picklable_error(error)

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._core.step(self._announce)
        now = time.monotonic()
        due = now - self._pushed_stats_at >= STATS_INTERVAL
        if outputs or due:
            self._emit(StepDone(tuple(outputs), now - start, self._snapshot() if due else None))

    def _announce(self, seconds: float | None) -> None:
        self._emit(StepStarted(seconds))

    def _snapshot(self) -> EngineStats:
        self._pushed_stats_at = time.monotonic()
        stats = self._core.stats()
        # The snapshot is pickled by another thread while the core goes on: give it a dictionary of its own.
        return replace(stats, recomputed_tokens=dict(stats.recomputed_tokens))
