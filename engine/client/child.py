"""The engine process as its parent holds it: spawn it with a private socket, tell it what to load, end it, say how it ended.

Synchronous and free of asyncio, so that it can be spawned before an event loop exists, and before it is known what to load:
until then it imports what it needs, which takes most of a start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from windlass.engine.api.child_output import child_output
from windlass.engine.api.config import EngineConfig
from windlass.engine.core.black_box import FlightRecorder, StackMemory
from windlass.engine.core.threads import thread_wait_environment
from windlass.engine.core.wire import Load, encode

STACKS_SIGNAL = signal.SIGUSR2
DEFAULT_CORE = "windlass.engine.core.loop:default_core"
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
    """A running `windlass.engine.core.process`, which waits for `load`.

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
                [sys.executable, "-P", "-m", "windlass.engine.core.process", *options],
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
