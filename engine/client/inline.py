"""InlineClient: the engine in a worker thread of this process. For tests and for one-off use from Python.

It brings torch into the process and shares its fate: an engine that fails is not restarted. Servers use ProcessClient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from queue import SimpleQueue

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.api.looks import A, EngineQuestion
from windlass.engine.api.request import EngineRequest, EngineStats, ModelInfo, RequestOutput
from windlass.engine.client.adapters import AdapterCalls
from windlass.engine.client.looks import LookCalls
from windlass.engine.client.router import RequestRouter
from windlass.engine.core.loop import CoreFactory, EngineLoop, ProgressCallback, default_core
from windlass.engine.core.wire import (
    AskStats,
    Close,
    Crashed,
    LoadFailed,
    Message,
    Progress,
    Ready,
    Stats,
    StatsAccumulator,
    StepDone,
)
from windlass.engine.errors import EngineDeadError, LoadError

_logger = logging.getLogger("windlass.engine.client")


class InlineClient:
    """An `EngineClient` over a thread.

    progress: called in the event loop with (stage, done, total) while the model loads.
    core: builds the engine from (config, progress), in the worker thread; tests pass a scripted one.
    """

    def __init__(
        self, config: EngineConfig, *, progress: ProgressCallback | None = None, core: CoreFactory = default_core
    ) -> None:
        self.progress = progress
        self._config = config
        self._factory = core
        self._state = "starting"
        self._info: ModelInfo | None = None
        self._failure: Exception | None = None
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()  # the thread has sent its last message
        self._loaded = asyncio.Event()
        self._router = RequestRouter(self._inbox.put, self._require_engine)
        self._adapters = AdapterCalls(self._inbox.put, self._require_engine, config)
        self._looks = LookCalls(self._inbox.put, self._require_engine)
        self._stats = StatsAccumulator()
        self._stats_waiters: list[asyncio.Future[None]] = []

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def state(self) -> str:
        return self._state

    @property
    def restarts(self) -> int:
        return 0

    def start_nowait(self) -> None:
        """Begin to load, reporting to the running event loop."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    async def wait_ready(self) -> ModelInfo:
        """Wait until requests are served; raises LoadError if that will not happen."""
        await self._loaded.wait()
        if self._state != "ready" or self._info is None:
            raise LoadError(str(self._failure or "the engine was closed before it was ready")) from self._failure
        return self._info

    async def start(self) -> ModelInfo:
        """start_nowait, then wait_ready."""
        self.start_nowait()
        return await self.wait_ready()

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`."""
        return self._router.generate(request)

    def end_sample(self, request_id: str, index: int) -> None:
        """See `EngineClient.end_sample`."""
        self._router.end_sample(request_id, index)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`."""
        return await self._adapters.load(source)

    def drop_adapter(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        self._adapters.drop(adapter_id)

    async def look(self, question: EngineQuestion[A]) -> A:
        """See `EngineClient.look`."""
        return await self._looks.look(question)

    async def stats(self) -> EngineStats:
        """Statistics after the step that runs; `*_seconds` samples are those since the previous call."""
        self._require_engine()
        waiter = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._inbox.put(AskStats())
        await waiter
        self._require_engine()
        return self._stats.take()

    async def close(self) -> None:
        """End the engine after the step that runs; requests in flight get EngineDeadError. Safe to call twice."""
        self._state = "closed"
        self._inbox.put(Close())
        self._loaded.set()
        self._let_go("the engine was closed")
        if self._thread is not None:
            await self._ended.wait()
            self._thread.join()

    # ---- the worker thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            core = self._factory(self._config, lambda *report: self._emit(Progress(*report)))
        except Exception as error:
            self._failure = error
            self._emit(LoadFailed(str(error)))
            return
        self._emit(Ready(core.info))
        reason = ""
        try:
            EngineLoop(core, self._inbox, self._emit).run()
        except Exception as error:
            _logger.exception("the engine failed in a step")
            self._failure = error
            reason = f"{type(error).__name__}: {error}"
        del core  # its memory goes before close() returns
        self._emit(Crashed(reason))

    def _emit(self, message: Message) -> None:
        assert self._loop is not None  # set before the thread began
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._receive, message)

    # ---- the event loop ----------------------------------------------------------------------------------------------
    def _receive(self, message: Message) -> None:
        if isinstance(message, StepDone) and message.stats is not None:
            self._stats.add(message.stats)
        if any(part.deliver(message) for part in (self._router, self._adapters, self._looks)):
            return
        match message:
            case Stats(stats):
                self._stats.add(stats)
                for waiter in self._stats_waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                self._stats_waiters.clear()
            case Progress(stage, done, total):
                if self.progress is not None:
                    self.progress(stage, done, total)
            case Ready(info):
                self._info = info
                if self._state == "starting":
                    self._state = "ready"
                self._loaded.set()
            case LoadFailed(reason) | Crashed(reason):
                if self._state != "closed":
                    self._state = "failed"
                self._let_go(f"the engine failed: {reason}")
                self._loaded.set()
                self._ended.set()

    def _let_go(self, reason: str) -> None:
        self._router.fail_all(lambda _: EngineDeadError(reason))
        self._adapters.fail_all(lambda: EngineDeadError(reason))
        self._looks.fail_all(lambda: EngineDeadError(reason))
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._stats_waiters.clear()

    def _require_engine(self) -> None:
        match self._state:
            case "starting":
                raise EngineDeadError("the model is still loading; try again soon")
            case "failed":
                raise EngineDeadError(f"the engine failed: {self._failure}")
            case "closed":
                raise EngineDeadError("the engine was closed")
