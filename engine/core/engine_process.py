"""Engine process and its loop: `python -m windlass.engine.core.engine_process --fd N`.

Reads one `Load` frame from the inherited socket, builds the core, reports, and runs the engine loop in the main thread. Two
threads carry frames, so a silent or slow parent never delays a step. The parent alone decides when the process ends: SIGINT and
SIGTERM are ignored, and a closed socket ends it. The loop uses the core only through `Core` and does not import torch.

`--core module:attr` (private, for tests) names the callable that builds the core from (config, progress). `--ahead module` is
imported before the frame arrives: importing torch takes most of a start.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from windlass.engine.core.flight_recorder import STACK_BYTES, FlightRecorder, PlanWatcher
from windlass.engine.core.messages import (
    Abort,
    Aborted,
    AdapterLoaded,
    Add,
    Announce,
    AskStats,
    Close,
    Crashed,
    DropAdapter,
    EndSample,
    FrameReader,
    InspectRequest,
    InspectResult,
    Load,
    LoadAdapter,
    LoadFailed,
    Message,
    Progress,
    ProgressCallback,
    Ready,
    Rejected,
    Stats,
    StepDone,
    StepStarted,
    encode,
    picklable_error,
)
from windlass.engine.errors import EngineError, LoadError
from windlass.engine.host_resources import apply_thread_settings
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.process_setup import importing, log_as_json, wants_json

_logger = logging.getLogger("windlass.engine")

IDLE_SECONDS = 0.25  # seconds without work or messages after which there is time for what may be needed later

STATS_INTERVAL = 0.2  # seconds between snapshots pushed along with steps


class Core(Protocol):
    """What `windlass.engine.core.engine_core.EngineCore` offers; one thread at a time uses it."""

    info: ModelInfo

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises RequestError or QueueFullError."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; unknown ids are ignored."""
        ...

    def end_sample(self, request_id: str, index: int) -> None:
        """Finish one sample of a request and free what it holds, without an output; unknown ones are ignored."""
        ...

    def read_adapter(self, source: AdapterSource) -> Future[Any]:
        """Read an adapter beside the steps; `add_adapter` takes the result."""
        ...

    def add_adapter(self, adapter: Any) -> AdapterInfo:
        """Let requests use an adapter that was read; raises RequestError."""
        ...

    def drop_adapter(self, adapter_id: int) -> None:
        """Let no further request use it; unknown ids are ignored."""
        ...

    def inspect(self, question: IntrospectionQuery[A]) -> A:
        """Answer somebody who looks on; changes nothing that a request could notice. Raises RequestError."""
        ...

    def has_work(self) -> bool: ...

    def step(self, announce: Announce) -> list[RequestOutput]:
        """Do one step. announce: told before what may take more than a second, or nobody can tell how long, its seconds."""
        ...

    def watch_plans(self, watcher: PlanWatcher) -> None:
        """Have somebody told of each plan before it is computed."""
        ...

    def watch_ranks(self, gone: Callable[[str], None]) -> None:
        """Have somebody told, by another thread, that a rank is not there any more, and why: no step succeeds from then on."""
        ...

    def prepare_in_idle_time(self) -> None:
        """Begin, beside the steps, what the first requests of some kind would otherwise wait for; called once."""
        ...

    def close(self) -> None:
        """Finish, within seconds, what shall outlive the engine. It is used no more."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot that drains the `*_seconds` samples."""
        ...


@dataclass(frozen=True, slots=True)
class _AdapterRead:
    """The loop's own message to itself: an adapter has been read, or could not be."""

    adapter_id: int
    found: Future[Any]


@dataclass(frozen=True, slots=True)
class _RankGone:
    """The same: a rank of the model has ended, and no step can be computed any more."""

    reason: str


CoreFactory = Callable[[EngineConfig, ProgressCallback], Core]


def default_core(config: EngineConfig, progress: ProgressCallback) -> Core:
    """The real engine, warmed up. Imported here, late, because it brings torch."""
    apply_thread_settings(config.compute.cores)
    from windlass.engine.core.engine_core import EngineCore

    core = EngineCore(config, progress)
    core.warm_up()
    return core


class EngineLoop:
    """Runs `core` until a `Close` message arrives. `emit` must never block: delivery is somebody else's time."""

    def __init__(self, core: Core, inbox: SimpleQueue[Any], emit: Callable[[Message], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._pushed_stats_at = -STATS_INTERVAL
        self._prepared = False

    def run(self) -> None:
        """Serve until closed. What a step raises is a defect of the engine and leaves this method, as the end of a rank does."""
        self._core.watch_ranks(lambda reason: self._inbox.put(_RankGone(reason)))
        while True:
            # Between steps take everything that waits; without work sleep until something comes.
            block = not self._core.has_work()
            while (message := self._next(block)) is not None:
                if isinstance(message, Close):
                    self._core.close()
                    return
                self._handle(message)
                block = False
            if self._core.has_work():
                self._step()

    def _next(self, block: bool) -> Any:
        try:
            return self._inbox.get(block, None if self._prepared else IDLE_SECONDS)
        except Empty:
            if not block:
                return None
        self._prepared = True
        self._core.prepare_in_idle_time()
        return self._inbox.get()

    def _handle(self, message: Message | _AdapterRead | _RankGone) -> None:
        match message:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._core.abort(request_id)
                self._emit(Aborted(request_id))
            case EndSample(request_id, index):
                self._core.end_sample(request_id, index)
            case LoadAdapter(source):
                found = self._core.read_adapter(source)
                found.add_done_callback(lambda found: self._inbox.put(_AdapterRead(source.adapter_id, found)))
            case _AdapterRead(adapter_id, found):
                self._emit(AdapterLoaded(adapter_id, self._add_adapter(found)))
            case DropAdapter(adapter_id):
                self._core.drop_adapter(adapter_id)
            case InspectRequest(inspection_id, question):
                self._emit(InspectResult(inspection_id, self._inspect(question)))
            case _RankGone(reason):
                raise RuntimeError(reason)
            case AskStats():
                self._emit(Stats(self._snapshot()))
            case _:
                raise TypeError(f"an engine does not take {type(message).__name__} messages")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except EngineError as error:
            self._emit(Rejected(request.request_id, picklable_error(error)))
        except Exception as error:  # a defect met by one request must not end the others
            known = {"request_id": request.request_id}
            _logger.exception("request %s could not be added", request.request_id, extra=known)
            self._core.abort(request.request_id)
            self._emit(Rejected(request.request_id, picklable_error(error)))

    def _add_adapter(self, found: Future[Any]) -> AdapterInfo | EngineError:
        try:
            return self._core.add_adapter(found.result())
        except EngineError as error:
            return picklable_error(error)
        except Exception as error:  # what is wrong with a file must not end the streams
            _logger.exception("an adapter could not be loaded")
            return picklable_error(error)

    def _inspect(self, question: IntrospectionQuery[Any]) -> Any:
        try:
            return self._core.inspect(question)
        except EngineError as error:
            return picklable_error(error)
        except Exception as error:  # whoever looks on must not end the streams
            _logger.exception("a question could not be answered")
            return picklable_error(error)

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._core.step(self._announce)
        now = time.monotonic()
        due = now - self._pushed_stats_at >= STATS_INTERVAL
        if outputs or due:
            self._emit(StepDone(tuple(outputs), now - start, self._snapshot() if due else None))

    def _announce(self, seconds: float | None) -> None:
        self._emit(StepStarted(seconds))

    def _snapshot(self) -> EngineStats:
        self._pushed_stats_at = time.monotonic()
        stats = self._core.stats()
        # The snapshot is pickled by another thread while the core goes on: give it a dictionary of its own.
        return replace(stats, recomputed_tokens=dict(stats.recomputed_tokens))


ORPHAN_GRACE = 2.0  # seconds the main thread has to end by itself after the socket closed

PROGRESS_INTERVAL = 0.05  # seconds between progress frames of one stage


class ParentConnection(Protocol):
    """What the engine has of its parent. `inbox` ends with a `Close` where the parent is gone."""

    @property
    def inbox(self) -> SimpleQueue[Message]: ...

    def emit(self, message: Message) -> None:
        """Send in the background; never blocks."""
        ...

    def flush(self, timeout: float) -> None:
        """Give what was emitted up to `timeout` seconds to leave; nothing can be emitted afterwards."""
        ...


class ParentSocket:
    """The child's end of the socket: an inbox filled by one thread, and `emit`, whose queue another thread empties."""

    def __init__(self, sock: socket.socket) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._socket = sock
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()

    def emit(self, message: Message) -> None:
        """Send in the background; never blocks."""
        self._outbox.put(message)

    def flush(self, timeout: float) -> None:
        """Give what was emitted up to `timeout` seconds to leave; nothing can be emitted afterwards."""
        self._outbox.put(None)
        self._writer.join(timeout)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._socket.recv(1 << 18):
                for message in frames.feed(data):
                    self.inbox.put(message)
        except OSError:
            pass  # the parent died with frames of ours unread
        self.inbox.put(Close())
        # Nobody is left to serve. Loading or a long step would keep the main thread from noticing.
        time.sleep(ORPHAN_GRACE)
        os._exit(0)

    def _write(self) -> None:
        open_ = True
        while open_:
            batch = [self._outbox.get()]
            try:
                while len(batch) < 256:
                    batch.append(self._outbox.get_nowait())
            except Empty:
                pass
            if None in batch:
                open_ = False
            try:
                self._socket.sendall(b"".join([encode(message) for message in batch if message is not None]))
            except OSError:
                return  # the parent is gone; the reader ends this process
            except Exception:  # a message that cannot be sent would leave requests hanging for ever
                _logger.exception("the engine process cannot send its outputs")
                os._exit(1)


class _ProgressFrames:
    """Passes progress on, thinned out: a loader may report every tensor."""

    def __init__(self, connection: ParentConnection) -> None:
        self._connection = connection
        self._stage: str | None = None
        self._sent_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done >= total or now - self._sent_at >= PROGRESS_INTERVAL:
            self._stage, self._sent_at = stage, now
            self._connection.emit(Progress(stage, done, total))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine process; the exit code is 0 only after an orderly close."""
    parser = argparse.ArgumentParser(
        prog="windlass.engine.core.engine_process", description="internal: started by the server"
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--box", type=int, required=True)
    parser.add_argument("--stacks", type=int, required=True)
    parser.add_argument("--core", default="windlass.engine.core.engine_process:default_core")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--ahead", help="a module to import before it is known what to load")
    parser.add_argument("--cores", help="the only ones to run on, comma separated")
    options = parser.parse_args(argv)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A fatal signal, or the parent before it kills, has the stacks written where the parent reads them.
    faulthandler.enable(file=options.stacks)
    faulthandler.register(signal.SIGUSR2, file=options.stacks)
    if wants_json():
        log_as_json("engine", options.log_level)
    else:
        logging.basicConfig(
            level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    connection = ParentSocket(sock)

    if options.cores is not None:
        with contextlib.suppress(LoadError):  # told when the core is made
            apply_thread_settings([int(core) for core in options.cores.split(",")])
    if options.ahead is not None:
        with importing(), contextlib.suppress(Exception):  # it fails again, and is told, when the core is made
            importlib.import_module(options.ahead)
    box = FlightRecorder(options.box)
    return serve(lambda *arguments: _factory(options.core)(*arguments), connection, box, options.stacks)


def serve(
    factory: CoreFactory, connection: ParentConnection, box: FlightRecorder | None = None, stacks: int | None = None
) -> int:
    """Load what the parent says, and serve it until it says `Close`; the exit code is 0 only after an orderly close.

    box, stacks: where the last plans and the stack of an exception are left for the parent, a file's descriptor.
    """
    first = connection.inbox.get()
    if not isinstance(first, Load):
        return 0  # closed before it began
    core = _load(factory, first.config, connection)
    if core is None:
        connection.flush(5.0)
        return 1
    if box is not None:
        core.watch_plans(box.write)
    connection.emit(Ready(core.info))
    try:
        EngineLoop(core, connection.inbox, connection.emit).run()
    except Exception as error:
        _logger.exception("the engine failed in a step")
        if stacks is not None:
            os.pwrite(stacks, traceback.format_exc().encode("utf-8", "replace")[-STACK_BYTES:], 0)
        connection.emit(Crashed(f"{type(error).__name__}: {_first_line(error)}"))
        connection.flush(5.0)
        return 1
    connection.flush(1.0)
    return 0


def _load(factory: CoreFactory, config: EngineConfig, connection: ParentConnection) -> Core | None:
    """Build the core, or send `LoadFailed` and return None."""
    try:
        return factory(config, _ProgressFrames(connection))
    except LoadError as error:
        message = str(error)
    except Exception as error:
        text = _first_line(error)
        if _is_out_of_memory(error):
            message = f"not enough memory to load {config.model} ({text}); free some, or lower `cache.memory`"
        else:
            if not isinstance(error, (OSError, ImportError)):
                _logger.exception("loading failed unexpectedly")
            message = f"cannot load {config.model}: {type(error).__name__}: {text}"
    connection.emit(LoadFailed(" ".join(message.split())))
    return None


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # so that it has allocated nothing, and what failed may be its import
        return isinstance(error, MemoryError)
    from windlass.engine.model.loading.device_selection import is_out_of_memory

    return is_out_of_memory(error)


def _factory(name: str) -> CoreFactory:
    module, _, attribute = name.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), attribute)
    return factory


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


if __name__ == "__main__":
    sys.exit(main())
