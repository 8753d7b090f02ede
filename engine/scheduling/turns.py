"""Whose turn it is: every request gets a place in virtual time, so that callers who all want more than there is get it evenly.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with tokens as the work: a request starts where the caller's last one
ends, or now if that is over, and ends its tokens later. Whoever sent a hundred requests so stands behind another's first, and
the requests of one caller keep their order. Time goes on with the work, as in weighted fair queueing (Demers, Keshav and
Shenker, 1989): by what each caller who is there gets of it. Else callers who come for the first time, all of them now, would go
before one who comes again for as long as there are any. Knows callers by name and nothing of what they are to whom.
"""

from __future__ import annotations

_FEW = 64  # callers that are remembered without looking whether they still matter


class CallerTurns:
    """Virtual time is counted in tokens of a caller whose share is 1."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, tuple[float, float]] = {}  # where each caller's last request starts and ends
        self._there: dict[str, tuple[int, float]] = {}  # requests of each caller that have not ended, and the share
        self._shares = 0.0  # of them together
        self._computed = 0  # tokens, from the beginning
        self._ahead = 0.0  # how far requests that began have moved the time on before they were computed
        self._look_at = _FEW

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._ends)

    def take(self, caller: str, tokens: int, share: float = 1.0) -> float:
        """Where a request of so many tokens starts; lower is served first. share: what the caller gets beside one of 1."""
        _, end = self._ends.get(caller, (0.0, 0.0))
        start = max(self._now, end)
        self._ends[caller] = start, start + tokens / share
        count, before = self._there.get(caller, (0, 0.0))
        self._there[caller] = count + 1, share
        self._shares += share - before
        if len(self._ends) > self._look_at:
            self._ends = {name: last for name, last in self._ends.items() if last[1] > self._now}
            self._look_at = max(_FEW, 2 * len(self._ends))
        return start

    def begin(self, start: float) -> None:
        """A request that starts there is being served: whoever comes now starts no earlier."""
        self._ahead += max(0.0, start - self._now)
        self._now = max(self._now, start)

    def serve(self, computed: int) -> None:
        """So many tokens have been computed from the beginning, the last ones for whomever of those who are there."""
        tokens, self._computed = computed - self._computed, computed
        if self._shares > 0:
            gone = tokens / self._shares
            known = min(self._ahead, gone)
            self._ahead -= known
            self._now += gone - known

    def leave(self, caller: str) -> None:
        """A request of this caller has ended. Where it was the last of all, nobody owes anything any more."""
        count, share = self._there.pop(caller)
        if count > 1:
            self._there[caller] = count - 1, share
            return
        self._shares -= share
        if not self._there:
            self._now = max([self._now, *(end for _, end in self._ends.values())])
            self._ends.clear()
            self._shares = self._ahead = 0.0  # without what sums have lost of it

    def give_back(self, caller: str, tokens: int, share: float = 1.0) -> None:
        """So many of a request's tokens were not needed after all. The next one still starts no earlier than the last one did:
        it may wait, and is not to be overtaken by its own caller's."""
        self._ahead = max(0.0, self._ahead - tokens / share)
        if caller in self._ends:
            start, end = self._ends[caller]
            self._ends[caller] = start, max(start, end - tokens / share)
