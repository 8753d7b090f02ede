"""How long the next step will take, judged by the slowest ones before it: for whoever watches that steps end at all.

Knows no clock and no plan: it is told tokens and seconds.
"""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[float | None], None]  # told how many seconds a step may take; None where nobody can tell
ANNOUNCE_SECONDS = 1.0  # seconds; a step that may take longer is announced


class StepTimeEstimator:
    """Remembers the slowest step of each size, where 2^k to 2^(k+1) - 1 tokens are one size."""

    __slots__ = ("_slowest",)

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        size = num_tokens.bit_length()
        self._slowest[size] = max(seconds, self._slowest.get(size, 0.0))

    def announce(self, num_tokens: int, emit: Announce | None) -> None:
        """Say how long a step will take, where it may be long or nobody can tell."""
        seconds = self.seconds(num_tokens)
        if emit is not None and (seconds is None or seconds > ANNOUNCE_SECONDS):
            emit(seconds)

    def seconds(self, num_tokens: int) -> float | None:
        """The slowest one of this size or below; of the next size below, doubled for each size between, where that is more.

        None where no step so small has been seen: nobody can tell.
        """
        size = num_tokens.bit_length()
        known = [(seen, seconds) for seen, seconds in self._slowest.items() if seen <= size]
        if not known:
            return None
        nearest, seconds = max(known)
        return max(seconds * (1 << (size - nearest)), max(seconds for _, seconds in known))
