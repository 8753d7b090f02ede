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
from windlass.engine.process_setup import child_output_fd, describe_exit

_logger = logging.getLogger("windlass.engine.client")

STACKS_SIGNAL = signal.SIGUSR2
PIECE_SECONDS = 0.05  # at most, between two pieces of the stacks that a child writes

ENGINE_MODULE = "windlass.engine.core.engine_core"  # by name, because it imports torch


def preload_module(core: str | None) -> str | None:
    """The module that a child may import before its configuration is known. core: see `ChildProcess`."""
    return ENGINE_MODULE if core is None else None


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """cores: the only ones that an engine process may use, None for all. files: further descriptors that it inherits."""

    cores: tuple[int, ...] | None = None
    files: tuple[int, ...] = ()


UNPINNED = ProcessPlacement()


class ChildProcess:
    """A running `windlass.engine.core.engine_process`, which waits for `load`.

    core: private, a replacement of the engine core, see there; None for the engine core. preload: a module to import meanwhile,
    see `preload_module`. process_placement: OpenMP reads its cores once, so they are set before torch is imported.
    Attributes: `socket` is the parent's end, `process` the Popen object. `recorder` and `stacks` can be read after its end.
    Raises OSError without side effects if the system has no process or descriptor left.
    """

    def __init__(
        self,
        core: str | None,
        log_level: str,
        *,
        preload: str | None = None,
        process_placement: ProcessPlacement = UNPINNED,
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
            # -P keeps the working directory off the child's import path. A session of its own shields it from the terminal's
            # ctrl-C: the parent decides when the engine ends.
            options = [f"--fd={theirs.fileno()}", f"--log-level={log_level}"]
            options += [f"--box={descriptors[0]}", f"--stacks={descriptors[1]}"]
            if core is not None:
                options.append(f"--core={core}")
            if preload is not None:
                options.append(f"--ahead={preload}")
            if process_placement.cores is not None:
                options.append(f"--cores={','.join(map(str, process_placement.cores))}")
            output = child_output_fd()
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
        """Send the configuration to load, once."""
        # It fits the socket's buffer, so this does not block; a child that is dead already shows up as closed later.
        with contextlib.suppress(OSError):
            self.socket.sendall(encode(Load(config)))

    def ask_for_stacks(self) -> None:
        """Make the child write the stacks of its threads to `stacks`. A stopped process does not react."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACKS_SIGNAL)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self, *, reap: bool = True) -> None:
        """Kill the process. reap: wait a few seconds at most until it has ended."""
        self.process.kill()
        if not reap:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def close(self) -> None:
        """Kill the process and close the socket."""
        self.kill()
        self.socket.close()

    def last_requests(self) -> set[str] | None:
        """The ids of the requests in the last step that was started, None if not all of them are recorded."""
        plans = self.recorder.read()
        if not plans:
            return set()
        last = plans[-1]
        names = [sequence.get("request_id") for sequence in last["sequences"]]
        return set(names) if len(names) == last["num_sequences"] and None not in names else None

    def release(self) -> None:
        """Unmap the recorder and the stacks."""
        self.recorder.close()
        self.stacks.close()

    def describe_end(self) -> str:
        """How the process ended, for people: "killed by SIGKILL …" or "exit code 1"."""
        text = describe_exit(self.process.poll())
        return f"{text}: perhaps the machine ran out of memory" if text == "killed by SIGKILL" else text


@dataclass
class ChildSpawner:
    """Starts child processes. core, log_level: see `ChildProcess`. process_placement: returns where the next one runs.

    standby: a child that has been started already and is used first.
    """

    _core: str | None
    _log_level: str
    _placement: Callable[[], ProcessPlacement]
    standby: ChildProcess | None = None

    def spawn(self) -> ChildProcess:
        """The standby child or a new one. Raises OSError if the system has no memory, process or descriptor left."""
        child, self.standby = self.standby, None
        if child is None or child.ended:
            if child is not None:
                _discard(child)
            return ChildProcess(self._core, self._log_level, process_placement=self._placement())
        return child

    def set_standby(self, wanted: bool) -> None:
        """Start or end the standby child. Failures are only logged: `spawn` raises them."""
        if not wanted:
            self.drop()
        elif self.standby is None:
            preload, placement = preload_module(self._core), self._placement()
            try:
                self.standby = ChildProcess(self._core, self._log_level, preload=preload, process_placement=placement)
            except OSError as error:
                _logger.warning(
                    "a standby engine process cannot be started (%s): a restart of the engine takes longer", error
                )

    def drop(self, *, reap: bool = False) -> None:
        """End the standby child. reap: see `ChildProcess.kill`."""
        child, self.standby = self.standby, None
        if child is not None:
            _discard(child, reap=reap)


def _discard(child: ChildProcess, *, reap: bool = False) -> None:
    child.kill(reap=reap)
    child.socket.close()
    child.release()


async def wait_ended(child: ChildProcess, timeout: float) -> bool:
    """Wait for the process to end; False if it still runs after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not child.ended:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def wait_for_stacks(child: ChildProcess, timeout: float) -> None:
    """Make the child write the stacks of its threads, and wait `timeout` seconds at most; a stopped process does not react.

    Stacks arrive in pieces without an end mark: they are complete once nothing more arrives.
    """
    child.ask_for_stacks()
    deadline = time.monotonic() + timeout
    before, text = "", child.stacks.read()
    while not (text and text == before) and time.monotonic() < deadline:
        await asyncio.sleep(PIECE_SECONDS)
        before, text = text, child.stacks.read()
