"""Fairness between callers: start-time fair queueing in virtual time.

Every request gets a start tag, measured in tokens: the end of the caller's previous request, or now if that is over; it ends its
tokens later (Goyal, Vin and Cheng, 1996). A caller with a hundred requests therefore queues behind the first request of another
caller, and the requests of one caller keep their order. Virtual time advances with the tokens that each active caller receives,
as in weighted fair queueing (Demers, Keshav and Shenker, 1989); otherwise new callers would always precede one that returns.
Callers are names only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

_MIN_PRUNE_SIZE = 64  # callers that are remembered before inactive ones are removed


@dataclass(slots=True)
class _Caller:
    """An active caller. count: requests that have not ended. waiting: entries not served yet, in order of arrival.
    refunded: tokens by which those start earlier than they were enqueued."""

    count: int = 0
    share: float = 0.0
    waiting: OrderedDict[FairQueueEntry, None] = field(default_factory=OrderedDict)
    refunded: float = 0.0


@dataclass(slots=True, eq=False)
class FairQueueEntry:
    """A request in virtual time. While it waits, its start moves earlier if requests of its caller end before their limit."""

    _caller: _Caller | None
    _start: float

    @property
    def start(self) -> float:
        """Start tag; the lowest is served first."""
        return self._start if self._caller is None else self._start - self._caller.refunded

    @property
    def is_waiting(self) -> bool:
        """Whether it has neither been served nor ended."""
        return self._caller is not None

    def freeze(self) -> None:
        """Stop waiting, with the present start tag."""
        if self._caller is not None:
            del self._caller.waiting[self]
            self._start, self._caller = self.start, None


class FairQueue:
    """Virtual time is counted in tokens of a caller with share 1."""

    def __init__(self) -> None:
        self._order_changed = False
        self._now = 0.0
        self._ends: dict[str, tuple[FairQueueEntry, float]] = {}  # each caller's last request, and its end
        self._active: dict[str, _Caller] = {}
        self._shares = 0.0  # sum over active callers
        self._computed = 0  # tokens, in total
        self._prepaid = 0.0  # by how much started requests have advanced the time before they were computed
        self._prune_at = _MIN_PRUNE_SIZE

    def __len__(self) -> int:
        """Number of callers that are remembered."""
        return len(self._ends)

    def enqueue(self, caller: str, tokens: int, share: float = 1.0) -> FairQueueEntry:
        """Add a request of `tokens` tokens. share: the caller's share, where 1 is usual."""
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
        """Start serving a request: no later arrival starts earlier."""
        queue_entry.freeze()
        self._prepaid += max(0.0, queue_entry.start - self._now)
        self._now = max(self._now, queue_entry.start)

    def advance(self, computed: int) -> None:
        """Advance the time. computed: tokens computed in total; the latest ones count for all active callers alike."""
        tokens, self._computed = computed - self._computed, computed
        if self._shares > 0:
            elapsed = tokens / self._shares
            known = min(self._prepaid, elapsed)
            self._prepaid -= known
            self._now += elapsed - known

    def request_ended(self, caller: str) -> None:
        """End a request of this caller. If it was the last request of all, every caller starts equal again."""
        active = self._active[caller]
        active.count -= 1
        if active.count:
            return
        del self._active[caller]
        self._shares -= active.share
        if not self._active:
            self._now = max([self._now, *(end for _, end in self._ends.values())])
            self._ends.clear()
            self._shares = self._prepaid = 0.0  # removes rounding errors of the sums

    def order_changed(self) -> bool:
        """Whether waiting requests have moved before those of other callers since the last call."""
        moved, self._order_changed = self._order_changed, False
        return moved

    def refund(self, caller: str, queue_entry: FairQueueEntry, tokens: int, share: float = 1.0) -> None:
        """Return tokens that a request did not need.

        The waiting requests of its caller start that much earlier, but not before now, all alike, so that they keep their
        order. A request that was never served only moves requests that arrive later.
        """
        refunded, active = tokens / share, self._active.get(caller)
        self._prepaid = max(0.0, self._prepaid - refunded)
        moved = 0.0
        if queue_entry.is_waiting:
            queue_entry.freeze()
        elif active is not None and active.waiting:
            first = next(iter(active.waiting))
            moved = min(refunded, max(0.0, first.start - self._now))
            active.refunded += moved
            self._order_changed |= moved > 0 and len(self._active) > 1  # one caller's requests keep their order
        if caller in self._ends:
            last, end = self._ends[caller]
            self._ends[caller] = last, end - moved if last.is_waiting else max(last.start, end - refunded)
