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
from windlass.server.text.workers.frames import Done, Job, OutOfMemory, Refused, TaskCall, TextSource
from windlass.server.text.workers.processes import ForkError, ForkServer, ProcessDiedError, TextProcess


class LaneFullError(Exception):
    """More work waits in this lane than it takes."""


class Lane:
    """Lets `width` jobs run at once. Callers that wait take turns, so one with a hundred jobs holds another up by one.

    max_waiting: the total size of the jobs that may wait; those of one caller may be half of it.
    """

    def __init__(self, width: int, max_waiting: int) -> None:
        self._free = width
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[_Place]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str, size: int) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises LaneFullError without waiting."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller, size)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, size: int) -> None:
        waiting = {name: sum(place.size for place in queue) for name, queue in self._queues.items()}
        if sum(waiting.values()) + size > self._max_waiting or waiting.get(caller, 0) + size > self._max_waiting // 2:
            raise LaneFullError
        place = _Place(size, asyncio.get_running_loop().create_future())
        self._queues.setdefault(caller, deque()).append(place)
        try:
            await place.given
        except asyncio.CancelledError:
            if place.given.cancelled():
                self._forget(caller, place)
            else:
                self._pass_on()  # it was given the place in the same moment
            raise

    def _pass_on(self) -> None:
        while self._queues:
            caller, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            if queue:
                self._queues.move_to_end(caller)
            else:
                del self._queues[caller]
            # One that was cancelled a moment ago stays queued until its task runs again.
            if not place.given.done():
                place.given.set_result(None)
                return
        self._free += 1

    def _forget(self, caller: str, place: _Place) -> None:
        queue = self._queues.get(caller)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[caller]


@dataclass(eq=False, slots=True)
class _Place:
    """A job that waits. given: done once it may run."""

    size: int
    given: asyncio.Future[None]


R = TypeVar("R")

LARGE_JOB = 64 * 1024  # characters or token ids from which a job goes to the lane of large ones

TIRED_BY = 256 * 1024  # characters or token ids after which a process is replaced, which gives its memory back

KEPT_IDLE = 3


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
        self, source: TextSource, *, short: int, large: int, templates: int, grammars: int, max_waiting: int
    ) -> None:
        self._source = source
        self._short, self._large = Lane(short, max_waiting), Lane(large, max_waiting)
        self.templates, self.grammars = Lane(templates, max_waiting), Lane(grammars, max_waiting)
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
        self, call: TaskCall[R], *, size: int, limits: Limits, caller: str = "", lane: Lane | None = None
    ) -> R:
        """What a call of `TextTasks` comes to.

        size: characters or token ids. caller: waiting jobs of different callers take turns. lane: by size where None.
        Raises RefusedError, OutOfMemoryError, TooSlowError, ProcessDiedError, LaneFullError, ClosedError. Cancelling it
        kills the job.
        """
        lane = lane or (self._large if size >= LARGE_JOB else self._short)
        async with lane.turn(caller, size):
            holder = _Holder()
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, self._call, Job(call, limits.memory), limits.seconds, size, holder
            )
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                holder.cancel()
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
    def _call(self, job: Job, seconds: float, size: int, holder: _Holder) -> frames.Result:
        body = frames.encode(job)
        process, fresh = self._take()
        try:
            result = self._run(process, holder, body, seconds)
        except ProcessDiedError:
            self.processes_lost += not self._closed
            if fresh or self._closed:
                raise
            process = self._fork()  # it may have died while it was idle, through no fault of this job
            result = self._run(process, holder, body, seconds)
        process.tired |= size >= TIRED_BY or not isinstance(result, Done)
        self._put(process)
        return result

    def _run(self, process: TextProcess, holder: _Holder, body: bytes, seconds: float) -> frames.Result:
        self._running.add(process)
        try:
            if self._closed or not holder.take(process):
                process.kill()
                raise ClosedError("the server is shutting down")
            result = process.run(body, seconds)
        except BaseException:
            process.kill()  # nobody else knows of it; without effect where it is dead
            raise
        finally:
            self._running.discard(process)
            if not holder.release():
                process.kill()  # cancelled: it may be dead already
        return result

    def _take(self) -> tuple[TextProcess, bool]:
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

    def _put(self, process: TextProcess) -> None:
        with self._lock:
            if not (process.ended or process.tired or self._closed or len(self._idle) >= KEPT_IDLE):
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


class _Holder:
    """The process that runs a job, while it does, so that the job can be cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: TextProcess | None = None
        self._cancelled = False

    def take(self, process: TextProcess) -> bool:
        """The job runs there from now on; False where it is cancelled already."""
        with self._lock:
            self._process = process
            return not self._cancelled

    def release(self) -> bool:
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
