"""Calls of a backend that are recorded once and made again: what a device has to offer for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager


class Recording(ABC):
    """The calls of a piece of work, to be made again on the same memory. obstacle: why they cannot be, None if they can."""

    obstacle: str | None

    @abstractmethod
    def repeat(self) -> bool:
        """Make the calls again; False as soon as one reports an error. Raises ValueError where there is an obstacle."""

    @abstractmethod
    def same_values(self, other: Recording) -> bool:
        """Whether the other recording made the same calls, addresses aside."""


class Recorder(ABC):
    """Records what its backend is asked to do, in one piece of memory that all of its recordings share."""

    @abstractmethod
    def record(self) -> AbstractContextManager[Recording]:
        """Record what is done meanwhile, which is done as ever.

        Tensors that are there before have to outlive the recording where they are. Those made meanwhile hold what was
        written to them until this recorder records something else, or one of its recordings is repeated.
        """
