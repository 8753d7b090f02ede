"""What whoever runs a generation asks of the writer of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.generation.deltas import Delta


class Writer(Protocol):
    """Writes one request's answer: `event` and `last_event` of a stream, `add` and `pieces` of a whole answer."""

    @property
    def size(self) -> int:
        """Bytes of what is kept."""

    def event(self, delta: Delta) -> bytes:
        """The events of one delta; empty where there is nothing to say yet."""

    def last_event(self) -> bytes:
        """What comes behind the events of all deltas."""

    def add(self, delta: Delta) -> None:
        """Keep what a delta brings. Raises ApiError where the answer becomes too large."""

    def pieces(self) -> list[bytes]:
        """The whole answer's JSON, once all deltas have come."""

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Lay out a prompt's log-probabilities."""
