"""Which requests are due to end by the clock. Knows ids and times, nothing of what a request is."""

from __future__ import annotations

import heapq
from collections import abc


class Deadlines:
    """A heap of (seconds, request id). Entries of ended requests stay until they surface or outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str, live: abc.Container[str], num_live: int) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * num_live + 64:
            # Mostly ended requests with deadlines far away: forget them, so that the heap grows with the live ones only.
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> abc.Iterator[str]:
        """Ids with an entry at or before `now`, each entry once. An id may have ended, or been used again, since."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
