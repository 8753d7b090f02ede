"""Engine child process: spawn with a private socket, load, wait, kill, and describe the exit; with one process on standby.

Free of asyncio except for the waiting functions, so a child can be spawned before an event loop exists and before its
configuration is known: meanwhile it imports its modules, which takes most of a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from windlass.engine.core.flight_recorder import FlightRecorder, StackMemory
from windlass.engine.core.messages import Load, encode
from windlass.engine.host_resources import thread_wait_environment
from windlass.engine.interface.config import EngineConfig
from windlass.engine.process_setup import child_output

STACKS_SIGNAL = signal.SIGUSR2

DEFAULT_CORE = "windlass.engine.core.engine_process:default_core"

ENGINE_MODULE = "windlass.engine.core.engine_core"  # by name: it brings torch


def preload_module(core: str) -> str | None:
    """What a child that is to make this core may import before it knows what to load."""
    return ENGINE_MODULE if core == DEFAULT_CORE else None


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where an engine process runs. cores: the only ones it may use, None for all. files: descriptors that it has too."""

    cores: tuple[int, ...] | None = None
    files: tuple[int, ...] = ()


UNPINNED = ProcessPlacement()


class ChildProcess:
    """A running `windlass.engine.core.engine_process`, which waits for `load`.

    ahead: a module to import meanwhile, see `preload_module`. seat: where it runs; OpenMP reads its cores once, so they are
    settled before torch comes.
    Attributes: `socket` is the parent's end, `process` the Popen object. `recorder` and `stacks`: what is left of it when it is gone.
    Raises OSError, and leaves nothing behind, where the system has no process or descriptor for it.
    """

    def __init__(
        self, core: str, log_level: str, *, preload: str | None = None, process_placement: ProcessPlacement = UNPINNED
    ) -> None:
        with contextlib.ExitStack() as parent_copies, contextlib.ExitStack() as cleanup:
            self.socket, theirs = socket.socketpair()
            cleanup.callback(self.socket.close)
            parent_copies.enter_context(theirs)
            descriptors = []
            for kind in (FlightRecorder, StackMemory):
                descriptors.append(kind.make())
                parent_copies.callback(os.close, descriptors[-1])
            self.recorder, self.stacks = FlightRecorder(descriptors[0]), StackMemory(descriptors[1])
            cleanup.callback(self.release)
            # -P keeps the working directory off the child's import path. A session of its own keeps the terminal's
            # ctrl-C away: the parent decides when the engine ends.
            options = [f"--fd={theirs.fileno()}", f"--core={core}", f"--log-level={log_level}"]
            options += [f"--box={descriptors[0]}", f"--stacks={descriptors[1]}"]
            options += [] if preload is None else [f"--ahead={preload}"]
            options += (
                [] if process_placement.cores is None else [f"--cores={','.join(map(str, process_placement.cores))}"]
            )
            output = child_output()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.engine.core.engine_process", *options],
                pass_fds=[theirs.fileno(), *descriptors, *process_placement.files],
                env={**os.environ, **thread_wait_environment(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            cleanup.pop_all()

    def load(self, config: EngineConfig) -> None:
        """Tell it what to load, once."""
        # It fits the socket's buffer, so this does not wait; a child that is already dead shows up as closed later.
        with contextlib.suppress(OSError):
            self.socket.sendall(encode(Load(config)))

    def ask_for_stacks(self) -> None:
        """Have it write to `stacks` what its threads do. One that is stopped will not."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACKS_SIGNAL)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self, *, reap: bool = True) -> None:
        """End it now, whatever it does. reap: wait, for seconds at most, until the system has done so."""
        self.process.kill()
        if not reap:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def close(self) -> None:
        """End it and close the socket, whoever had it last."""
        self.kill()
        self.socket.close()

    def last_requests(self) -> set[str] | None:
        """The ids of the requests in the last step that it began, None where not all of them are known."""
        plans = self.recorder.read()
        if not plans:
            return set()
        last = plans[-1]
        names = [sequence.get("request_id") for sequence in last["sequences"]]
        return set(names) if len(names) == last["num_sequences"] and None not in names else None

    def release(self) -> None:
        """Give back what was left of it."""
        self.recorder.close()
        self.stacks.close()

    def describe_end(self) -> str:
        """How it ended, for people: "killed by SIGKILL …" or "exit code 1"."""
        code = self.process.poll()
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ": perhaps the machine ran out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"


_logger = logging.getLogger("windlass.engine.client.engine_client")


class ChildSpawner:
    """core, log_level: see `ChildProcess`. seat: tells where the next one runs. waiting: one that waits already, taken first."""

    def __init__(
        self,
        core: str,
        log_level: str,
        process_placement: Callable[[], ProcessPlacement],
        waiting: ChildProcess | None = None,
    ) -> None:
        self._core, self._log_level, self._placement = core, log_level, process_placement
        self.waiting = waiting

    def take(self) -> ChildProcess:
        """The one that waits, else a new one. Raises OSError where the system has no memory, process or descriptor for it."""
        child, self.waiting = self.waiting, None
        if child is None or child.ended:
            if child is not None:
                _discard(child)
            return ChildProcess(self._core, self._log_level, process_placement=self._placement())
        return child

    def set_standby(self, wanted: bool) -> None:
        """Have one wait, or none. Where the system has none to give, `take` will say so."""
        if not wanted:
            self.drop()
        elif self.waiting is None:
            try:
                self.waiting = ChildProcess(
                    self._core, self._log_level, preload=preload_module(self._core), process_placement=self._placement()
                )
            except OSError as error:
                _logger.warning("no process for an engine in reserve: %s", error)

    def drop(self, *, reap: bool = False) -> None:
        """End the one that waits. reap: see `ChildProcess.kill`."""
        spare, self.waiting = self.waiting, None
        if spare is not None:
            _discard(spare, reap=reap)


def _discard(child: ChildProcess, *, reap: bool = False) -> None:
    child.kill(reap=reap)
    child.socket.close()
    child.release()


PIECE_SECONDS = 0.05  # between two pieces of stacks, at most


async def wait_ended(child: ChildProcess, timeout: float) -> bool:
    """Wait for the process to end; False if it still runs after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not child.ended:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def wait_for_stacks(child: ChildProcess, timeout: float) -> None:
    """Have it write the stacks of its threads, which one that is stopped cannot; after `timeout` seconds at most.

    It writes them in pieces and does not say which is the last one: they are whole once nothing more comes.
    """
    child.ask_for_stacks()
    deadline = time.monotonic() + timeout
    before, found = "", child.stacks.read()
    while not (found and found == before) and time.monotonic() < deadline:
        await asyncio.sleep(PIECE_SECONDS)
        before, found = found, child.stacks.read()
