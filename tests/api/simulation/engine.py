"""A simulated engine process: the real process body and engine loop in simulated time.

The process body is a greenlet that switches to the event loop wherever a real process would wait: for a message, or during a
step. Therefore messages of the parent arrive during steps, and the process can be killed at any point. Processes, sockets and
process activity are replaced. The process runs a `core`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from queue import Empty
from typing import TYPE_CHECKING, Any

import greenlet
from simulation.core import SimulatedCore
from simulation.faults import INJECTED
from simulation.network import connection

from windlass.engine.client.child_process import UNPINNED, ProcessPlacement
from windlass.engine.core.engine_process import ORPHAN_GRACE, serve
from windlass.engine.core.messages import (
    Add,
    Close,
    Crashed,
    FrameReader,
    Load,
    Message,
    Ready,
    Rejected,
    StepDone,
    encode,
)
from windlass.engine.errors import LoadError, QueueFullError
from windlass.engine.interface.config import EngineConfig

if TYPE_CHECKING:
    from simulation.world import World

SIGKILL = -9


class EngineProcess:
    """Replaces `windlass.engine.client.child_process.ChildProcess`. Its `process` is itself."""

    def __init__(
        self,
        world: World,
        core: str,
        log_level: str,
        *,
        preload: str | None = None,
        process_placement: ProcessPlacement = UNPINNED,
    ) -> None:
        if len(world.ready) >= world.replicas and world.happens("no engine can be started"):
            raise OSError(f"{INJECTED}: Cannot allocate memory")
        self.world = world
        self.pid = world.new_pid(self)
        ours, self._theirs = connection(world.loop, world.weather(calm=True), ("engine", self.pid))
        self.socket = ours.sock
        self.process = self
        self.core: SimulatedCore | None = None
        self.inbox = _Inbox(self)
        self.returncode: int | None = None
        self.recorder = self.stacks = _Nothing()
        self._used = 0.0  # seconds of processor time
        self._computing_since: float | None = None
        self.stuck = self.stopped = False
        self._dying = False
        self.forgotten = False
        self.answered: set[str] = set()  # ids of requests with a token
        self.given: set[str] = set()  # ids of received requests
        self.last_planned: set[str] = set()
        self._body = greenlet.greenlet(self._run)
        self._theirs.open(_EngineSide(self))
        world.loop.call_later(0.01, self.resume)

    # ---- called by the client ----------------------------------------------------------------------------------------
    def load(self, config: EngineConfig) -> None:
        self.socket.end.write(encode(Load(config)))

    @property
    def ended(self) -> bool:
        return self.returncode is not None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self, *, reap: bool = True) -> None:
        """SIGKILL: it ends a moment later."""
        self._dying = True
        self.world.loop.call_later(0.002, self.die, SIGKILL)

    def close(self) -> None:
        self.kill()
        self.socket.close()

    def last_requests(self) -> set[str] | None:
        return self.last_planned

    def release(self) -> None:
        self.forgotten = True

    def ask_for_stacks(self) -> None:
        pass

    @property
    def used_seconds(self) -> float:
        """Processor time since the start."""
        since = self._computing_since
        return self._used + (0.0 if since is None else self.world.loop.time() - since)

    def describe_end(self) -> str:
        return "it closed its connection" if self.returncode is None else f"exit code {self.returncode}"

    # ---- called by the body ------------------------------------------------------------------------------------------
    def emit(self, message: Message) -> None:
        if isinstance(message, Crashed) and message.reason and INJECTED not in message.reason:
            self.world.violation(f"the engine crashed by itself: {message.reason}")
        if isinstance(message, Ready):
            self.world.ready.append(self.world.loop.time())
        if isinstance(message, StepDone):
            self.answered.update(output.request_id for output in message.outputs if output.token_ids)
        if isinstance(message, Rejected) and isinstance(message.error, QueueFullError):
            self.world.turned_away.add(message.request_id.rpartition("-")[0])
        self._theirs.write(encode(message))

    def flush(self, timeout: float) -> None:
        self.sleep(0.001)

    def sleep(self, seconds: float | None) -> None:
        """Switch to the event loop for some seconds; None: forever."""
        if seconds is not None:
            self.world.loop.call_later(seconds, self.resume)
        greenlet.getcurrent().parent.switch()

    def compute(self, seconds: float) -> None:
        """Use the processor for some seconds, with faults."""
        happens = self.world.happens
        if happens("step crashes"):
            raise RuntimeError(f"{INJECTED}: a kernel failed")
        if happens("step has no memory"):
            raise MemoryError(f"{INJECTED}: no memory for a step")
        if happens("engine is killed"):
            self._dying = True
            self.world.loop.call_later(seconds / 2, self.die, SIGKILL)
        self.stopped = happens("engine is stopped")
        if self.stopped or happens("engine stands still"):
            self.stuck = True
            self.sleep(None)
        if happens("engine is stopped for a moment"):
            self.stopped = True
            self.sleep(self.world.rng.uniform(0.05, 0.7))
            self.stopped = False
        self._computing_since = self.world.loop.time()
        if happens("engine computes for ever"):
            self.sleep(None)
        if happens("step is slow"):
            seconds *= self.world.rng.choice([10, 30, 100])
        self.world.longest_step = max(self.world.longest_step, seconds)
        self.sleep(seconds)
        self._used, self._computing_since = self.used_seconds, None

    def resume(self) -> None:
        """Run the body until it waits again."""
        if self.returncode is not None or self.stuck:
            return
        self._used += 1e-4
        self._body.switch()

    # ---- start and end ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        code = serve(self._make_core, self)
        self.world.loop.call_soon(self.die, code)

    def _make_core(self, config: EngineConfig, progress: Any) -> SimulatedCore:
        for part in range(3):
            progress("reading weights", part + 1, 3)
            self.sleep(self.world.rng.uniform(0.05, 0.5))
        if len(self.world.ready) >= self.world.replicas and self.world.happens("disk fails at a load"):
            raise LoadError(f"{INJECTED}: Input/output error")
        self.core = SimulatedCore(config, self)
        return self.core

    def die(self, code: int) -> None:
        """End immediately; data that was not sent is lost."""
        if self.returncode is not None:
            return
        self.returncode = code
        self._theirs.cut_off()
        if self.core is not None:
            self.world.engine_died(self)
        if not self._body.dead and self._body:
            self._body.throw(greenlet.GreenletExit)

    def request_of(self, seq_id: int) -> str:
        """The id of the request that a sequence belongs to."""
        assert self.core is not None
        live = (seq for seq in self.core.scheduler.live_sequences() if seq.seq_id == seq_id)
        return next((seq.request.request_id for seq in live), "")

    def orphaned(self) -> None:
        self.inbox.put(Close())
        self.world.loop.call_later(ORPHAN_GRACE, self.die, 0)


class _EngineSide(asyncio.Protocol):
    """The engine's end of the socket."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Add):
                self._process.given.add(message.request.request_id)
            self._process.inbox.put(message)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._process.ended:
            self._process.orphaned()


class _Inbox:
    """A `SimpleQueue` whose reader switches to the event loop instead of blocking."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._messages: deque[Any] = deque()
        self._waiting = False

    def put(self, message: Any) -> None:
        self._messages.append(message)
        if self._waiting:
            self._waiting = False
            self._process.world.loop.call_soon(self._process.resume)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._messages:
            if not block:
                raise Empty
            self._wait(timeout)
        if not self._messages:
            raise Empty
        return self._messages.popleft()

    def _wait(self, timeout: float | None) -> None:
        self._waiting = True
        timer = None if timeout is None else self._process.world.loop.call_later(timeout, self._time_out)
        self._process.sleep(None)
        if timer is not None:
            timer.cancel()

    def _time_out(self) -> None:
        if self._waiting:
            self._waiting = False
            self._process.resume()


class _Nothing:
    """Recorder and stacks of a dead engine, which are empty."""

    def read(self) -> str:
        return ""


class SimulatedActivity:
    """Replaces `windlass.engine.client.supervision.ProcessActivity`."""

    def __init__(self, world: World, pid: int) -> None:
        self._process = world.processes[pid]
        self.inactive = self.stopped = False
        self.used_seconds: float | None = None
        self.memory = None

    def refresh(self) -> None:
        before, self.used_seconds = self.used_seconds, self._process.used_seconds
        self.inactive = self.used_seconds == before
        self.stopped = self._process.stopped
