"""Response store of the Responses API: in memory, with limits and per-owner eviction."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any


@dataclass(slots=True, eq=False)
class _ConversationLink:
    """Items of a conversation after those of `before`. references: stored responses that end here, and later links."""

    items: Sequence[Any]
    size: int
    before: _ConversationLink | None
    references: int = 0

    def total_size(self) -> int:
        """Bytes including all earlier links."""
        size, link = self.size, self.before
        while link is not None:
            size, link = size + link.size, link.before
        return size


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response (JSON), and the links of its conversation: before its own output, and after it."""

    owner: str
    body: bytes
    inputs: _ConversationLink
    outputs: _ConversationLink


@dataclass(slots=True, eq=False)
class _OwnerResponses:
    """The responses of one owner, oldest first, and their bytes. number: unique and ascending."""

    owner: str
    number: int
    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class _LargestOwner:
    """The owner with the largest amount; of several, the oldest. `changed` must be called at every change.

    A heap in which outdated amounts remain until they reach the top or are half of it.
    """

    def __init__(self, amount: Callable[[_OwnerResponses], int]) -> None:
        self._amount = amount
        self._heap: list[tuple[int, int, _OwnerResponses]] = []
        self._tidy_at = 64

    def changed(self, owned: _OwnerResponses) -> None:
        if owned.stored:
            heappush(self._heap, (-self._amount(owned), owned.number, owned))
        if len(self._heap) > self._tidy_at:
            self._heap = sorted({entry[1]: entry for entry in self._heap if self._is_current(entry)}.values())
            self._tidy_at = 2 * len(self._heap) + 64

    def find(self, excluding: _OwnerResponses | None) -> _OwnerResponses | None:
        """The owner with the largest amount except `excluding`; None if there is no other."""
        excluded = []
        while (first := self._first()) is not None and first is excluding:
            excluded.append(heappop(self._heap))
        for entry in excluded:
            heappush(self._heap, entry)
        return first

    def _first(self) -> _OwnerResponses | None:
        while self._heap:
            if self._is_current(self._heap[0]):
                return self._heap[0][2]
            heappop(self._heap)
        return None

    def _is_current(self, entry: tuple[int, int, _OwnerResponses]) -> bool:
        return bool(entry[2].stored) and -entry[0] == self._amount(entry[2])


class ResponseStore:
    """At most `most` responses of `max_bytes` in total. Owners see only their own responses.

    Beyond a limit, the oldest responses of the owner with the most responses, or with the most bytes, are evicted, so that an
    owner displaces only itself. Thread-safe.
    """

    def __init__(self, *, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._owned: dict[str, _OwnerResponses] = {}  # of owners with responses
        self._owner_numbers = count()
        self._number = self._size = 0  # of all responses
        self._largest_number = _LargestOwner(lambda owned: len(owned.stored))
        self._largest_size = _LargestOwner(lambda owned: owned.size)
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all stored responses."""
        return self._size

    def __len__(self) -> int:
        return self._number

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The owner's response with this id, or None."""
        owned = self._owned.get(owner)
        return None if owned is None else owned.stored.get(response_id)

    def put(
        self,
        response_id: str,
        owner: str,
        body: bytes,
        *,
        previous: StoredResponse | None,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        sizes: tuple[int, int],
    ) -> None:
        """Store a response. previous: the one that it continues. sizes: bytes of its input and output items.

        A conversation that is larger than the limit, or than half of it if other owners use the rest, is not stored, and
        evicts nothing.
        """
        input_link = _ConversationLink(inputs, sizes[0], None if previous is None else previous.outputs)
        output_link = _ConversationLink(outputs, sizes[1], input_link)
        stored = StoredResponse(owner, body, input_link, output_link)
        with self._lock:
            owned = self._owned.get(owner) or _OwnerResponses(owner, next(self._owner_numbers))
            of_others = self._size - owned.size
            if len(body) + output_link.total_size() > max(self._max_bytes // 2, self._max_bytes - of_others):
                return
            self._owned[owner] = owned
            owned.stored[response_id] = stored
            self._number += 1
            self._count(owned, len(body) + _retain(output_link))
            while self._number > self._most or self._size > self._max_bytes:
                self._evict_one(owned)

    def delete(self, response_id: str, owner: str) -> bool:
        """Remove the owner's response with this id. Returns whether it existed."""
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._remove(response_id, owner)
            return True

    def _evict_one(self, newest: _OwnerResponses) -> None:
        """newest: the owner of the newest response, which is evicted last."""
        largest = self._largest_number if self._number > self._most else self._largest_size
        owned = largest.find(excluding=newest if len(newest.stored) == 1 else None) or newest
        self._remove(next(iter(owned.stored)), owned.owner)

    def _remove(self, response_id: str, owner: str) -> None:
        owned = self._owned[owner]
        stored = owned.stored.pop(response_id)
        self._number -= 1
        self._count(owned, -len(stored.body) - _release(stored.outputs))
        if not owned.stored:
            del self._owned[owner]

    def _count(self, owned: _OwnerResponses, more: int) -> None:
        owned.size += more
        self._size += more
        self._largest_number.changed(owned)
        self._largest_size.changed(owned)


def _retain(link: _ConversationLink | None) -> int:
    """Add a reference to a link. Returns the bytes of links that had none before."""
    size = 0
    while link is not None:
        link.references += 1
        if link.references > 1:
            break
        size, link = size + link.size, link.before
    return size


def _release(link: _ConversationLink | None) -> int:
    """Remove a reference to a link. Returns the bytes of links that have none now."""
    size = 0
    while link is not None:
        link.references -= 1
        if link.references:
            break
        size, link = size + link.size, link.before
    return size


def items_until(link: _ConversationLink | None) -> list[Any]:
    """All items of a conversation up to this link, oldest first."""
    links = []
    while link is not None:
        links.append(link)
        link = link.before
    return [item for link in reversed(links) for item in link.items]
