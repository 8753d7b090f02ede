"""Result logs: JSON lines files that grow by one entry per finished pass, so that an interrupted run resumes.

Every line is an object that begins with `key`, a digest of everything its result depends on. A line that was cut off while it was
written is ignored, and its pass is repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


class PassLog:
    """The losses known so far; where `path` is given, they are kept in that file."""

    def __init__(self, path: Path | None = None) -> None:
        self._entries: dict[str, NDArray[np.float64]] = {}
        self._lines = ResultLog(path, self._take)

    def _take(self, entry: Any) -> None:
        self._remember(str(entry["key"]), np.array([float(value) for value in entry["nll"]]))

    def _remember(self, key: str, nll: NDArray[np.float64]) -> None:
        known = self._entries.get(key)
        if known is None or len(known) < len(nll):
            self._entries[key] = nll

    def find(self, key: str, rows: int) -> NDArray[np.float64] | None:
        """The losses of the first `rows` rows, None where they are not known."""
        known = self._entries.get(key)
        return None if known is None or len(known) < rows else known[:rows]

    def add(self, key: str, nll: Sequence[float], *, scaling: str, text: str, start: int) -> None:
        """Remember a pass, and append it to the file at once. Raises LoadError where that fails."""
        self._remember(key, np.asarray(nll, dtype=np.float64))
        self._lines.append(key, scaling=scaling, text=text, start=start, nll=[float(value) for value in nll])
