"""A file of JSON lines that grows by one whenever a piece of work is done, so that an interrupted run goes on where it was.

Each line is an object that begins with `key`. Knows nothing of what else it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError

_BEGINNING = b'{"key": "'


def result_key(*parts: Any) -> str:
    """A digest of everything that the result of a piece of work depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class ResultLog:
    """path: None to keep nothing. take: called with every object of the file; it raises KeyError, TypeError or ValueError for
    one that is not of its kind, which becomes a LoadError that names the line."""

    def __init__(self, path: Path | None, take: Callable[[Any], None]) -> None:
        self._path = path
        if path is not None and path.exists():
            self._read(path, take)

    def _read(self, path: Path, take: Callable[[Any], None]) -> None:
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise LoadError(f"cannot read --keep {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                take(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                if number == len(lines) and not line.endswith(b"\n") and _is_cut_off(line):
                    # Cut off in the middle of writing: that piece is done again, behind a line end.
                    self._append("\n")
                    break
                if line.strip() and (not _is_cut_off(line) or _is_whole(line)):
                    raise LoadError(
                        f"--keep {path}, line {number}, is no pass of such a sweep: give a file that one wrote, or a new name"
                    ) from None

    def append(self, key: str, **entry: Any) -> None:
        """Write one object at once. Raises LoadError where that fails."""
        self._append(json.dumps({"key": key, **entry}) + "\n")

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise LoadError(f"cannot write --keep {self._path}: {error.strerror}") from None


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the beginning of one that a sweep wrote."""
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)


def _is_whole(line: bytes) -> bool:
    """Whether a line is a whole object, so that nothing of it was lost in writing."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
