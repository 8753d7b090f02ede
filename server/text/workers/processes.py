"""Text processes seen from the API process: start the fork server, fork from it, run a job with time limits, kill.

Everything here blocks and belongs on threads; `pool.py` connects it to the event loop.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.process_setup import child_output_fd
from windlass.server.text.pair_prompts import PairTemplate
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
