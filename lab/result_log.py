"""Result logs: JSON lines files that grow by one entry per finished pass, so that an interrupted run resumes.

Every line is an object that begins with `key`, a digest of everything its result depends on. A line that was cut off while it was
written is ignored, and its pass is repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from windlass.engine.errors import LoadError

T = TypeVar("T")

_BEGINNING = b'{"key": "'


def result_key(*parts: Any) -> str:
    """A digest of everything that a result depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class ResultLog(Generic[T]):
    """Results of finished passes by key, and their JSON lines file.

    path: None stores nothing. parse: the result in an object of the file; it raises KeyError, TypeError or ValueError for an
    object of another form, which becomes a LoadError that names the line.
    """

    def __init__(self, path: Path | None, parse: Callable[[Any], T]) -> None:
        self._path, self._parse = path, parse
        self._results: dict[str, T] = {}
        if path is not None and path.exists():
            self._read(path)

    def find(self, key: str) -> T | None:
        return self._results.get(key)

    def add(self, key: str, result: T, **entry: Any) -> None:
        """Store a result, and append the object {"key": key, **entry} to the file. Raises LoadError if that fails."""
        self._results[key] = result
        self._append(json.dumps({"key": key, **entry}) + "\n")

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise LoadError(f"cannot read --keep {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self._results[str(entry["key"])] = self._parse(entry)
            except (ValueError, TypeError, KeyError, RecursionError):
                if number == len(lines) and not line.endswith(b"\n") and _is_cut_off(line):
                    # The write was interrupted: the pass is repeated, on a new line.
                    self._append("\n")
                    break
                if line.strip() and (not _is_cut_off(line) or _is_whole(line)):
                    raise LoadError(
                        f"--keep {path}, line {number}, is not a pass of such a sweep: give a file that one wrote, or a new name"
                    ) from None

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise LoadError(f"cannot write --keep {self._path}: {error.strerror}") from None


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the beginning of a line that a sweep wrote."""
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)


def _is_whole(line: bytes) -> bool:
    """Whether a line is a complete JSON object."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class PassLog(ResultLog[NDArray[np.float64]]):
    """Losses of the rows of finished passes, stored in the file `path` if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, lambda entry: np.array([float(value) for value in entry["nll"]]))

    def find_rows(self, key: str, rows: int) -> NDArray[np.float64] | None:
        """Losses of the first `rows` rows, None if they are not known."""
        known = self.find(key)
        return None if known is None or len(known) < rows else known[:rows]
