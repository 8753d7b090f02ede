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
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from windlass.engine.core import messages
from windlass.engine.core.flight_recorder import STACK_BYTES, FlightRecorder, PlanWatcher
from windlass.engine.core.messages import Announce, FrameReader, Message, ProgressCallback, encode, picklable_error
from windlass.engine.errors import EngineError, LoadError
from windlass.engine.host_resources import apply_thread_settings
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.process_setup import configure_logging, disable_core_dumps, gc_paused_imports

_logger = logging.getLogger("windlass.engine")

IDLE_SECONDS = 0.25  # without work or messages, after which the core prepares what may be needed later
STATS_INTERVAL = 0.2  # seconds between snapshots sent with steps
ORPHAN_GRACE = 2.0  # seconds that the main thread has to end after the socket closed
PROGRESS_INTERVAL = 0.05  # seconds between progress frames of one stage

T = TypeVar("T")


# -- the core as the loop uses it --------------------------------------------------------------------------------------
class Core(Protocol):
    """Interface of `windlass.engine.core.engine_core.EngineCore`, which documents it; used by one thread at a time."""

    info: ModelInfo

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def end_sample(self, request_id: str, index: int) -> None: ...
    def read_adapter(self, source: AdapterSource) -> Future[Any]: ...
    def add_adapter(self, adapter: Any) -> AdapterInfo: ...
    def drop_adapter(self, adapter_id: int) -> None: ...
    def inspect(self, query: IntrospectionQuery[A]) -> A: ...
    def has_work(self) -> bool: ...
    def step(self, announce: Announce) -> list[RequestOutput]: ...
    def watch_plans(self, watcher: PlanWatcher) -> None: ...
    def watch_ranks(self, gone: Callable[[str], None]) -> None: ...
    def warm_up(self, interrupted: Callable[[], bool]) -> None: ...
    def prepare_in_idle_time(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> EngineStats: ...


CoreFactory = Callable[[EngineConfig, ProgressCallback], Core]


def default_core(config: EngineConfig, progress: ProgressCallback) -> Core:
    """The real engine, prepared for requests. Its modules are imported here because they import torch."""
    apply_thread_settings(config.compute.cores)
    from windlass.engine.core.engine_core import EngineCore

    core = EngineCore(config, progress)
    core.prepare()
    return core


# -- the loop ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _AdapterRead:
    """Internal message: an adapter has been read, or could not be read."""

    adapter_id: int
    adapter: Future[Any]


@dataclass(frozen=True, slots=True)
class _RankGone:
    """Internal message: a rank of the model has ended, and no step can be computed any more."""

    reason: str


class EngineLoop:
    """Runs `core` until a `Close` message arrives. `emit` must never block."""

    def __init__(self, core: Core, inbox: SimpleQueue[Any], emit: Callable[[Message], None]) -> None:
        self._core, self._inbox, self._emit = core, inbox, emit
        self._pushed_stats_at = -STATS_INTERVAL
        self._prepared = False

    def run(self) -> None:
        """Serve until closed. Exceptions of a step, which are defects of the engine, and the end of a rank are raised."""
        self._core.watch_ranks(lambda reason: self._inbox.put(_RankGone(reason)))
        self._core.warm_up(lambda: not self._inbox.empty())
        while True:
            # Between steps handle all waiting messages; without work sleep until one arrives.
            block = not self._core.has_work()
            while (message := self._next(block)) is not None:
                if isinstance(message, messages.Close):
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
        core = self._core
        match message:
            case messages.Add(request):
                self._add(request)
            case messages.Abort(request_id):
                core.abort(request_id)
                self._emit(messages.Aborted(request_id))
            case messages.EndSample(request_id, index):
                core.end_sample(request_id, index)
            case messages.LoadAdapter(source):
                reading = core.read_adapter(source)
                reading.add_done_callback(lambda done: self._inbox.put(_AdapterRead(source.adapter_id, done)))
            case _AdapterRead(adapter_id, adapter):
                result = _result_or_error("an adapter could not be loaded", lambda: core.add_adapter(adapter.result()))
                self._emit(messages.AdapterLoaded(adapter_id, result))
            case messages.DropAdapter(adapter_id):
                core.drop_adapter(adapter_id)
            case messages.InspectRequest(inspection_id, query):
                answer = _result_or_error("an introspection query failed", lambda: core.inspect(query))
                self._emit(messages.InspectResult(inspection_id, answer))
            case _RankGone(reason):
                raise RuntimeError(reason)
            case messages.AskStats():
                self._emit(messages.Stats(self._snapshot()))
            case _:
                raise TypeError(f"an engine does not take {type(message).__name__} messages")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except EngineError as error:
            self._emit(messages.Rejected(request.request_id, picklable_error(error)))
        except Exception as error:  # a defect triggered by one request must not end the others
            extra = {"request_id": request.request_id}
            _logger.exception("request %s could not be added", request.request_id, extra=extra)
            self._core.abort(request.request_id)
            self._emit(messages.Rejected(request.request_id, picklable_error(error)))

    def _step(self) -> None:
        start = time.monotonic()
        outputs = self._core.step(self._announce)
        now = time.monotonic()
        due = now - self._pushed_stats_at >= STATS_INTERVAL
        if outputs or due:
            self._emit(messages.StepDone(tuple(outputs), now - start, self._snapshot() if due else None))

    def _announce(self, seconds: float | None) -> None:
        self._emit(messages.StepStarted(seconds))

    def _snapshot(self) -> EngineStats:
        self._pushed_stats_at = time.monotonic()
        return self._core.stats()


def _result_or_error(failure: str, compute: Callable[[], T]) -> T | EngineError:
    """The result or the error, so that neither a bad file nor a defect ends the streams. failure: log text of a defect."""
    try:
        return compute()
    except EngineError as error:
        return picklable_error(error)
    except Exception as error:
        _logger.exception(failure)
        return picklable_error(error)


# -- the connection to the parent --------------------------------------------------------------------------------------
class ParentConnection(Protocol):
    """The engine's connection to its parent. `inbox` ends with a `Close` if the parent is gone."""

    @property
    def inbox(self) -> SimpleQueue[Message]: ...
    def emit(self, message: Message) -> None: ...
    def flush(self, timeout: float) -> None: ...


class ParentSocket:
    """The child's end of the socket. One thread fills `inbox`, another one sends what `emit` queues; `emit` never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._socket = sock
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()

    def emit(self, message: Message) -> None:
        self._outbox.put(message)

    def flush(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until all is sent; nothing can be emitted afterwards."""
        self._outbox.put(None)
        self._writer.join(timeout)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._socket.recv(1 << 18):
                for message in frames.feed(data):
                    self.inbox.put(message)
        except OSError:
            pass  # the parent died before it read all our frames
        self.inbox.put(messages.Close())
        # No parent is left to serve, and the main thread may not notice while it loads or runs a long step.
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
    """Sends progress frames at intervals, since a loader may report every tensor."""

    def __init__(self, connection: ParentConnection) -> None:
        self._connection = connection
        self._stage: str | None = None
        self._sent_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done >= total or now - self._sent_at >= PROGRESS_INTERVAL:
            self._stage, self._sent_at = stage, now
            self._connection.emit(messages.Progress(stage, done, total))


# -- the process -------------------------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine process; the exit code is 0 only after an orderly close."""
    parser = argparse.ArgumentParser(
        prog="windlass.engine.core.engine_process", description="internal: started by the server"
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--box", type=int, required=True)
    parser.add_argument("--stacks", type=int, required=True)
    parser.add_argument("--core")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--ahead", help="module to import before the configuration is known")
    parser.add_argument("--cores", help="the only cores to run on, comma separated")
    options = parser.parse_args(argv)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    disable_core_dumps()
    # On a fatal signal, or on the parent's signal before it kills, the stacks are written where the parent reads them.
    faulthandler.enable(file=options.stacks)
    faulthandler.register(signal.SIGUSR2, file=options.stacks)
    configure_logging("engine", options.log_level)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    connection = ParentSocket(sock)

    if options.cores is not None:
        with contextlib.suppress(LoadError):  # raised again, and reported, when the core is built
            apply_thread_settings([int(core) for core in options.cores.split(",")])
    if options.ahead is not None:
        with gc_paused_imports(), contextlib.suppress(Exception):  # as above
            importlib.import_module(options.ahead)
    recorder = FlightRecorder(options.box)
    # A missing module of `--core` is reported as a failed load.
    factory = default_core if options.core is None else lambda *arguments: _named_core(options.core)(*arguments)
    return serve(factory, connection, recorder, options.stacks)


def serve(
    factory: CoreFactory,
    connection: ParentConnection,
    recorder: FlightRecorder | None = None,
    stacks: int | None = None,
) -> int:
    """Load what the parent requests and serve it until `Close`; the exit code is 0 only after an orderly close.

    recorder, stacks (a descriptor): where the last plans and the stack of an exception are left for the parent.
    """
    first = connection.inbox.get()
    if not isinstance(first, messages.Load):
        return 0  # closed before it began
    core = _load(factory, first.config, connection)
    if core is None:
        connection.flush(5.0)
        return 1
    if recorder is not None:
        core.watch_plans(recorder.write)
    connection.emit(messages.Ready(core.info))
    try:
        EngineLoop(core, connection.inbox, connection.emit).run()
    except Exception as error:
        _logger.exception("the engine failed in a step")
        if stacks is not None:
            os.pwrite(stacks, traceback.format_exc().encode("utf-8", "replace")[-STACK_BYTES:], 0)
        connection.emit(messages.Crashed(f"{type(error).__name__}: {_first_line(error)}"))
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
    connection.emit(messages.LoadFailed(" ".join(message.split())))
    return None


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # then torch has allocated nothing, and its import may be what failed
        return isinstance(error, MemoryError)
    from windlass.engine.model.loading.device_selection import is_out_of_memory

    return is_out_of_memory(error)


def _named_core(name: str) -> CoreFactory:
    module, _, attribute = name.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), attribute)
    return factory


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


if __name__ == "__main__":
    sys.exit(main())
