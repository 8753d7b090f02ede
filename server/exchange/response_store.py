"""Responses kept for who asks for them again or goes on from them, in memory and within bounds.

A kept response knows the conversation that led to it as a chain of links, which responses share: a long conversation costs
what its turns cost, and not their square. Knows sizes and owners; what items are is up to others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """What one owner has, oldest first, and its bytes."""

    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """At most `most` responses of `max_bytes` in all; beyond that the oldest of whoever has most in it are forgotten, so that one
    owner displaces itself: most responses where there are too many, else most bytes. An owner sees none of another's.

    Safe to use from several threads.
    """

    def __init__(self, *, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # of owners that have something
        self._number = self._size = 0  # of all responses
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
            shelf = self._shelves.get(owner) or _Shelf()
            of_others = self._size - shelf.size
            if len(body) + output_link.whole_size() > max(self._max_bytes // 2, self._max_bytes - of_others):
                return
            self._shelves[owner] = shelf
            shelf.kept[response_id] = kept
            self._number += 1
            self._count(shelf, len(body) + _hold(output_link))
            while self._number > self._most or self._size > self._max_bytes:
                self._forget_one(response_id)

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget the owner's response of this id; whether there was one."""
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._forget(response_id, owner)
            return True

    def _forget_one(self, new: str) -> None:
        """The new one goes last."""
        by_number = self._number > self._most
        others = [
            (owner, shelf) for owner, shelf in self._shelves.items() if len(shelf.kept) > 1 or new not in shelf.kept
        ]
        whose, shelf = max(
            others or self._shelves.items(), key=lambda one: len(one[1].kept) if by_number else one[1].size
        )
        self._forget(next(iter(shelf.kept)), whose)

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
