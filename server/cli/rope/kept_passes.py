"""The file in which a sweep keeps the losses of its passes, so that an interrupted one goes on where it was.

One JSON line per pass over one window, appended when the pass is done: `key` (what was read, by what, under which
frequencies), `scaling`, `text` and `start` for people, `nll` (nats of each row, from the first). Knows no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.engine.errors import LoadError

_BEGINNING = b'{"key": "'


def pass_key(*parts: Any) -> str:
    """A digest of everything the losses of a pass depend on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class KeptPasses:
    """The losses known so far, in memory and, where `path` is given, in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, NDArray[np.float64]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise LoadError(f"cannot read --keep {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self._remember(str(entry["key"]), np.array([float(value) for value in entry["nll"]]))
            except (ValueError, TypeError, KeyError, RecursionError):
                if number == len(lines) and not line.endswith(b"\n") and _is_cut_off(line):
                    # Cut off in the middle of writing: that pass is read again, behind a line end.
                    self._append("\n")
                    break
                if line.strip() and not _is_cut_off(line):
                    raise LoadError(
                        f"--keep {path}, line {number}, is no pass of a sweep: give a file that a sweep wrote, or a new name"
                    ) from None

    def _remember(self, key: str, nll: NDArray[np.float64]) -> None:
        known = self._known.get(key)
        if known is None or len(known) < len(nll):
            self._known[key] = nll

    def find(self, key: str, rows: int) -> NDArray[np.float64] | None:
        """The losses of the first `rows` rows, None where they are not known."""
        known = self._known.get(key)
        return None if known is None or len(known) < rows else known[:rows]

    def add(self, key: str, nll: Sequence[float], *, scaling: str, text: str, start: int) -> None:
        """Remember a pass, and append it to the file at once. Raises LoadError where that fails."""
        self._remember(key, np.asarray(nll, dtype=np.float64))
        entry = {"key": key, "scaling": scaling, "text": text, "start": start, "nll": [float(value) for value in nll]}
        self._append(json.dumps(entry) + "\n")

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
