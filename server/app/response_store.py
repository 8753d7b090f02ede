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
class _Link:
    """Items of a conversation behind those of `before`. holders: kept responses that end here, and links behind it."""

    items: Sequence[Any]
    size: int
    before: _Link | None
    holders: int = 0

    def whole_size(self) -> int:
        """With all that stands before it."""
        size, link = self.size, self.before
        while link is not None:
            size, link = size + link.size, link.before
        return size


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it was answered (JSON), and where its conversation stands: before its own output, and behind it."""

    owner: str
    body: bytes
    asked: _Link
    answered: _Link


@dataclass(slots=True, eq=False)
class _Shelf:
    """What one owner has, oldest first, and its bytes. number: counted up from shelf to shelf."""

    owner: str
    number: int
    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    size: int = 0


class _Largest:
    """Which shelf has most, of those it is told of at every change; of several the one that was begun first.

    A heap in which amounts of before stay until they come up, or are half of it.
    """

    def __init__(self, amount: Callable[[_Shelf], int]) -> None:
        self._amount = amount
        self._heap: list[tuple[int, int, _Shelf]] = []
        self._tidy_at = 64

    def changed(self, shelf: _Shelf) -> None:
        if shelf.kept:
            heappush(self._heap, (-self._amount(shelf), shelf.number, shelf))
        if len(self._heap) > self._tidy_at:
            self._heap = sorted({entry[1]: entry for entry in self._heap if self._holds(entry)}.values())
            self._tidy_at = 2 * len(self._heap) + 64

    def find(self, but: _Shelf | None) -> _Shelf | None:
        """The one that has most of all others; None where there is no other."""
        aside = []
        while (first := self._first()) is not None and first is but:
            aside.append(heappop(self._heap))
        for entry in aside:
            heappush(self._heap, entry)
        return first

    def _first(self) -> _Shelf | None:
        while self._heap:
            if self._holds(self._heap[0]):
                return self._heap[0][2]
            heappop(self._heap)
        return None

    def _holds(self, entry: tuple[int, int, _Shelf]) -> bool:
        return bool(entry[2].kept) and -entry[0] == self._amount(entry[2])


class ResponseStore:
    """At most `most` responses of `max_bytes` in all; beyond that the oldest of whoever has most in it are forgotten, so that one
    owner displaces itself: most responses where there are too many, else most bytes. An owner sees none of another's.

    Safe to use from several threads.
    """

    def __init__(self, *, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # of owners that have something
        self._begun = count()  # shelves
        self._number = self._size = 0  # of all responses
        self._largest_number = _Largest(lambda shelf: len(shelf.kept))
        self._largest_size = _Largest(lambda shelf: shelf.size)
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self._size

    def __len__(self) -> int:
        return self._number

    def get(self, response_id: str, owner: str) -> Kept | None:
        """The owner's response of this id, None where there is none (any more)."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.kept.get(response_id)

    def put(
        self,
        response_id: str,
        owner: str,
        body: bytes,
        *,
        previous: Kept | None,
        asked: Sequence[Any],
        answered: Sequence[Any],
        sizes: tuple[int, int],
    ) -> None:
        """Keep a response. previous: the one it goes on from. sizes: bytes of the items asked and answered.

        One whose conversation is larger than all that may be kept, or than half of it where others have the rest, is not kept:
        what was kept before stays.
        """
        input_link = _Link(asked, sizes[0], None if previous is None else previous.answered)
        output_link = _Link(answered, sizes[1], input_link)
        kept = Kept(owner, body, input_link, output_link)
        with self._lock:
            shelf = self._shelves.get(owner) or _Shelf(owner, next(self._begun))
            of_others = self._size - shelf.size
            if len(body) + output_link.whole_size() > max(self._max_bytes // 2, self._max_bytes - of_others):
                return
            self._shelves[owner] = shelf
            shelf.kept[response_id] = kept
            self._number += 1
            self._count(shelf, len(body) + _hold(output_link))
            while self._number > self._most or self._size > self._max_bytes:
                self._forget_one(shelf)

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget the owner's response of this id; whether there was one."""
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._forget(response_id, owner)
            return True

    def _forget_one(self, newest: _Shelf) -> None:
        """newest: where the newest response is, which goes last."""
        largest = self._largest_number if self._number > self._most else self._largest_size
        shelf = largest.find(but=newest if len(newest.kept) == 1 else None) or newest
        self._forget(next(iter(shelf.kept)), shelf.owner)

    def _forget(self, response_id: str, owner: str) -> None:
        shelf = self._shelves[owner]
        kept = shelf.kept.pop(response_id)
        self._number -= 1
        self._count(shelf, -len(kept.body) - _let_go(kept.answered))
        if not shelf.kept:
            del self._shelves[owner]

    def _count(self, shelf: _Shelf, more: int) -> None:
        shelf.size += more
        self._size += more
        self._largest_number.changed(shelf)
        self._largest_size.changed(shelf)


def _hold(link: _Link | None) -> int:
    """For one more that ends here or stands behind it. Returns the bytes of links that nobody has held."""
    size = 0
    while link is not None:
        link.holders += 1
        if link.holders > 1:
            break
        size, link = size + link.size, link.before
    return size


def _let_go(link: _Link | None) -> int:
    """The opposite of `_hold`. Returns the bytes of links that nobody holds any more."""
    size = 0
    while link is not None:
        link.holders -= 1
        if link.holders:
            break
        size, link = size + link.size, link.before
    return size


def items_until(link: _Link | None) -> list[Any]:
    """All items of a conversation up to this link, oldest first."""
    links = []
    while link is not None:
        links.append(link)
        link = link.before
    return [item for link in reversed(links) for item in link.items]
