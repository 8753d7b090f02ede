"""Process client: an engine in a child process, supervised from an asyncio program that does not import torch.

Starts the child, carries messages, and when the child dies fails the requests in flight and starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

from windlass.engine.client.child_process import (
    ChildProcess,
    ChildSpawner,
    ProcessPlacement,
    wait_ended,
    wait_for_stacks,
)
from windlass.engine.client.engine_client import EngineClient
from windlass.engine.client.request_router import AdapterCalls, InspectionCalls, RequestRouter, StatsCalls
from windlass.engine.client.supervision import STACK_SECONDS, CrashReports, Watchdog
from windlass.engine.core import messages
from windlass.engine.core.flight_recorder import recorded_request_id
from windlass.engine.core.messages import FrameReader, Message, ProgressCallback, encode
from windlass.engine.errors import EngineDeadError, LoadError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest

_logger = logging.getLogger("windlass.engine.client")

CLOSE_TIMEOUT = 5.0  # seconds an engine has to end by itself
NO_PROCESS_SECONDS = 1.0  # between attempts to start a process if the system has none left
FAILED_RELOADS = 3  # restarts in a row that fail to load, after which the engine is given up
_DEATH_SECONDS = 60.0  # within which deaths are counted


class SupervisedClient(EngineClient):
    """Start-up and state of a client that supervises child processes.

    progress: called in the event loop with (stage, done, total) while the model loads.
    """

    info: ModelInfo | None = None
    progress: ProgressCallback | None = None

    def __init__(self) -> None:
        self._failure = ""
        self._state_changed = asyncio.Event()

    @property
    def failure(self) -> str:
        """Why `state` is "failed", one line; empty otherwise."""
        return self._failure

    @abstractmethod
    def start_nowait(self) -> None:
        """Start to load and supervise, in the running event loop."""

    async def wait_ready(self) -> ModelInfo:
        """Wait until requests are served. Raises LoadError if that will not happen."""
        state = await self.wait_state("ready", "failed", "closed")
        if state != "ready" or self.info is None:
            raise LoadError(self._failure or "the engine was closed before it was ready")
        return self.info

    async def start(self) -> ModelInfo:
        """start_nowait, then wait_ready."""
        self.start_nowait()
        return await self.wait_ready()

    async def wait_state(self, *states: str) -> str:
        """Wait until `state` is one of `states` and return it."""
        while self.state not in states:
            await self._state_changed.wait()
        return self.state

    def _notify(self) -> None:
        """Wake those that wait for a change of state."""
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _unavailable(self) -> EngineDeadError:
        """The error of calls while no engine serves requests."""
        match self.state:
            case "starting":
                return EngineDeadError("the model is still loading; try again soon")
            case "failed":
                return EngineDeadError(f"the engine failed and was given up: {self.failure}")
            case "closed":
                return EngineDeadError("the engine was closed")
        return EngineDeadError("the engine is being restarted; try again soon")


class ProcessClient(SupervisedClient):
    """Client of one engine in a child process.

    hang_seconds: the engine is killed and restarted if requests are in flight and no step ends for this long; sooner if
    `Watchdog` detects that it is stuck.
    max_deaths: it is given up after this many within a minute.
    backoff: pause before the first restart in seconds, doubled for each further death in that minute, at most 10.
    crash_folder: where a report of each death is written, None for none.
    core: private; see `windlass.engine.core.engine_process`. child: a child that waits for its configuration; owned by the
    client from now on.
    """

    state = "starting"
    restarts = 0

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ProgressCallback | None = None,
        log_level: str = "warning",
        hang_seconds: float = 120.0,
        max_deaths: int = 5,
        backoff: float = 0.25,
        core: str | None = None,
        child: ChildProcess | None = None,
        crash_folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.progress = progress
        self.config = config  # of engines that are started, without adapters that were loaded later
        self._spawner = ChildSpawner(core, log_level, lambda: self._placement, child)
        self._hang_seconds = hang_seconds
        self._max_deaths = max_deaths
        self._backoff = backoff
        self._crashes = CrashReports(crash_folder)
        self._failed_requests: list[EngineRequest] = []  # that failed with the last engine
        self._closing = asyncio.Event()
        self._child: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._router = RequestRouter(self._send, self._require_engine)
        self._adapters = AdapterCalls(self._send, self._require_engine, config)
        self._inspections = InspectionCalls(self._send, self._require_engine)
        self._stats = StatsCalls(self._send, self._require_engine)
        self._reported: str | None = None  # the reason of the child's end, if the child or the watchdog gave one
        self._watchdog: Watchdog | None = None

    # -- the EngineClient protocol -------------------------------------------------------------------------------------
    @property
    def crash_report(self) -> Path | None:
        return self._crashes.last

    @property
    def adapter_ids(self) -> frozenset[int]:
        return self._adapters.loaded

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before the first spawn."""
        return self._child.process.pid if self._child else None

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        return self._router.generate(request)

    def end_sample(self, request_id: str, index: int) -> None:
        self._router.end_sample(request_id, index)

    async def load_adapter(self, source: AdapterSource) -> AdapterInfo:
        return await self._adapters.load(source)

    def drop_adapter(self, adapter_id: int) -> None:
        self._adapters.drop(adapter_id)

    async def inspect(self, query: IntrospectionQuery[A]) -> A:
        return await self._inspections.inspect(query)

    async def stats(self) -> EngineStats:
        return await self._stats.ask()

    async def close(self) -> None:
        """End the engine; requests in flight fail with EngineDeadError. Safe to call twice and before the start."""
        self._set_state("closed")
        self._closing.set()
        self._send(messages.Close())
        self._router.fail_all(lambda _: EngineDeadError("the engine was closed", begun=True))
        self._adapters.fail_all("the engine was closed")
        self._inspections.fail_all("the engine was closed")
        if self._supervisor is not None:
            if self.info is None and self._child is not None:
                self._child.process.kill()  # it might otherwise load for minutes
            await asyncio.wait({self._supervisor}, timeout=CLOSE_TIMEOUT)
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self.kill()

    # -- starting ------------------------------------------------------------------------------------------------------
    @property
    def _placement(self) -> ProcessPlacement:
        return ProcessPlacement(self.config.compute.cores, self.config.loading.shared_memory)

    def spawn(self) -> None:
        """Start the child now; needs no event loop. `start_nowait` does it otherwise."""
        if self._child is None:
            self._child = self._spawner.spawn()
            self._child.load(self.config)

    def start_nowait(self) -> None:
        self.spawn()
        if self._supervisor is None:
            self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="engine-supervisor")

    def kill(self, *, reap: bool = True) -> None:
        """Kill the child. Needs no event loop. reap: see `ChildProcess.kill`."""
        self._spawner.drop(reap=reap)
        if self._child is not None:
            self._child.kill(reap=reap)
            if self._writer is None:  # else the transport owns the socket
                self._child.socket.close()

    # -- supervision ---------------------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        deaths: deque[float] = deque()
        failed_reloads = 0
        while True:
            assert self._child is not None  # spawned before this task started
            loaded = await self._serve(self._child)
            if self._closing.is_set():
                return
            reason = self._reported or f"the engine process ended: {self._child.describe_end()}"
            if self.info is None:
                self._fail(self._reported or f"the engine process ended while loading: {self._child.describe_end()}")
                return
            memory = None if self._watchdog is None else self._watchdog.activity.memory
            report_note = await self._crashes.write(
                self._child, reason, self.config, self.info, self._failed_requests, memory
            )
            self._failed_requests = []  # prompts may be long
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - _DEATH_SECONDS:
                deaths.popleft()
            failed_reloads = 0 if loaded else failed_reloads + 1
            if len(deaths) >= self._max_deaths or failed_reloads >= FAILED_RELOADS:
                self._fail(
                    f"the engine died {len(deaths)} times within {_DEATH_SECONDS:g} seconds; last: {reason}{report_note}"
                )
                return
            pause = min(self._backoff * 2 ** (len(deaths) - 1), 10.0)
            _logger.error("%s; the engine restarts in %.2g s%s", reason, pause, report_note)
            if await self._wait_closing(pause):
                return
            self._child.release()
            while (child := self._next_child()) is None:
                if await self._wait_closing(NO_PROCESS_SECONDS):
                    return
            self._child = child
            self._child.load(self._adapters.restart_config(self.config))
            self.restarts += 1

    def _next_child(self) -> ChildProcess | None:
        try:
            return self._spawner.spawn()
        except OSError as error:
            _logger.error(
                "a new engine process cannot be started: %s; the next attempt is in %g s", error, NO_PROCESS_SECONDS
            )
            return None

    async def _wait_closing(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    async def _serve(self, child: ChildProcess) -> bool:
        """Carry messages until the child has ended, and reap it. True if it had loaded."""
        self._reported = None
        reader, writer = await asyncio.open_unix_connection(sock=child.socket, limit=1 << 20)
        self._writer = writer
        self._watchdog = watchdog = Watchdog(
            child,
            self._hang_seconds,
            has_pending_work=lambda: self._router.in_flight > 0,
            has_inspections=lambda: self._inspections.waiting > 0,
            suspect=self._suspect,
        )
        watching = asyncio.get_running_loop().create_task(self._watch(child, watchdog, writer), name="engine-watchdog")
        frames = FrameReader()
        try:
            try:
                with contextlib.suppress(ConnectionError):
                    while data := await reader.read(1 << 18):
                        for message in frames.feed(data):
                            self._receive(message)
            except Exception as error:  # messages are not read any more, so the engine must be replaced
                _logger.exception("a message from the engine could not be processed; the engine restarts")
                self._reported = f"a message from the engine could not be processed ({error!r}); its process was killed"
                child.process.kill()
            loaded = self.state == "ready"
            self._on_engine_exit()
            if self.info is not None and not self._closing.is_set():
                self._spawner.set_standby(True)  # it starts while the old one is reaped and its crash report written
            if not await wait_ended(child, 2.0):  # an orderly child ends within moments of closing its socket
                child.process.kill()
                await wait_ended(child, 10.0)
            return loaded
        finally:
            self._writer = None
            watching.cancel()
            writer.transport.abort()
            if not child.ended:
                child.kill()

    def _suspect(self, suspected: bool) -> None:
        # Once the child has ended it has no pending work, but its standby process is still needed.
        if self._writer is not None:
            self._spawner.set_standby(suspected)

    async def _watch(self, child: ChildProcess, watchdog: Watchdog, writer: asyncio.StreamWriter) -> None:
        """Kill a child that is stuck."""
        reason = await watchdog.watch()
        if reason is None:  # a child of the engine may hold the socket open; first read the engine's last messages
            asyncio.get_running_loop().call_later(0.5, writer.transport.abort)
            return
        self._reported = f"{reason}; its process was killed"
        if not watchdog.activity.stopped:
            await wait_for_stacks(child, STACK_SECONDS)
        child.process.kill()

    def _receive(self, message: Message) -> None:
        if self._watchdog is not None:
            self._watchdog.on_message(message)
        if any(part.deliver(message) for part in (self._stats, self._router, self._adapters, self._inspections)):
            return
        match message:
            case messages.StepStarted():
                pass
            case messages.Progress(stage, done, total):
                if self.progress is not None:
                    self.progress(stage, done, total)
            case messages.Ready(info):
                if not self._closing.is_set():
                    if self.info is not None:
                        _logger.warning("the engine is ready again")
                    self.info = info
                    self._set_state("ready")
            case messages.LoadFailed(reason) | messages.Crashed(reason):
                self._reported = reason
            case _:
                raise TypeError(f"an engine does not send {type(message).__name__} messages")

    # -- helpers -------------------------------------------------------------------------------------------------------
    def _send(self, message: Message) -> None:
        # Without a child the message is dropped: the router has failed, or will fail, all requests in flight.
        if self._writer is not None:
            self._writer.write(encode(message))

    def _require_engine(self) -> None:
        if self.state != "ready":
            raise self._unavailable()

    def _on_engine_exit(self) -> None:
        """Fail all calls at once, before the process is reaped and another one started."""
        self._writer = None
        self._failed_requests = self._router.requests
        if self.info is not None and not self._closing.is_set():
            self._set_state("restarting")
        last = None if self._child is None else self._child.last_requests()
        self._router.fail_all(
            lambda request_id: EngineDeadError(
                "the engine process ended while this request was running; send it again",
                begun=last is None or recorded_request_id(request_id) in last,
            )
        )
        self._adapters.fail_all("the engine process ended while loading this adapter")
        self._inspections.fail_all("the engine process ended before it answered: try again")
        self._stats.engine_gone()

    def _fail(self, reason: str) -> None:
        self._spawner.drop(reap=True)
        self._failure = reason
        self._set_state("failed")

    def _set_state(self, state: str) -> None:
        self.state = state
        self._notify()
