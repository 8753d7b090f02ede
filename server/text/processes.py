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

from windlass.engine.errors import LoadError
from windlass.server.text import frames
from windlass.server.text.fork_commands import ANSWER, COMMAND, FORK, REAP
from windlass.server.text.frames import Done, Refused, Result, TextSource

LOAD_SECONDS = 120.0  # for the tokenizer, which this process has loaded before
COMPILE_SECONDS = 5.0  # for the chat template
PATIENCE = 0.25  # seconds after which a job steps back behind the engine and everybody's streams
LOWER_PRIORITY = 10


class TooSlowError(Exception):
    """A job used up its seconds; its process was killed."""


class ProcessDiedError(Exception):
    """A text process ended during a job; the message says how."""


class ForkServer:
    """A running `windlass.server.text.fork_server`; it begins to load at once. Thread-safe."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            # As with the engine: -P keeps the working directory off the import path, a session of its own the ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.server.text.fork_server", f"--fd={theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # threads would not survive a fork
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )

    def wait_loaded(self) -> None:
        """Wait until it can fork. Raises LoadError where the chat template cannot be used."""
        try:
            self._control.settimeout(LOAD_SECONDS)
            frames.send(self._control, self._source)
            self._expect("the tokenizer cannot be loaded in a process of its own")
            self._control.settimeout(COMPILE_SECONDS)
            self._expect("the chat template cannot be used")
        except TimeoutError:
            self.kill()
            raise LoadError(
                f"the chat template cannot be used: compiling it takes more than {COMPILE_SECONDS:g} s"
            ) from None
        except OSError as error:
            self.kill()
            raise LoadError(f"the process for tokenizing and chat templates ended while loading ({error})") from None
        self._control.settimeout(None)

    def _expect(self, problem: str) -> None:
        answer = frames.receive(self._control)
        if not isinstance(answer, Done):
            self.kill()
            reason = answer.message if isinstance(answer, Refused) else "its process ended"
            raise LoadError(f"{problem}: {reason}")

    def fork(self) -> TextProcess:
        """A new text process. Raises OSError when the fork server is gone."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [COMMAND.pack(FORK, 0)], [theirs.fileno()])
            pid = self._answer()
        return TextProcess(self, ours, pid)

    def reap(self, pid: int) -> int | None:
        """How a dead process ended, as subprocess tells it; None when the fork server is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(COMMAND.pack(REAP, pid))
            return self._answer()
        return None

    def _answer(self) -> int:
        data = self._control.recv(ANSWER.size)
        if len(data) < ANSWER.size:
            raise ConnectionError("the fork server is gone")
        return int(ANSWER.unpack(data)[0])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it, and with it what it forked that is idle; running jobs are killed by those who wait for them."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class TextProcess:
    """A forked process that runs one job at a time. `tired`: its last job was slow or large, so it should be replaced."""

    def __init__(self, server: ForkServer, connection: socket.socket, pid: int) -> None:
        self._server = server
        self._connection = connection
        self._pid = pid
        self._lock = threading.Lock()
        self._ended = False
        self.tired = False

    def run(self, job: bytes, seconds: float) -> Result:
        """Run an encoded `Job`. Raises TooSlowError, or ProcessDiedError: the process is dead then."""
        deadline = time.monotonic() + seconds
        try:
            self._connection.settimeout(seconds)
            frames.send_encoded(self._connection, job)
            if not select.select([self._connection], [], [], min(PATIENCE, seconds))[0]:
                self._step_back()
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            answer: Result | None = frames.receive(self._connection)
        except TimeoutError:
            self.kill()
            raise TooSlowError from None
        except OSError:
            answer = None
        if answer is None:
            code = self.kill()
            raise ProcessDiedError(_how(code))
        return answer

    def _step_back(self) -> None:
        self.tired = True  # its priority cannot be raised again
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                os.setpriority(os.PRIO_PROCESS, self._pid, LOWER_PRIORITY)

    def interrupt(self) -> None:
        """End it at once, whatever it does, without waiting; `run` then raises. May be called from any thread."""
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer

    def kill(self) -> int | None:
        """The same, and wait for its end; returns how it ended where that is known."""
        self.interrupt()
        with self._lock:
            if self._ended:
                return None
            self._ended = True
            code = self._server.reap(self._pid)
            self._connection.close()
            return code


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return "it ended"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
