"""What one sequence remembers of its own text and proposals, and how eager it is to propose.

Knows neither plans nor sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.scheduling.ngram import NgramIndex

_LONGEST_PAUSE = 64


class DraftLengthController:
    """How many tokens one sequence may propose next, learnt from what became of its earlier proposals.

    Proposals that are accepted double the next one; one that is rejected outright halves it. A sequence whose single
    proposed token is rejected pauses, for 1 step at first, then 2, 4, … up to 64: so a text that never repeats itself ends
    up computing one row in 64 for nothing, which bounds the loss even where every row costs its full price (many streams
    at once).
    """

    __slots__ = ("_limit", "_most", "_pause", "_wait")

    def __init__(self, most: int) -> None:
        self._most = self._limit = most
        self._pause = 0  # length of the last one
        self._wait = 0  # steps left of this one

    def limit(self) -> int:
        """Tokens that may be proposed in this step; call it once per step."""
        if self._wait > 0:
            self._wait -= 1
            return 0
        return self._limit

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn that of `proposed` tokens the first `accepted` were accepted."""
        if accepted:
            self._pause = 0
            self._limit = min(self._most, 2 * proposed if accepted == proposed else accepted + 1)
        elif proposed > 1:
            self._limit = proposed // 2
        else:
            self._limit = 1
            self._pause = self._wait = min(_LONGEST_PAUSE, max(1, 2 * self._pause))


@dataclass(slots=True)
class DraftState:
    """What one sequence remembers of its own text and proposals. drafted: the pace of those of a draft model.

    behind: tokens that the draft model has not computed, since nobody asked it.
    """

    index: NgramIndex
    pace: DraftLengthController
    drafted: DraftLengthController
    draft_lag: int = 0
