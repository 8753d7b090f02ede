"""Process setup shared by the API server, engine and worker processes: imports, standard error, JSON logs, memory files.

Imports only the standard library. The `windlass` command imports this module first, so what it needs rarely is imported late.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

LOG_FORMAT_VARIABLE = "_WINDLASS_LOG_FORMAT"  # private: passes the log format to the processes of a server
JSON_FORMAT = "json"
LOG_FIELDS = ("request_id", "caller")  # optional attributes of a log record
_ERRORS = ("error:", "Traceback", "Fatal")
_NOTICES = ("notice:", "warning:")
_stack_size_lock = threading.Lock()  # the size for new threads is one setting of the process


# -- child processes ---------------------------------------------------------------------------------------------------
def create_memory_file(size: int) -> int:
    """A file descriptor of an anonymous file of `size` zero bytes."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("windlass-engine")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, size)
    return number


def child_output_fd() -> int:
    """Descriptor for standard output and standard error of child processes: the host's standard error, so that a command's own
    standard output stays clean; DEVNULL if the host has none, because descriptor 2 may then be any file or socket.
    """
    from subprocess import DEVNULL

    if sys.stderr is None:
        return DEVNULL
    try:
        os.fstat(2)
    except OSError:
        return DEVNULL
    return 2


def describe_exit(code: int | None) -> str:
    """How a child process ended, for people: "killed by SIGKILL" or "exit code 1". code: as `Popen.poll` returns it."""
    if code is None:
        return "it closed its connection"
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(code) or ""
    return f"killed by signal {name}" if name.isdigit() else f"killed by {name}"


def signal_name(code: int | None) -> str | None:
    """The signal that ended a process, its number if it has no name; None if it exited by itself."""
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)


def disable_core_dumps() -> None:
    """Make sure that a crash of this process, or of those that it starts, stores no text of requests.

    Unlike PR_SET_DUMPABLE this is inherited by other programs, and debuggers and /proc can still be used by the same user.
    """
    from pathlib import Path

    # Linux does not start the programs in kernel.core_pattern under a limit of 1, and a file needs more than a byte.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    # A core, should one be written, holds no memory.
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0", encoding="ascii")


@contextlib.contextmanager
def thread_stack_size(size: int) -> Iterator[None]:
    """Scope in which new threads get stacks of `size` bytes. Otherwise the limit of the main stack applies, and 2 MiB if that is
    unlimited."""
    with _stack_size_lock:
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)


@contextlib.contextmanager
def gc_paused_imports() -> Iterator[None]:
    """Pause the garbage collector during imports of many modules, and exempt the objects that exist afterwards from collection.

    Modules stay for good and leave hardly any garbage, but every collection during an import, and one at the process's end,
    visits all objects: a sixth of the CPU time of a start. Not for a host program that embeds an engine, since its own objects
    would be exempted too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def trim_heap() -> None:
    """Return the freed pages of the heap to the system. No effect without glibc.

    Loading a tokenizer of 150,000 tokens leaves 40 MB of them between what it keeps.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# -- logs --------------------------------------------------------------------------------------------------------------
def wants_json() -> bool:
    """Whether the server that this process belongs to logs JSON."""
    return os.environ.get(LOG_FORMAT_VARIABLE) == JSON_FORMAT


def configure_logging(process: str, level: str) -> None:
    """Set up the log of an engine or rank process as its server's. process: its name in JSON lines."""
    if wants_json():
        log_as_json(process, level)
    else:
        logging.basicConfig(
            level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object.

    process: name of the logging process. words: translates messages, for example configuration paths to options.
    """

    def __init__(self, process: str, words: Callable[[str], str] = str) -> None:
        super().__init__()
        self._process = process
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        message = self._words(record.getMessage())
        found = log_entry(record.created, record.levelname.lower(), self._process, message, logger=record.name)
        for name in LOG_FIELDS:
            if value := getattr(record, name, None):
                found[name] = value
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def log_entry(at: float, level: str, process: str, message: str, **more: Any) -> dict[str, Any]:
    """The object of one log line. at: Unix seconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return {
        "time": f"{seconds}.{int(at % 1 * 1000):03}Z",
        "level": level,
        "process": process,
        "message": message,
        **more,
    }


class JsonStream(io.TextIOBase):
    """Replaces a program's standard error: each printed line becomes a JSON object."""

    def __init__(self, out: TextIO, process: str) -> None:
        super().__init__()
        self._out = out
        self._process = process
        self._partial = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._out.fileno()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            for line in filter(str.strip, lines):
                entry = log_entry(time.time(), _level(line), self._process, line.rstrip())
                self._out.write(json.dumps(entry) + "\n")
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def _level(text: str) -> str:
    if text.startswith(_ERRORS):
        return "error"
    return "warning" if text.lstrip().startswith(_NOTICES) else "info"


def log_as_json(
    process: str,
    level: str,
    *,
    words: Callable[[str], str] = str,
    fields: logging.Filter | None = None,
    threads: bool = True,
) -> None:
    """Write only JSON to this process's standard error from now on.

    fields: a filter that adds LOG_FIELDS to records. threads: whether a thread may be started; it also converts what native
    libraries write.
    """
    out = _redirect_stderr(process) if threads else sys.stderr
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter(process, words))
    if fields is not None:
        handler.addFilter(fields)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    sys.stderr = JsonStream(out, process)


def _redirect_stderr(process: str) -> TextIO:
    """Move standard error to a new descriptor. A thread converts what is written to the old one and writes it there."""
    out = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    reader, writer = os.pipe()
    os.dup2(writer, 2, inheritable=True)
    os.close(writer)
    stream = JsonStream(out, process)

    def pump() -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace", newline="\n") as lines:
            for text in lines:
                stream.write(text if text.endswith("\n") else text + "\n")
                stream.flush()

    threading.Thread(target=pump, name="stderr-lines", daemon=True).start()
    return out
