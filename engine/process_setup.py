"""Process setup shared by the API server, engine and worker processes: imports, standard error, JSON logs, memory files.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO


def create_memory_file(size: int) -> int:
    """A file descriptor of so many zero bytes, which no name leads to."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("windlass-engine")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, size)
    return number


def child_output() -> int:
    """For both their outputs: the host's standard error, so that nothing mixes with what a command writes to its standard output;
    nowhere where the host has none, as number 2 may then be any file or socket of its own.
    """
    if sys.stderr is None:
        return subprocess.DEVNULL
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports of many modules: the garbage collector looks at nothing meanwhile, and never again at what is there then.

    Modules stay for good and leave next to no garbage, but each of the collector's many rounds during an import visits what there
    is by then, and one more at the process's end: a sixth of the CPU time of a start. Not for a program with an engine in it,
    whose own objects would be left alone too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


LOG_FORMAT_VARIABLE = "_WINDLASS_LOG_FORMAT"  # private: tells the processes of a server how it logs

JSON_FORMAT = "json"

LOG_FIELDS = ("request_id", "caller")  # of a record, where it has them

_ERRORS = ("error:", "Traceback", "Fatal")

_NOTICES = ("notice:", "warning:")


def wants_json() -> bool:
    """Whether the server that this process belongs to logs so."""
    return os.environ.get(LOG_FORMAT_VARIABLE) == JSON_FORMAT


class JsonFormatter(logging.Formatter):
    """One object a record. process: which of a server's processes speaks. words: puts a message into the program's own words."""

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
    """The object of a line. at: Unix seconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return {
        "time": f"{seconds}.{int(at % 1 * 1000):03}Z",
        "level": level,
        "process": process,
        "message": message,
        **more,
    }


class JsonStream(io.TextIOBase):
    """Stands where a program expects its standard error: each line that is printed there becomes an object."""

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
            *whole, self._partial = (self._partial + text).split("\n")
            for each in whole:
                if each.strip():
                    self._out.write(
                        json.dumps(log_entry(time.time(), _level(each), self._process, each.rstrip())) + "\n"
                    )
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
    """From now on this process writes nothing but JSON to standard error. fields: gives records their FIELDS.

    threads: whether one may be started, which turns what libraries below Python write into lines as well.
    """
    out = _redirect_stderr(process) if threads else sys.stderr
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter(process, words))
    if fields is not None:
        handler.addFilter(fields)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    sys.stderr = JsonStream(out, process)


def _redirect_stderr(process: str) -> TextIO:
    """The standard error under another number; what goes to its old one is read by a thread, and written there as lines."""
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
