"""Stored responses of the Responses API, in memory and within bounds."""

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
    """Items of a conversation behind those of `before`. holders: kept responses that end here, and links behind it."""

    items: Sequence[Any]
    size: int
    before: _ConversationLink | None
    references: int = 0

    def total_size(self) -> int:
        """With all that stands before it."""
        size, link = self.size, self.before
        while link is not None:
            size, link = size + link.size, link.before
        return size


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was answered (JSON), and where its conversation stands: before its own output, and behind it."""

    owner: str
    body: bytes
    inputs: _ConversationLink
    outputs: _ConversationLink


@dataclass(slots=True, eq=False)
class _OwnerResponses:
    """What one owner has, oldest first, and its bytes. number: counted up from shelf to shelf."""

    owner: str
    number: int
    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class _LargestOwner:
    """Which shelf has most, of those it is told of at every change; of several the one that was begun first.

    A heap in which amounts of before stay until they come up, or are half of it.
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
        """The one that has most of all others; None where there is no other."""
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
    """At most `most` responses of `max_bytes` in all; beyond that the oldest of whoever has most in it are forgotten, so that one
    owner displaces itself: most responses where there are too many, else most bytes. An owner sees none of another's.

    Safe to use from several threads.
    """

    def __init__(self, *, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._owned: dict[str, _OwnerResponses] = {}  # of owners that have something
        self._owner_numbers = count()  # shelves
        self._number = self._size = 0  # of all responses
        self._largest_number = _LargestOwner(lambda owned: len(owned.stored))
        self._largest_size = _LargestOwner(lambda owned: owned.size)
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self._size

    def __len__(self) -> int:
        return self._number

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The owner's response of this id, None where there is none (any more)."""
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
        """Keep a response. previous: the one it goes on from. sizes: bytes of the items asked and answered.

        One whose conversation is larger than all that may be kept, or than half of it where others have the rest, is not kept:
        what was kept before stays.
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
        """Forget the owner's response of this id; whether there was one."""
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._remove(response_id, owner)
            return True

    def _evict_one(self, newest: _OwnerResponses) -> None:
        """newest: where the newest response is, which goes last."""
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
    """For one more that ends here or stands behind it. Returns the bytes of links that nobody has held."""
    size = 0
    while link is not None:
        link.references += 1
        if link.references > 1:
            break
        size, link = size + link.size, link.before
    return size


def _release(link: _ConversationLink | None) -> int:
    """The opposite of `_retain`. Returns the bytes of links that nobody holds any more."""
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
