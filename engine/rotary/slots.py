"""The rotary tables as the scheduler sees them: rows that are counted by reference."""

from __future__ import annotations

from typing import Protocol

from windlass.engine.rotary.scaling import RotarySpec


class RotaryRows(Protocol):
    """Rows of the rotary tables. There are enough for `max_num_seqs` sequences."""

    def acquire(self, specs: tuple[RotarySpec, ...], /) -> int: ...
    def release(self, row: int, /) -> None: ...
