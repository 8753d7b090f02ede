"""Names of kept blocks, and what is known of the passages in them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from windlass.engine.cache.passages import PassageIndex


class BlockKey(NamedTuple):
    """A block of one KV group; `digest` as in `cache.prefix`."""

    group: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PassageRecord:
    """What `PassageIndex.add` is told of a block. scopes: in which it may be found."""

    parent: bytes
    position: int
    token_ids: tuple[int, ...]
    scopes: tuple[bytes, ...]


def passage_of(passages: PassageIndex, digest: bytes) -> PassageRecord | None:
    """What an index knows of a block."""
    entry = passages.recorded(digest)
    return None if entry is None else PassageRecord(*entry, passages.scopes_of(digest))


class BlockListener(Protocol):
    """Whom the books tell of blocks that have become full, and of those that are evicted."""

    def offer(self, key: BlockKey, block: int, index: int) -> None:
        """A block has become full. index: blocks before it in its text."""
        ...

    def offer_passage(self, key: BlockKey, block: int, index: int, passage: PassageRecord) -> None:
        """A block, of the first KV group, may be found as a passage."""
        ...

    def withdraw(self, key: BlockKey, block: int, passage: PassageRecord | None) -> None:
        """A block is evicted, and overwritten from now on. passage: as which it could be found."""
        ...
