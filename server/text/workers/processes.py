"""Text processes as their parent holds them: start the fork server, fork from it, run a job with a time limit, kill.

Everything here blocks and belongs on threads; `pool.py` brings it to the event loop.
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
from collections.abc import Iterator
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.process_setup import child_output_fd
from windlass.server.text.pair_prompts import PairTemplate
from windlass.server.text.workers import frames
from windlass.server.text.workers.frames import ANSWER, COMMAND, FORK, REAP, Done, Refused, Result, WorkerSource

LOAD_SECONDS = 120.0  # for the tokenizer, which this process has loaded before
COMPILE_SECONDS = 5.0  # for the chat template
CONTROL_SECONDS = 5.0  # for the fork server to answer, which takes milliseconds
LOWER_PRIORITY_AFTER = 0.25  # seconds after which a job gets a lower priority than the engine and the streams
LOWER_PRIORITY = 10


class TooSlowError(Exception):
    """A job used up its seconds; its process was killed."""


class ProcessDiedError(Exception):
    """A text process ended during a job; the message says how."""


class KilledError(ProcessDiedError):
    """Somebody else killed it, as the system does where memory runs out: hardly this job's fault."""


class ForkError(Exception):
    """The system has no room for another process; the message says why."""


class ForkServer:
    """A running `windlass.server.text.workers.fork_server`; it begins to load at once. Thread-safe.

    pairs: once it has loaded, how pairs of texts are put to the model, if a template says so.
    """

    def __init__(self, source: WorkerSource) -> None:
        self._source = source
        self.pairs: PairTemplate | None = None
        self._lock = threading.RLock()  # held by whoever waits on the control socket
        self._control, theirs = socket.socketpair()
        with theirs:
            output = child_output_fd()
            # As with the engine: -P keeps the working directory off the import path, a session of its own the ctrl-C.
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
        """Wait until it can fork. Raises LoadError where a template cannot be used."""
        with self._lock:
            self._control.settimeout(LOAD_SECONDS)
            with contextlib.suppress(OSError):  # it is gone: found out when it does not answer
                frames.send(self._control, self._source)
            self._expect("the tokenizer cannot be loaded in a process of its own", LOAD_SECONDS)
            self._expect("the chat template cannot be used", COMPILE_SECONDS)
            source_name = "the chat template of this model" if self._source.pair_template is None else "its template"
            hint = "name another with --rerank-template" if self._source.pair_template is None else "change it"
            problem = f"pairs of texts cannot be ranked by {source_name} ({hint})"
            self.pairs = self._expect(problem, COMPILE_SECONDS)
            self._control.settimeout(CONTROL_SECONDS)

    def _expect(self, problem: str, seconds: float) -> Any:
        self._control.settimeout(seconds)
        reason = "its process ended"
        try:
            answer = frames.receive(self._control)
        except TimeoutError:
            answer, reason = None, f"it takes more than {seconds:g} s"
        except OSError:
            answer = None
        if not isinstance(answer, Done):
            self.kill()
            raise LoadError(f"{problem}: {answer.message if isinstance(answer, Refused) else reason}")
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
        """How a dead process ended, as subprocess tells it; None when the fork server is gone or does not answer."""
        with contextlib.suppress(OSError), self._command():
            self._control.sendall(COMMAND.pack(REAP, pid))
            return self._receive_answer()
        return None

    @contextlib.contextmanager
    def _command(self) -> Iterator[None]:
        """One command and its answer. An answer that did not come in time would be taken for that of the next command, and its
        process id for another's: then the fork server is ended, before anybody else asks it."""
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
        """Of it and all that it forked."""
        return self._process.pid

    def kill(self) -> None:
        """End it; what it forked is ended by those who hold it. Safe to call twice and from any thread."""
        self._process.kill()
        self._process.wait()
        # Its end wakes whoever waits on the socket. Were it closed meanwhile, its number could become another socket's.
        with self._lock:
            self._control.close()


def _wait_readable(seconds: float, connection: socket.socket) -> bool:
    """Whether there is something to read in time. With many clients a descriptor is beyond those that `select` knows."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class TextProcess:
    """A forked process that runs one job at a time. `needs_recycling`: its last job was slow or large."""

    def __init__(self, server: ForkServer, connection: socket.socket, pid: int) -> None:
        self._server = server
        self._connection = connection
        self._pid = pid
        self._lock = threading.Lock()
        self._exited = self._interrupted = False
        self.needs_recycling = False

    def run(self, job: bytes, seconds: float) -> Result:
        """Run an encoded `Job`. Raises TooSlowError, ProcessDiedError or KilledError: the process is dead then."""
        deadline = time.monotonic() + seconds
        try:
            self._connection.settimeout(seconds)
            frames.send_encoded(self._connection, job)
            if not _wait_readable(min(LOWER_PRIORITY_AFTER, seconds), self._connection):
                self._lower_priority()
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            answer: Result | None = frames.receive(self._connection)
        except TimeoutError:
            self.kill()
            raise TooSlowError from None
        except OSError:
            answer = None
        if answer is None:
            ours = self._interrupted
            code = self.kill()
            raise (
                KilledError("SIGKILL")
                if code == -signal.SIGKILL and not ours
                else ProcessDiedError(_describe_exit(code))
            )
        return answer

    def _lower_priority(self) -> None:
        self.needs_recycling = True  # its priority cannot be raised again
        with self._lock, contextlib.suppress(OSError):
            if not self._exited:
                os.setpriority(os.PRIO_PROCESS, self._pid, LOWER_PRIORITY)

    @property
    def exited(self) -> bool:
        """Whether it was killed and is gone."""
        return self._exited

    def interrupt(self) -> None:
        """End it at once, whatever it does, without waiting; `run` then raises. May be called from any thread."""
        with self._lock, contextlib.suppress(OSError):
            if not self._exited:
                self._interrupted = True
                # Not reaped yet, so the id is still its own, unless the fork server is gone: then only who is of its session.
                if self._server.alive or os.getsid(self._pid) == self._server.session:
                    os.kill(self._pid, signal.SIGKILL)
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer

    def kill(self) -> int | None:
        """The same, and wait for its end; returns how it ended where that is known."""
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
