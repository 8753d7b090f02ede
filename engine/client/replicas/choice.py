"""The choice among replicas: the longest cached prefix wins, unless its replica is too busy.

What a replica has cached is not asked but remembered: the prompts that were sent to it, the oldest of which are forgotten as
its cache forgets them. Knows replicas by any key, prompts by their digests (see `prefix`), and nothing of how either is reached.

A replica is too busy for a prompt where it has more requests than the least busy one by more than one for each
TOKENS_PER_REQUEST that it would save, and by more than MAX_EXTRA_LOAD in any case. Among equals the least busy wins, then the one
that was chosen longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_TRACKED_BLOCKS = 65_536  # blocks of a replica, some 200 bytes each
MAX_EXTRA_LOAD = 8  # requests
TOKENS_PER_REQUEST = 64  # saved, that are worth waiting for one more


class _TrackedPrefixes:
    """The blocks that one replica should have, the ones used last at the end."""

    __slots__ = ("_blocks", "_most", "last_chosen")

    def __init__(self, most: int) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._most = most
        self.last_chosen = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks are there. By bisection: a block goes before those that stand before it."""
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests[: self._most]):  # the first block last, so that it goes last
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class PrefixRouter(Generic[K]):
    """block_tokens: of a digest's block. most_blocks: that a replica's cache holds, at most MAX_TRACKED_BLOCKS are remembered."""

    def __init__(self, block_tokens: int, most_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._most = max(1, min(most_blocks, MAX_TRACKED_BLOCKS))
        self._replicas: dict[K, _TrackedPrefixes] = {}
        self._choice_counter = count(1)

    @property
    def num_tracked_blocks(self) -> int:
        """Blocks, of all replicas."""
        return sum(map(len, self._replicas.values()))

    def choose(self, digests: Sequence[bytes], load: Mapping[K, int]) -> K:
        """One of the replicas that `load` names, each with the requests it has. Raises ValueError where it names none."""
        least = min(load.values())
        ranked = []
        for replica, requests in load.items():
            known = self._replicas.get(replica)
            matched = 0 if known is None else known.match(digests)
            ranked.append((-matched, requests, 0 if known is None else known.last_chosen, replica))
        ranked.sort(key=lambda one: one[:3])
        for matched, requests, _, replica in ranked:
            saved = -matched * self._block_tokens
            if requests - least <= min(MAX_EXTRA_LOAD, saved // TOKENS_PER_REQUEST):
                return replica
        raise AssertionError("the least busy replica is never too busy")

    def sent(self, replica: K, digests: Sequence[bytes]) -> None:
        """A prompt went to this replica, which has it cached from now on."""
        known = self._replicas.setdefault(replica, _TrackedPrefixes(self._most))
        known.last_chosen = next(self._choice_counter)
        known.add(digests)

    def forget(self, replica: K) -> None:
        """This replica has nothing cached (any more)."""
        self._replicas.pop(replica, None)

    def retain_only(self, replicas: Sequence[K]) -> None:
        """Forget all the others."""
        for gone in self._replicas.keys() - set(replicas):
            del self._replicas[gone]
