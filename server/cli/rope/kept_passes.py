"""The losses of a sweep's passes, in memory and in the file of `--keep`. Knows no model.

One line per pass over one window: `key` (what was read, by what, under which frequencies), `scaling`, `text` and `start` for
people, `nll` (nats of each row, from the first).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.server.cli.rope.kept_lines import ResultLog


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
