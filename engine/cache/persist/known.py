"""Which blocks lie in files, as far as this process knows, so that the engine's thread can ask without touching the disk.

Others come and go without telling: whoever reads may find no file, and one that came a moment ago may not be known yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from windlass.engine.cache.passages import Passage, PassageIndex
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord, passage_of


class TierIndex:
    """Any thread may ask and tell."""

    def __init__(self, block_size: int) -> None:
        self._used: dict[BlockKey, int] = {}  # the minute in which each was last said to be used
        self._passages = PassageIndex(block_size)
        self._block_size = block_size
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._used

    def add(self, key: BlockKey, minute: int, passage: PassageRecord | None = None) -> None:
        with self._lock:
            self._used[key] = minute
            if passage is not None and len(passage.token_ids) == self._block_size:
                for scope in passage.scopes:
                    self._passages.add(scope, key.digest, passage.parent, passage.token_ids, passage.position)

    def remove(self, key: BlockKey) -> None:
        with self._lock:
            self._used.pop(key, None)
            if key.group == 0:
                self._passages.remove(key.digest)

    def touch(self, key: BlockKey, minute: int) -> bool:
        """Whether this is its first use in that minute, of those said here."""
        with self._lock:
            before = self._used.get(key)
            if before is None or before == minute:
                return False
            self._used[key] = minute
            return True

    def compare(self, present: Iterable[BlockKey]) -> list[BlockKey]:
        """Forget those that are not among these; returns those that were not known."""
        present = set(present)
        for key in [key for key in list(self._used) if key not in present]:
            self.remove(key)
        return [key for key in present if key not in self._used]

    def is_passage_of(self, scope: bytes, digest: bytes) -> bool:
        """Whether its file says that it may be found in this scope."""
        with self._lock:
            return scope in self._passages.scopes_of(digest)

    def passage_of(self, key: BlockKey) -> PassageRecord | None:
        """As which passage a block is found, if it is."""
        with self._lock:
            return None if key.group else passage_of(self._passages, key.digest)

    def search(
        self,
        scope: bytes,
        token_ids: Sequence[int],
        *,
        start: int,
        end: int,
        at_least: int,
        spans: Sequence[tuple[int, int]],
    ) -> list[Passage]:
        """See `PassageIndex.search`."""
        with self._lock:
            return self._passages.search(scope, token_ids, start=start, end=end, at_least=at_least, spans=spans)
