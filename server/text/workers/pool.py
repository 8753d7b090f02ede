"""The pool of text workers: limits of time, memory and concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from windlass.server.text.pair_prompts import PairTemplate
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import Done, Job, OutOfMemory, Refused, TaskCall, WorkerSource
from windlass.server.text.workers.processes import ForkError, ForkServer, ProcessDiedError, TextProcess


class QueueFullError(Exception):
    """More work waits in this lane than it takes."""


class FairLimiter:
    """Lets `width` jobs run at once. Callers that wait take turns, so one with a hundred jobs holds another up by one.

    max_waiting: the total size of the jobs that may wait; those of one caller may be half of it.
    """

    def __init__(self, width: int, max_waiting: int) -> None:
        self._free = width
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, caller: str, size: int) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises QueueFullError without waiting."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller, size)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, caller: str, size: int) -> None:
        waiting = {name: sum(waiter.size for waiter in queue) for name, queue in self._queues.items()}
        if sum(waiting.values()) + size > self._max_waiting or waiting.get(caller, 0) + size > self._max_waiting // 2:
            raise QueueFullError
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._queues.setdefault(caller, deque()).append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._remove(caller, waiter)
            else:
                self._release()  # it was given the place in the same moment
            raise

    def _release(self) -> None:
        while self._queues:
            caller, queue = next(iter(self._queues.items()))
            waiter = queue.popleft()
            if queue:
                self._queues.move_to_end(caller)
            else:
                del self._queues[caller]
            # One that was cancelled a moment ago stays queued until its task runs again.
            if not waiter.granted.done():
                waiter.granted.set_result(None)
                return
        self._free += 1

    def _remove(self, caller: str, waiter: _Waiter) -> None:
        queue = self._queues.get(caller)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[caller]


@dataclass(eq=False, slots=True)
class _Waiter:
    """A job that waits. given: done once it may run."""

    size: int
    granted: asyncio.Future[None]


R = TypeVar("R")

LARGE_JOB = 64 * 1024  # characters or token ids from which a job goes to the lane of large ones

RECYCLE_JOB_SIZE = 256 * 1024  # characters or token ids after which a process is replaced, which gives its memory back

MAX_IDLE_PROCESSES = 3


class RefusedError(Exception):
    """The job's input is at fault; the message is fit for the caller."""


class ClosedError(Exception):
    """There are no text processes, and will be none soon."""


class OutOfMemoryError(Exception):
    """The job needed more memory than it may have."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one job may take. seconds: from its start, waiting for its turn not counted. memory: bytes."""

    seconds: float
    memory: int


class TextPool:
    """Processes for text jobs. Starts nothing until `spawn` or the first job.

    short, large: jobs of each kind that run at once. max_waiting: total size of the large jobs that may wait.
    processes_lost: those that ended when nobody had asked them to.
    """

    def __init__(
        self, source: WorkerSource, *, short: int, large: int, templates: int, grammars: int, max_waiting: int
    ) -> None:
        self._source = source
        self._short, self._large = FairLimiter(short, max_waiting), FairLimiter(large, max_waiting)
        self.templates, self.grammars = FairLimiter(templates, max_waiting), FairLimiter(grammars, max_waiting)
        self._threads = ThreadPoolExecutor(short + large + templates + grammars, thread_name_prefix="windlass-text")
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._loaded = False
        self._idle: list[TextProcess] = []
        self._running: set[TextProcess] = set()
        self._closed = False
        self.processes_lost = 0

    def spawn(self) -> None:
        """Begin to load, without waiting."""
        if self._server is None:
            self._server = ForkServer(self._source)

    def wait_loaded(self) -> None:
        """Load, and wait for it; blocks. Raises LoadError where the tokenizer or the chat template cannot be used."""
        with self._lock:
            self._ensure_server()

    def pairs(self) -> PairTemplate | None:
        """How pairs of texts are put to the model, if a template says so; blocks until it is loaded, raises as `run` does."""
        with self._lock:
            return self._ensure_server().pairs

    async def run(
        self, call: TaskCall[R], *, size: int, limits: Limits, caller: str = "", limiter: FairLimiter | None = None
    ) -> R:
        """What a call of `TextTasks` comes to.

        size: characters or token ids. caller: waiting jobs of different callers take turns. lane: by size where None.
        Raises RefusedError, OutOfMemoryError, TooSlowError, ProcessDiedError, QueueFullError, ClosedError. Cancelling it
        kills the job.
        """
        limiter = limiter or (self._large if size >= LARGE_JOB else self._short)
        async with limiter.slot(caller, size):
            handle = _JobHandle()
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, self._run_job, Job(call, limits.memory), limits.seconds, size, handle
            )
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                handle.cancel()
                with contextlib.suppress(Exception):
                    await running  # the place in the lane is free once the process is dead
                raise
        match result:
            case Done(value):
                return cast(R, value)
            case Refused(message):
                raise RefusedError(message)
            case _:
                assert isinstance(result, OutOfMemory)
                raise OutOfMemoryError

    def close(self) -> None:
        """End every process, without waiting for their work: jobs that run fail."""
        self._closed = True  # without the lock, which a thread may hold for as long as loading takes
        if self._server is not None:
            self._server.kill()
        for process in [*list(self._running), *self._idle]:
            process.interrupt()
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().kill()

    # ---- on threads --------------------------------------------------------------------------------------------------
    def _run_job(self, job: Job, seconds: float, size: int, handle: _JobHandle) -> frames.Result:
        body = frames.encode(job)
        process, fresh = self._acquire_process()
        try:
            result = self._run_on_process(process, handle, body, seconds)
        except ProcessDiedError:
            self.processes_lost += not self._closed
            if fresh or self._closed:
                raise
            process = self._fork()  # it may have died while it was idle, through no fault of this job
            result = self._run_on_process(process, handle, body, seconds)
        process.needs_recycling |= size >= RECYCLE_JOB_SIZE or not isinstance(result, Done)
        self._return_process(process)
        return result

    def _run_on_process(self, process: TextProcess, handle: _JobHandle, body: bytes, seconds: float) -> frames.Result:
        self._running.add(process)
        try:
            if self._closed or not handle.attach(process):
                process.kill()
                raise ClosedError("the server is shutting down")
            result = process.run(body, seconds)
        except BaseException:
            process.kill()  # nobody else knows of it; without effect where it is dead
            raise
        finally:
            self._running.discard(process)
            if not handle.detach():
                process.kill()  # cancelled: it may be dead already
        return result

    def _acquire_process(self) -> tuple[TextProcess, bool]:
        """A process, and whether it is a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._fork(), True

    def _fork(self) -> TextProcess:
        with self._lock:
            for _ in range(2):
                server = self._ensure_server()
                try:
                    return server.fork()
                except ForkError as error:
                    raise ClosedError(f"no further process can be started ({error}): try again later") from None
                except OSError:  # it was killed, or does not answer: another takes its place
                    self.processes_lost += 1
                    server.kill()
        raise ClosedError("the processes for tokenizing and chat templates cannot be started")

    def _return_process(self, process: TextProcess) -> None:
        with self._lock:
            if not (process.exited or process.needs_recycling or self._closed or len(self._idle) >= MAX_IDLE_PROCESSES):
                self._idle.append(process)
                return
        process.kill()

    def _ensure_server(self) -> ForkServer:
        if self._closed:
            raise ClosedError("the server is shutting down")
        if self._server is not None and not self._server.alive:
            self._server.kill()
            self._server, self._loaded = None, False
        self.spawn()
        server = self._server
        assert server is not None
        if not self._loaded:
            server.wait_loaded()
            self._loaded = True
        return server


class _JobHandle:
    """The process that runs a job, while it does, so that the job can be cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: TextProcess | None = None
        self._cancelled = False

    def attach(self, process: TextProcess) -> bool:
        """The job runs there from now on; False where it is cancelled already."""
        with self._lock:
            self._process = process
            return not self._cancelled

    def detach(self) -> bool:
        """The job is over; False where it was cancelled, and its process with it."""
        with self._lock:
            self._process = None
            return not self._cancelled

    def cancel(self) -> None:
        """End the process that runs the job, if one does."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.interrupt()
