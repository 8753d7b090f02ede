"""The kept blocks of one engine: what its thread tells and asks, in microseconds, and the two threads that do the rest.

Blocks are offered when they become full and withdrawn when they are evicted; in between the writer copies them to files. What a
prompt lacks in the cache is fetched from files by the reader. See `unwritten`, `writer` and `reader`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.engine.api.request import PersistStats
from windlass.engine.cache.passages import Passage
from windlass.engine.cache.persist.block_file import BlockFormat
from windlass.engine.cache.persist.counts import PersistCounts
from windlass.engine.cache.persist.directory import BlockDirectory
from windlass.engine.cache.persist.fetch import Fetch, WantedBlock
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord
from windlass.engine.cache.persist.known import KnownBlocks
from windlass.engine.cache.persist.pages import PersistedPages
from windlass.engine.cache.persist.reader import BlockFileReader
from windlass.engine.cache.persist.unwritten import UnwrittenBlock, UnwrittenBlocks
from windlass.engine.cache.persist.writer import BlockFileWriter

_PIECE = 1 << 22  # bytes of weights that are hashed at a time


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """What all blocks of an engine depend on. files: of the weights, which are hashed whole. said: all else, as text.

    is_current: whether the files are still those that the engine has read.
    """

    files: tuple[Path, ...]
    said: str
    is_current: Callable[[], bool] = lambda: True

    def namespace(self, stop: Callable[[], bool]) -> bytes | None:
        """Their digest, None if told to stop. Raises OSError."""
        digest = hashlib.sha256(f"windlass KV blocks 1\0{self.said}".encode())
        for path in self.files:
            content = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE):
                    if stop():
                        return None
                    content.update(piece)
            digest.update(content.digest())
        if not self.is_current():
            raise OSError("the checkpoint has changed since it was read: start the engine again")
        return digest.digest()


class BlockStore:
    """root: a folder that `prepare_folder` has seen. most_bytes: of all files in it. block_size: tokens of a block."""

    def __init__(
        self, root: Path, most_bytes: int, origin: BlockOrigin, pages: PersistedPages, block_size: int
    ) -> None:
        self.pages = pages
        self.restored_tokens = 0
        self._is_closed = False
        self._counts = PersistCounts()
        self._known = KnownBlocks(block_size)
        self._unwritten = UnwrittenBlocks()

        def open_directory(stop: Callable[[], bool]) -> BlockDirectory | None:
            namespace = origin.namespace(stop)
            return None if namespace is None else BlockDirectory(root, BlockFormat(namespace, pages.forms), most_bytes)

        self._writer = BlockFileWriter(open_directory, pages, self._unwritten, self._known, self._counts, most_bytes)
        self._reader = BlockFileReader(lambda: self._writer.directory, pages, self._known, self._counts)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a file holds the block, as far as is known."""
        return key in self._known

    def wait_known(self, seconds: float) -> None:
        """Until it is known which blocks files hold, for so many seconds at most: from then on requests find them."""
        self._writer.wait_seen(seconds)

    def offer(self, key: BlockKey, block: int, index: int) -> None:
        """A block has become full. index: blocks before it in its text."""
        if key not in self._known:
            self._unwritten.offer(UnwrittenBlock(key, block, index))

    def offer_passage(self, key: BlockKey, block: int, index: int, passage: PassageRecord) -> None:
        """A block, of the first KV group, may be found as a passage. It is written once more if its file does not say so."""
        if any(not self._known.is_passage_of(scope, key.digest) for scope in passage.scopes):
            self._unwritten.offer(UnwrittenBlock(key, block, index, passage))

    def withdraw(self, key: BlockKey) -> None:
        """A block is evicted, and overwritten from now on."""
        self._unwritten.withdraw(key)

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are of use once more: they are kept longer."""
        self._writer.note_use(keys)

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
        """Passages that files hold: see `PassageIndex.search`."""
        return self._known.search(scope, token_ids, start=start, end=end, at_least=at_least, spans=spans)

    def fetch(self, wanted: Sequence[WantedBlock]) -> Fetch:
        """Begin to read blocks, in this order."""
        return self._reader.fetch(wanted)

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> bool:
        """Until one of these has something to take, or is over; False if that takes longer."""
        return self._reader.wait(fetches, seconds)

    def drop(self, tickets: Iterable[int]) -> None:
        """Give up what was read and taken, and is not put anywhere."""
        for ticket in tickets:
            self.pages.drop(ticket)

    def stats(self) -> PersistStats:
        return self._counts.stats(
            lost=self._unwritten.num_lost,
            waiting=len(self._unwritten),
            known=len(self._known),
            tokens=self.restored_tokens,
        )

    def close(self, seconds: float) -> None:
        """Write what is left, for so many seconds at most, and end both threads. Closing twice does nothing more."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close(seconds)
            self._reader.close()
