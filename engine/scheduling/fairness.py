"""Fairness between callers: start-time fair queueing in virtual time.

Every request gets a start tag, measured in tokens: the end of the caller's previous request, or now if that is over; it ends its
tokens later (Goyal, Vin and Cheng, 1996). A caller with a hundred requests therefore queues behind the first request of another
caller, and the requests of one caller keep their order. Virtual time advances with the tokens that each active caller receives, as
in weighted fair queueing (Demers, Keshav and Shenker, 1989); otherwise new callers would always precede one that returns.
Callers are names only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

_MIN_PRUNE_SIZE = 64  # callers that are remembered without looking whether they still matter


@dataclass(slots=True)
class _Caller:
    """One who is there. count: requests that have not ended. waiting: turns of those not served yet, as they came.
    earlier: by how much those start earlier than they were counted."""

    count: int = 0
    share: float = 0.0
    waiting: OrderedDict[FairQueueEntry, None] = field(default_factory=OrderedDict)
    refunded: float = 0.0


@dataclass(slots=True, eq=False)
class FairQueueEntry:
    """A request's place in virtual time. As long as it waits it comes to start earlier, where others of its caller end sooner
    than they were counted."""

    _caller: _Caller | None
    _counted: float

    @property
    def start(self) -> float:
        """Lower is served first."""
        return self._counted if self._caller is None else self._counted - self._caller.refunded

    @property
    def is_waiting(self) -> bool:
        """Whether it is neither served nor over."""
        return self._caller is not None

    def freeze(self) -> None:
        """It waits no more, and keeps its place."""
        if self._caller is not None:
            del self._caller.waiting[self]
            self._counted, self._caller = self.start, None


class FairQueue:
    """Virtual time is counted in tokens of a caller whose share is 1."""

    def __init__(self) -> None:
        self._order_changed = False
        self._now = 0.0
        self._ends: dict[str, tuple[FairQueueEntry, float]] = {}  # each caller's last request, and where it ends
        self._active: dict[str, _Caller] = {}
        self._shares = 0.0  # of them together
        self._computed = 0  # tokens, from the beginning
        self._prepaid = 0.0  # how far requests that began have moved the time on before they were computed
        self._prune_at = _MIN_PRUNE_SIZE

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._ends)

    def enqueue(self, caller: str, tokens: int, share: float = 1.0) -> FairQueueEntry:
        """The place of a request of so many tokens. share: what the caller gets beside one of 1."""
        active = self._active.setdefault(caller, _Caller())
        end = self._ends[caller][1] if caller in self._ends else 0.0
        queue_entry = FairQueueEntry(active, max(self._now, end) + active.refunded)
        active.waiting[queue_entry] = None
        self._ends[caller] = queue_entry, queue_entry.start + tokens / share
        self._shares += share - active.share
        active.count, active.share = active.count + 1, share
        if len(self._ends) > self._prune_at:
            self._ends = {name: last for name, last in self._ends.items() if last[1] > self._now}
            self._prune_at = max(_MIN_PRUNE_SIZE, 2 * len(self._ends))
        return queue_entry

    def start_service(self, queue_entry: FairQueueEntry) -> None:
        """A request is being served: whoever comes now starts no earlier."""
        queue_entry.freeze()
        self._prepaid += max(0.0, queue_entry.start - self._now)
        self._now = max(self._now, queue_entry.start)

    def advance(self, computed: int) -> None:
        """So many tokens have been computed from the beginning, the last ones for whomever of those who are there."""
        tokens, self._computed = computed - self._computed, computed
        if self._shares > 0:
            gone = tokens / self._shares
            known = min(self._prepaid, gone)
            self._prepaid -= known
            self._now += gone - known

    def request_ended(self, caller: str) -> None:
        """A request of this caller has ended. Where it was the last of all, nobody owes anything any more."""
        active = self._active[caller]
        active.count -= 1
        if active.count:
            return
        del self._active[caller]
        self._shares -= active.share
        if not self._active:
            self._now = max([self._now, *(end for _, end in self._ends.values())])
            self._ends.clear()
            self._shares = self._prepaid = 0.0  # without what sums have lost of it

    def order_changed(self) -> bool:
        """Whether some of those that wait start earlier than when this was asked last, so that others may stand before them."""
        moved, self._order_changed = self._order_changed, False
        return moved

    def refund(self, caller: str, queue_entry: FairQueueEntry, tokens: int, share: float = 1.0) -> None:
        """So many of a request's tokens were not needed after all. What waits of the caller's starts so much earlier, but not
        before now: all of it alike, so that it keeps its order. A request that was never served moves only what is still to come.
        """
        spared, active = tokens / share, self._active.get(caller)
        self._prepaid = max(0.0, self._prepaid - spared)
        moved = 0.0
        if queue_entry.is_waiting:
            queue_entry.freeze()
        elif active is not None and active.waiting:
            first = next(iter(active.waiting))
            moved = min(spared, max(0.0, first.start - self._now))
            active.refunded += moved
            self._order_changed |= moved > 0 and len(self._active) > 1  # one caller's keep their order
        if caller in self._ends:
            last, end = self._ends[caller]
            self._ends[caller] = last, end - moved if last.is_waiting else max(last.start, end - spared)
