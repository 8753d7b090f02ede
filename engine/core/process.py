"""The engine process: `python -m windlass.engine.core.process --fd N`, started by `windlass.engine.client.process`.

It reads one `Load` frame from the inherited socket, builds the core, reports, and then runs the engine loop in its main
thread. Two threads carry frames, so neither a silent nor a slow parent ever holds up a step. The parent alone decides
when it ends: signals meant for the terminal's foreground group are ignored, and a closed socket ends it.

`--core module:attr` (private, for tests) names the callable that builds the core from (config, progress). `--ahead module`
is imported before that frame is there: importing torch takes most of a start.
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
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from windlass.engine.api.config import EngineConfig
from windlass.engine.api.importing import importing
from windlass.engine.api.json_log import log_as_json, wants_json
from windlass.engine.core.black_box import STACK_BYTES, FlightRecorder
from windlass.engine.core.loop import Core, CoreFactory, EngineLoop
from windlass.engine.core.threads import apply_thread_settings
from windlass.engine.core.wire import Close, Crashed, FrameReader, Load, LoadFailed, Message, Progress, Ready, encode
from windlass.engine.errors import LoadError

_logger = logging.getLogger("windlass.engine")

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
    parser = argparse.ArgumentParser(prog="windlass.engine.core.process", description="internal: started by the server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--box", type=int, required=True)
    parser.add_argument("--stacks", type=int, required=True)
    parser.add_argument("--core", default="windlass.engine.core.loop:default_core")
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
    from windlass.engine.model.loading.chosen_device import is_out_of_memory

    return is_out_of_memory(error)


def _factory(name: str) -> CoreFactory:
    module, _, attribute = name.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), attribute)
    return factory


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


if __name__ == "__main__":
    sys.exit(main())
