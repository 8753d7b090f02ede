"""Responses kept for who asks for them again or goes on from them, in memory and within bounds.

A kept response knows the conversation that led to it as a chain of links, which responses share: a long conversation costs
what its turns cost, and not their square. Knows sizes and owners; what items are is up to others.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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


class ResponseStore:
    """At most `most` responses of `max_bytes` in all; beyond that the oldest of whoever has most in it are forgotten, so that one
    owner displaces itself. An owner sees none of another's.

    Safe to use from several threads.
    """

    def __init__(self, *, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: Counter[str] = Counter()  # bytes of each owner
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self._sizes.total()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str, owner: str) -> Kept | None:
        """The owner's response of this id, None where there is none (any more)."""
        found = self._kept.get(response_id)
        return found if found is not None and found.owner == owner else None

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
            of_others = self.size - self._sizes[owner]
            if len(body) + output_link.whole_size() > max(self._max_bytes // 2, self._max_bytes - of_others):
                return
            self._kept[response_id] = kept
            self._sizes[owner] += len(body)
            self._hold(output_link, owner)
            while len(self._kept) > self._most or self.size > self._max_bytes:
                self._forget(self._next_to_go(response_id))

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget the owner's response of this id; whether there was one."""
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._forget(response_id)
            return True

    def _next_to_go(self, new: str) -> str:
        for owner in sorted(self._sizes, key=self._sizes.__getitem__, reverse=True):
            its = (each for each, kept in self._kept.items() if kept.owner == owner and each != new)
            if oldest := next(its, None):
                return oldest
        return new

    def _hold(self, link: _Link | None, owner: str) -> None:
        while link is not None:
            link.holders += 1
            if link.holders > 1:
                return
            self._sizes[owner] += link.size
            link = link.before

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._sizes[kept.owner] -= len(kept.body)
        link: _Link | None = kept.answered
        while link is not None:
            link.holders -= 1
            if link.holders:
                return
            self._sizes[kept.owner] -= link.size
            link = link.before


def items_until(link: _Link | None) -> list[Any]:
    """All items of a conversation up to this link, oldest first."""
    links = []
    while link is not None:
        links.append(link)
        link = link.before
    return [item for link in reversed(links) for item in link.items]
