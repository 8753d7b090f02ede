"""The kept blocks of one engine: what its thread tells and asks, in microseconds, and the two threads that do the rest.

Blocks are offered when they become full and withdrawn when they are evicted; in between the writer copies them to files. Those of
a device go into the host's memory when they are evicted, and the writer takes them from there too. What a prompt lacks in the
cache is fetched by the reader. See `write_queue`, `tier`, `writer` and `reader`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.engine.api.request import PersistStats
from windlass.engine.cache.changes import SavedBlock
from windlass.engine.cache.passages import Passage
from windlass.engine.cache.persist.block_file import BlockFormat
from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.directory import BlockDirectory
from windlass.engine.cache.persist.fetch import Fetch, WantedBlock
from windlass.engine.cache.persist.host_source import HostSource
from windlass.engine.cache.persist.keys import BlockKey, PassageRecord
from windlass.engine.cache.persist.known import TierIndex
from windlass.engine.cache.persist.pages import BlockTransfer
from windlass.engine.cache.persist.reader import BlockFileReader
from windlass.engine.cache.persist.unwritten import QueuedBlock, WriteQueue
from windlass.engine.cache.persist.writer import BlockFileWriter, UnusableFolderError

_PIECE = 1 << 22  # bytes of weights that are hashed at a time


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What all blocks of an engine depend on. files: of the weights, which are hashed whole. said: all else, as text.

    is_current: whether the files are still those that the engine has read.
    """

    files: tuple[Path, ...]
    identity: str
    is_current: Callable[[], bool] = lambda: True

    def namespace(self, stop: Callable[[], bool]) -> bytes | None:
        """Their digest, None if told to stop. Raises OSError, or UnusableFolderError where the files are others by now."""
        self._check()  # before gigabytes are read for nothing
        digest = hashlib.sha256(f"windlass KV blocks 1\0{self.identity}".encode())
        for path in self.files:
            content = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE):
                    if stop():
                        return None
                    content.update(piece)
            digest.update(content.digest())
        self._check()
        return digest.digest()

    def _check(self) -> None:
        if not self.is_current():
            raise UnusableFolderError("the checkpoint has changed since it was read: start the engine again")


@dataclass(frozen=True, slots=True)
class PersistFolder:
    """root: a folder that `prepare_folder` has seen. max_bytes: of all files in it. origin: what its blocks depend on."""

    root: Path
    max_bytes: int
    origin: BlockNamespace


class BlockStore:
    """folder: for files, None where nothing is written. host: where the host's memory keeps what a device's cache evicts.
    block_size: tokens of a block. counts: those of `host`, if there is one."""

    def __init__(
        self,
        folder: PersistFolder | None,
        pages: BlockTransfer,
        block_size: int,
        counts: PersistCounters,
        host: HostSource | None = None,
    ) -> None:
        self.pages = pages
        self.restored_tokens = 0
        self._is_closed = False
        self._counts, self._host = counts, host
        self._index = TierIndex(block_size)
        self._write_queue = WriteQueue()
        self._loaded: set[tuple[int, int]] = set()  # group and block, by the plan that is being made
        self._writer: BlockFileWriter | None = None
        if folder is not None:
            if host is not None:
                host.tier.on_evicted = self._write_queue.host_evicted
            self._writer = self._make_writer(folder)
        self._reader = BlockFileReader(self._directory, pages, self._index, counts, host)

    def _make_writer(self, folder: PersistFolder) -> BlockFileWriter:
        pages, max_bytes = self.pages, folder.max_bytes
        namespace: bytes | None = None

        def open_directory(stop: Callable[[], bool]) -> BlockDirectory | None:
            nonlocal namespace
            if namespace is None:  # hashed but once, however often there is no folder
                namespace = folder.origin.namespace(stop)
            if namespace is None:
                return None
            return BlockDirectory(folder.root, BlockFormat(namespace, pages.forms), max_bytes)

        return BlockFileWriter(
            open_directory, pages, self._write_queue, self._index, self._counts, max_bytes, self._host
        )

    def _directory(self) -> BlockDirectory | None:
        return None if self._writer is None else self._writer.directory

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a file or the host's memory holds the block, as far as is known."""
        return key in self._index or (self._host is not None and key in self._host.tier)

    def wait_scanned(self, seconds: float) -> None:
        """Until it is known which blocks files hold, for so many seconds at most: from then on requests find them."""
        if self._writer is not None:
            self._writer.wait_first_scan(seconds)

    def offer(self, key: BlockKey, block: int, index: int) -> None:
        """A block has become full. index: blocks before it in its text."""
        if self._writer is not None and key not in self._index:
            self._offer(QueuedBlock(key, block, index))

    def offer_passage(self, key: BlockKey, block: int, index: int, passage: PassageRecord) -> None:
        """A block, of the first KV group, may be found as a passage. It is written once more if its file does not say so."""
        if self._writer is not None and any(not self._index.is_passage_of(s, key.digest) for s in passage.scopes):
            self._offer(QueuedBlock(key, block, index, passage))

    def _offer(self, item: QueuedBlock) -> None:
        self._write_queue.offer(item, is_loading=(item.key.group, item.block) in self._loaded)

    def withdraw(self, key: BlockKey, block: int, passage: PassageRecord | None) -> None:
        """A block is evicted, and overwritten from now on. The next plan says if it is to be saved."""
        in_host_memory = self._host is not None and self._host.tier.admit(key, block, passage)
        if self._writer is not None:
            self._write_queue.withdraw(key, in_host_memory=in_host_memory)

    def note_loaded(self, group: int, block: int) -> None:
        """A block is brought in by the plan that is being made: until that is followed, something else lies there."""
        self._loaded.add((group, block))
        if self._host is not None:
            self._host.tier.note_loaded(group, block)

    def take_saved(self) -> list[SavedBlock]:
        """For the plan that has been made: what is to be copied before anything else."""
        self._loaded.clear()
        return [] if self._host is None else self._host.tier.take_pending_saves()

    def note_applied(self) -> None:
        """The plan has been followed: what it brings in was put into its blocks, or the device was asked to."""
        self._write_queue.finish_loading()

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are of use once more: they are kept longer."""
        if self._writer is not None:
            self._writer.note_use(keys)
        if self._host is not None:
            self._host.tier.touch(keys)

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
        """Passages that files hold, and those that the host's memory does: see `PassageIndex.search`."""
        found: list[Passage] = []
        for known in (self._index,) if self._host is None else (self._host.tier.known, self._index):
            found += known.search(scope, token_ids, start=start, end=end, at_least=at_least, spans=spans)
        return found

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
            lost=self._write_queue.num_lost,
            waiting=len(self._write_queue),
            known=len(self._index),
            tokens=self.restored_tokens,
            host_blocks=0 if self._host is None else self._host.tier.num_blocks,
            host_bytes=0 if self._host is None else self._host.tier.num_bytes,
        )

    def close(self, seconds: float) -> None:
        """Write what is left, for so many seconds at most, and end both threads. Closing twice does nothing more."""
        if not self._is_closed:
            self._is_closed = True
            if self._writer is not None:
                self._writer.close(seconds)
            self._reader.close()
