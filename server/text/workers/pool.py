"""The pool of text workers: limits of time, memory and concurrency.

`ForkServer` and `TextProcess` start the fork server, fork from it, run a job with time limits, and kill. They block and belong
on threads; `TextPool` connects them to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from windlass.engine.errors import LoadError
from windlass.engine.process_setup import child_output_fd
from windlass.server.text.tokenizer_files import PairTemplate
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import ANSWER, COMMAND, FORK, REAP, Limits, NextPhase, Result, WorkerSource

LOAD_SECONDS = 120.0  # for the tokenizer, which the API process has already loaded
COMPILE_SECONDS = 5.0  # for each chat template
CONTROL_SECONDS = 5.0  # for a command to the fork server, which takes milliseconds
LOWER_PRIORITY_AFTER = 0.25  # seconds until a job gets a lower priority than the engine and the streams
LOWER_PRIORITY = 10
RECYCLE_JOB_SIZE = 256 * 1024  # characters or token ids after which a process is replaced, to release its memory


class TextWorkerError(Exception):
    """A job failed. phase: index of the phase in which it did."""

    phase = 0


class RefusedError(TextWorkerError):
    """The input of the job is at fault; the message is meant for the client."""


class OutOfMemoryError(TextWorkerError):
    """The job exceeded its memory limit."""


class TooSlowError(TextWorkerError):
    """The job exceeded its time limit; its process was killed."""


class ProcessDiedError(TextWorkerError):
    """A text process ended during a job; the message names the signal."""


class KilledError(ProcessDiedError):
    """The process was killed from outside, as the system does when memory runs out; the job is probably not at fault."""


class ClosedError(TextWorkerError):
    """No text process is available or can be started."""


class ForkError(Exception):
    """The system cannot start another process; the message has the reason."""


class ForkServer:
    """A running `windlass.server.text.workers.fork_server`; it begins to load at once. Thread-safe.

    pairs: once loaded, the template of pairs of texts, if there is one.
    """

    def __init__(self, source: WorkerSource) -> None:
        self._source = source
        self.pairs: PairTemplate | None = None
        self._lock = threading.RLock()  # held while waiting on the control socket
        self._control, theirs = socket.socketpair()
        with theirs:
            output = child_output_fd()
            # As for the engine: -P keeps the working directory off the import path; a new session is safe from ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.server.text.workers.fork_server", f"--fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # threads would not survive a fork
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_loaded(self) -> None:
        """Wait until it can fork. Raises LoadError if a template cannot be used."""
        with self._lock:
            self._control.settimeout(LOAD_SECONDS)
            with contextlib.suppress(OSError):  # if it is gone, `_expect` reports it
                frames.send(self._control, self._source)
            self._expect("the tokenizer cannot be loaded in a process of its own", LOAD_SECONDS)
            hint = "give another with `chat_template`"
            self._expect("the chat template cannot be used", COMPILE_SECONDS, hint)
            if self._source.pair_template is None:
                problem, hint = "the chat template of this model", "name another with `rerank_template`"
            else:
                problem, hint = "its template", "change `rerank_template`"
            self.pairs = self._expect(f"pairs of texts cannot be ranked by {problem} ({hint})", COMPILE_SECONDS)
            self._control.settimeout(CONTROL_SECONDS)

    def _expect(self, problem: str, seconds: float, hint: str = "") -> Any:
        self._control.settimeout(seconds)
        reason = "its process ended"
        answer: Result | None = None
        try:
            answer = frames.receive(self._control)
        except TimeoutError:
            reason = f"it takes more than {seconds:g} s"
        except OSError:
            pass
        if answer is None or answer.error:
            self.kill()
            reason = reason if answer is None else answer.message
            raise LoadError(f"{problem}: {reason}" + (f" ({hint})" if hint else ""))
        return answer.value

    def fork(self) -> TextProcess:
        """A new text process. Raises ForkError, or OSError when the fork server is gone or does not answer."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._command():
                socket.send_fds(self._control, [COMMAND.pack(FORK, 0)], [theirs.fileno()])
                pid = self._receive_answer()
            if pid < 0:
                raise ForkError(os.strerror(-pid))
        except BaseException:
            ours.close()
            raise
        return TextProcess(self, ours, pid)

    def reap(self, pid: int) -> int | None:
        """Return code of a dead process, as in subprocess; None if the fork server is gone or does not answer."""
        with contextlib.suppress(OSError), self._command():
            self._control.sendall(COMMAND.pack(REAP, pid))
            return self._receive_answer()
        return None

    @contextlib.contextmanager
    def _command(self) -> Iterator[None]:
        """Scope of one command and its answer. A late answer would be taken for that of the next command, with a wrong process
        id, so the fork server is killed before it can be used again."""
        with self._lock:
            try:
                yield
            except OSError:
                self.kill()
                raise

    def _receive_answer(self) -> int:
        data = self._control.recv(ANSWER.size)
        if len(data) < ANSWER.size:
            raise ConnectionError("the fork server is gone")
        return int(ANSWER.unpack(data)[0])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def session(self) -> int:
        """Session id of the fork server and its forks."""
        return self._process.pid

    def kill(self) -> None:
        """End the fork server; its forks are killed by their owners. Idempotent and safe on any thread."""
        self._process.kill()
        self._process.wait()
        # The end of the process wakes threads that wait on the socket. Closing it before that could reuse its number.
        with self._lock:
            self._control.close()


def _wait_readable(seconds: float, connection: socket.socket) -> bool:
    """Whether data arrives in time. `poll` because `select` does not support descriptors above 1,023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class TextProcess:
    """A forked process that runs one job at a time. `needs_recycling`: it ran a slow or large job."""

    def __init__(self, server: ForkServer, connection: socket.socket, pid: int) -> None:
        self._server = server
        self._connection = connection
        self._pid = pid
        self._lock = threading.Lock()
        self._exited = self._interrupted = False
        self.needs_recycling = False

    def run(self, job: bytes, limits: Sequence[Limits]) -> Result:
        """Run an encoded `Job` with these limits.

        Raises TooSlowError, ProcessDiedError or KilledError, after which the process is dead.
        """
        phase, lowered = 0, False
        now = time.monotonic()
        lower_at, deadline = now + LOWER_PRIORITY_AFTER, now + limits[0].seconds
        message: NextPhase | Result | None = None
        error: TextWorkerError | None = None
        try:
            self._connection.settimeout(limits[0].seconds)
            frames.send_encoded(self._connection, job)
            while True:
                wait = max(0.0, min(lower_at, deadline) - time.monotonic())
                if not lowered and not _wait_readable(wait, self._connection):
                    self._lower_priority()
                    lowered = True
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                message = frames.receive(self._connection)
                if not isinstance(message, NextPhase):
                    break
                self.needs_recycling |= message.size >= RECYCLE_JOB_SIZE
                phase += 1
                deadline = time.monotonic() + limits[phase].seconds
        except TimeoutError:
            self.kill()
            error = TooSlowError()
        except OSError:
            message = None
        if isinstance(message, Result) and error is None:
            return message
        if error is None:
            interrupted = self._interrupted  # by this server, before `kill` does so
            code = self.kill()
            killed = code == -signal.SIGKILL and not interrupted
            error = KilledError("SIGKILL") if killed else ProcessDiedError(_describe_exit(code))
        error.phase = phase
        raise error

    def _lower_priority(self) -> None:
        self.needs_recycling = True  # its priority cannot be raised again
        with self._lock, contextlib.suppress(OSError):
            if not self._exited:
                os.setpriority(os.PRIO_PROCESS, self._pid, LOWER_PRIORITY)

    @property
    def exited(self) -> bool:
        """Whether it was killed."""
        return self._exited

    def interrupt(self) -> None:
        """Kill the process without waiting for its end; `run` then raises. Thread-safe."""
        with self._lock, contextlib.suppress(OSError):
            if not self._exited:
                self._interrupted = True
                # Until it is reaped the process id is its own. If the fork server is gone, the session shows whether it is.
                if self._server.alive or os.getsid(self._pid) == self._server.session:
                    os.kill(self._pid, signal.SIGKILL)
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the result

    def kill(self) -> int | None:
        """Interrupt and wait for the end; returns the return code if it is known."""
        self.interrupt()
        with self._lock:
            if self._exited:
                return None
            self._exited = True
            code = self._server.reap(self._pid)
            self._connection.close()
            return code


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return "it ended"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


LARGE_JOB = 64 * 1024  # characters or token ids from which a job takes the slot of large jobs
MAX_IDLE_PROCESSES = 3
MAX_CRASHES, CRASH_SECONDS = 3, 30.0  # jobs of one kind and caller that may end their processes within this time
_MAX_CRASHING = 1024  # kinds and callers whose crashes are remembered
R = TypeVar("R")

_logger = logging.getLogger("windlass.server")


class QueueFullError(TextWorkerError):
    """Too much work is already waiting for a slot."""


class TooManyCrashesError(TextWorkerError):
    """Jobs of this caller have ended their processes repeatedly. retry_after: seconds until the next one may run."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("requests like this one have ended the processes they ran in")
        self.retry_after = retry_after


class FairLimiter:
    """Lets `width` jobs run at once. Waiting callers take turns, so a caller with 100 jobs delays another by one job.

    max_waiting: total size of the waiting jobs; one caller may use half of it. per_caller: jobs of one caller that run at once.
    """

    def __init__(self, width: int, max_waiting: int, *, per_caller: int | None = None) -> None:
        self._free = width
        self._max_waiting = max_waiting
        self._per_caller = per_caller or width
        self._running: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, caller: str, size: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises QueueFullError without waiting."""
        if self._may_start(caller):
            self._start(caller)
        else:
            await self._wait(caller, size)
        try:
            yield
        finally:
            self._release(caller)

    def _may_start(self, caller: str) -> bool:
        return self._free > 0 and self._running[caller] < self._per_caller

    def _start(self, caller: str) -> None:
        self._free -= 1
        self._running[caller] += 1

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
                self._release(caller)  # the slot was granted at the same moment
            raise

    def _release(self, caller: str) -> None:
        self._free += 1
        self._running -= Counter([caller])  # without callers that have no running job
        while self._free and (next_caller := next(filter(self._may_start, self._queues), None)) is not None:
            queue = self._queues[next_caller]
            waiter = queue.popleft()
            if queue:
                self._queues.move_to_end(next_caller)
            else:
                del self._queues[next_caller]
            # A waiter that was just cancelled stays queued until its task runs again.
            if not waiter.granted.done():
                self._start(next_caller)
                waiter.granted.set_result(None)

    def _remove(self, caller: str, waiter: _Waiter) -> None:
        queue = self._queues.get(caller)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[caller]


@dataclass(eq=False, slots=True)
class _Waiter:
    """A waiting job. granted: done once it may run."""

    size: int
    granted: asyncio.Future[None]


class TextPool:
    """Processes for text jobs. Starts no process until `spawn` or the first job.

    short, large, templates, grammars: concurrent jobs of each kind. As many slow grammars run as quick ones, of different
    callers. max_waiting: see `FairLimiter`.
    jobs: number of jobs run. processes_lost: processes that ended unexpectedly.
    """

    def __init__(
        self, source: WorkerSource, *, short: int, large: int, templates: int, grammars: int, max_waiting: int
    ) -> None:
        self._source = source
        self._short, self._large = FairLimiter(short, max_waiting), FairLimiter(large, max_waiting)
        self.templates, self.grammars = FairLimiter(templates, max_waiting), FairLimiter(grammars, max_waiting)
        self.slow_grammars = FairLimiter(grammars, max_waiting, per_caller=1)
        self._threads = ThreadPoolExecutor(short + large + templates + 2 * grammars, thread_name_prefix="windlass-text")
        self._crashes: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()  # times, by kind of job and caller
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._loaded = False
        self._idle: list[TextProcess] = []
        self._running: set[TextProcess] = set()
        self._closed = False
        self.jobs = 0
        self.processes_lost = 0

    def spawn(self) -> None:
        """Start loading, without waiting."""
        if self._server is None:
            self._server = ForkServer(self._source)

    def wait_loaded(self) -> None:
        """Load; blocks. Raises LoadError if the tokenizer or the chat template cannot be used."""
        with self._lock:
            self._ensure_server()

    def pairs(self) -> PairTemplate | None:
        """The template of pairs of texts, if there is one; blocks until it is loaded. Raises LoadError and ClosedError."""
        with self._lock:
            return self._ensure_server().pairs

    async def run(
        self, task: partial[R], *limits: Limits, size: int, caller: str = "", limiter: FairLimiter | None = None
    ) -> R:
        """Run a method of `TextTasks`, given as a partial with keyword arguments only; returns its result.

        limits: of each phase of the job. size: of its input, in characters or token ids. caller: waiting jobs of different
        callers take turns. limiter: by size if None. Raises TextWorkerError. Cancelling it kills the job.
        """
        self.jobs += 1
        kind = task.func.__name__, caller
        self._check_crashes(kind)
        limiters = [limiter or (self._large if size >= LARGE_JOB else self._short)]
        if len(limits) > 1 and size >= LARGE_JOB:
            # A large chat is tokenized after rendering. In this order it holds no template slot while it waits.
            limiters.insert(0, self._large)
        async with contextlib.AsyncExitStack() as slots:
            for each in limiters:
                await slots.enter_async_context(each.slot(caller, size))
            handle = _JobHandle()
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, self._run_job, task, limits, size, handle
            )
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                handle.cancel()
                with contextlib.suppress(Exception):
                    await running  # the slots are free once the process is dead
                raise
            except ProcessDiedError as death:
                _logger.warning("a text worker ended in %s: %s", kind[0], death)
                if not isinstance(death, KilledError):
                    self._count_crash(kind)
                raise
        return cast(R, _value_of(result))

    def run_blocking(self, task: partial[R], *limits: Limits) -> R:
        """Run a small job without waiting for a slot; blocks. Raises TextWorkerError and LoadError."""
        return cast(R, _value_of(self._run_job(task, limits, 0, _JobHandle())))

    def close(self) -> None:
        """End all processes without waiting for their work; running jobs fail."""
        self._closed = True  # without the lock, which a loading thread may hold for long
        if self._server is not None:
            self._server.kill()
        for process in [*list(self._running), *self._idle]:
            process.interrupt()
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().kill()

    def _check_crashes(self, kind: tuple[str, str]) -> None:
        times = self._crashes.get(kind)
        if times is not None and len(times) == MAX_CRASHES and (seconds := times[0] + CRASH_SECONDS - _now()) > 0:
            raise TooManyCrashesError(seconds)

    def _count_crash(self, kind: tuple[str, str]) -> None:
        self._crashes.setdefault(kind, deque(maxlen=MAX_CRASHES)).append(_now())
        self._crashes.move_to_end(kind)
        if len(self._crashes) > _MAX_CRASHING:
            self._crashes.popitem(last=False)

    # ---- on threads --------------------------------------------------------------------------------------------------
    def _run_job(self, task: partial[R], limits: Sequence[Limits], size: int, handle: _JobHandle) -> Result:
        body = frames.encode((task, limits))
        process, fresh = self._acquire_process()
        try:
            result = self._run_on_process(process, handle, body, limits)
        except ProcessDiedError:
            self.processes_lost += not self._closed
            if fresh or self._closed:
                raise
            process = self._fork()  # it may have died while idle, and jobs can be repeated
            result = self._run_on_process(process, handle, body, limits)
        process.needs_recycling |= size >= RECYCLE_JOB_SIZE or bool(result.error)
        self._return_process(process)
        return result

    def _run_on_process(
        self, process: TextProcess, handle: _JobHandle, body: bytes, limits: Sequence[Limits]
    ) -> Result:
        self._running.add(process)
        try:
            if self._closed or not handle.attach(process):
                process.kill()
                raise ClosedError("the server is shutting down")
            result = process.run(body, limits)
        except BaseException:
            process.kill()  # it has no other owner
            raise
        finally:
            self._running.discard(process)
            if not handle.detach():
                process.kill()
        return result

    def _acquire_process(self) -> tuple[TextProcess, bool]:
        """A process, and whether it is new."""
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
                except OSError:  # it was killed or does not answer: replace it
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


def _now() -> float:
    return asyncio.get_running_loop().time()


def _value_of(result: Result) -> object:
    """The value of a job; raises TextWorkerError if it failed."""
    if result.error:
        error = RefusedError(result.message) if result.error == "input" else OutOfMemoryError()
        error.phase = result.phase
        raise error
    return result.value


class _JobHandle:
    """Link from a running job to its process, for cancelling it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: TextProcess | None = None
        self._cancelled = False

    def attach(self, process: TextProcess) -> bool:
        """Set the process; False if the job was already cancelled."""
        with self._lock:
            self._process = process
            return not self._cancelled

    def detach(self) -> bool:
        """Clear the process at the end of the job; False if the job was cancelled."""
        with self._lock:
            self._process = None
            return not self._cancelled

    def cancel(self) -> None:
        """Kill the process of the job, if it runs."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.interrupt()
