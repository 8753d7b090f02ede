"""Block store: persisted and offloaded KV blocks of one engine, with a writer and a reader thread.

Blocks are offered when they become full and withdrawn when they are evicted; between the two the writer copies them to files. Device blocks go to the host tier when evicted. The reader fetches what a prompt lacks, the beginning of the text first. The engine thread only updates indexes, in microseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from windlass.engine.cache.cache_operations import SavedBlock
from windlass.engine.cache.disk_tier import (
    BlockDirectory,
    BlockFormat,
    Bytes,
    DamagedBlockError,
    ForeignBlockError,
    PersistCounters,
    TierIndex,
    minute,
)
from windlass.engine.cache.host_tier import BlockTransfer, DeviceBlockTransfer, HostBlock, HostTier
from windlass.engine.cache.non_prefix_reuse import Passage, PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.interface.outputs import PersistStats


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """index: blocks before it in its text; None for one of a passage, which is of use without those."""

    key: BlockKey
    index: int | None


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    key: BlockKey
    ticket: int
    num_bytes: int
    passage: PassageRecord | None


class FetchReader(Protocol):
    """Whoever reads for a `Fetch`."""

    def release_staged(self, num_bytes: int) -> None:
        """So much of what was read has been taken."""
        ...

    def cancel(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        ...


class Fetch:
    """Blocks that somebody waits for. The engine's thread takes what has arrived, and may cancel the rest at any time.

    keys: of all blocks. num_read: blocks so far. is_done: no more will arrive. num_waiting: how many wait for it. num_loaded: by
    KV group, blocks that have come into the cache.
    """

    def __init__(self, wanted: Sequence[WantedBlock], reader: FetchReader) -> None:
        self.wanted, self._reader = wanted, reader
        self.keys = frozenset(block.key for block in wanted)
        self.num_waiting = 1
        self.arrived: deque[ArrivedBlock] = deque()
        self._num_distinct_blocks = len({block.key.digest if block.index is None else block.index for block in wanted})
        self.num_read = 0
        self.num_loaded: Counter[int] = Counter()
        self.is_done = self.is_cancelled = False
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.idle_seconds = 0.0  # in which it could not read, as the engine had not taken what was there

    @property
    def is_over(self) -> bool:
        """Whether nothing has to be waited for any more."""
        return self.is_cancelled or (self.is_done and not self.arrived)

    def tokens_read(self, block_size: int) -> float:
        """Of text, about: where there are several KV groups, or keys as seen from afar, several blocks hold the same tokens."""
        return self.num_read * block_size * self._num_distinct_blocks / max(1, len(self.wanted))

    def busy_seconds(self, now: float) -> float:
        """Seconds that reading has taken, or that it has waited for others to be read."""
        return now - (self.queued_at if self.started_at is None else self.started_at) - self.idle_seconds

    def take(self) -> ArrivedBlock:
        """The next block that has arrived."""
        block = self.arrived.popleft()
        self._reader.release_staged(block.num_bytes)
        return block

    def leave(self) -> None:
        """One that waits does so no more."""
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.cancel()

    def cancel(self) -> None:
        self._reader.cancel(self)


@dataclass(frozen=True, slots=True)
class HostSource:
    tier: HostTier
    pages: DeviceBlockTransfer
    counts: PersistCounters

    def load(self, wanted: deque[WantedBlock], stop: Callable[[], bool], *, skip_prefix: bool) -> list[ArrivedBlock]:
        """The first of these, as far as the host's memory has them and as many as come at once; they are wanted no more.

        skip_prefix: blocks of a prefix are of no use any more. None at all where it has not got the first, or `stop` came.
        """
        held: list[HostBlock] = []
        try:
            while (
                wanted
                and len(held) < self.pages.max_blocks_per_load
                and not (skip_prefix and wanted[0].index is not None)
            ):
                block = self.tier.acquire(wanted[0].key)
                if block is None:
                    break
                held.append(block)
                wanted.popleft()
            tickets = self.pages.load(held, stop) if held else None
        finally:
            for block in held:
                self.tier.release(block)
        if tickets is None:
            return []
        sizes = self.pages.block_bytes
        found = [
            ArrivedBlock(block.key, ticket, sizes[block.key.group], block.passage)
            for block, ticket in zip(held, tickets, strict=True)
        ]
        self.counts.host_read += len(found)
        self.counts.host_read_bytes += sum(block.num_bytes for block in found)
        return found


EVICTED = -1


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """block: where it lies, `EVICTED` where the host's memory has it. index: blocks before it in its text. full_since: at least
    so long, by the monotonic clock."""

    key: BlockKey
    block: int
    index: int
    passage: PassageRecord | None = None
    full_since: float = field(default_factory=time.monotonic)


class WriteQueue:
    """num_lost: blocks that were evicted before they were written."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockKey, QueuedBlock] = OrderedDict()
        self._loading: dict[BlockKey, QueuedBlock] = {}
        self._copying: QueuedBlock | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def offer(self, item: QueuedBlock, *, is_loading: bool = False) -> None:
        """comes: what lies in the block is not it before `finish_loading`."""
        with self._changed:
            if self._closed:
                return
            if is_loading:
                self._loading[item.key] = item
                return
            waiting = self._blocks.get(item.key)
            if waiting is not None and item.passage is None:
                if waiting.block != EVICTED:
                    return
                item = replace(item, passage=waiting.passage)  # it is computed anew, and lies in the pages again
            self._blocks[item.key] = item
            self._changed.notify()

    def finish_loading(self) -> None:
        """All that comes was put into its blocks, or the device was asked to: whoever copies from now on has it."""
        if not self._loading:
            return
        with self._changed:
            loading, self._loading = self._loading, {}
            for item in loading.values():
                self.offer(replace(item, full_since=time.monotonic()))

    def withdraw(self, key: BlockKey, *, in_host_memory: bool) -> None:
        """The block is about to be overwritten. kept: the host's memory has it from then on."""
        with self._changed:
            loading = self._loading.pop(key, None)
            copied = self._copying if self._copying is not None and self._copying.key == key else None
            if copied is not None:
                self._copying = None
            if in_host_memory:
                item = loading or self._blocks.get(key, copied)
                if item is not None:
                    self._blocks[key] = replace(item, block=EVICTED)
            elif (self._blocks.pop(key, None) or loading) is not None:
                self.num_lost += 1

    def host_evicted(self, key: BlockKey) -> None:
        """The host's memory has the block no more."""
        with self._changed:
            item = self._blocks.get(key)
            if item is not None and item.block == EVICTED:
                del self._blocks[key]
                self.num_lost += 1

    def take(self, seconds: float) -> QueuedBlock | None:
        """The next one, to be copied now; None where none comes within so many seconds."""
        with self._changed:
            deadline = time.monotonic() + seconds
            while not self._blocks:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            _, item = self._blocks.popitem(last=False)
            self._copying = item
            return item

    def put_back(self, item: QueuedBlock) -> None:
        """It could not be written, and comes first again, unless it is gone."""
        with self._changed:
            if self._copying is item and item.key not in self._blocks:
                self._blocks[item.key] = item
                self._blocks.move_to_end(item.key, last=False)
            self._copying = None

    def finish_copy(self, item: QueuedBlock) -> bool:
        """Whether the block lay there as it is until now."""
        with self._changed:
            if self._copying is item:
                return True
            self.num_lost += item.key not in self._blocks  # else it waits once more
            return False

    def count_lost(self) -> None:
        """What was taken is nowhere any more."""
        with self._changed:
            self.num_lost += 1

    def close(self) -> None:
        """Nobody will take any of these, nor what is offered from now on."""
        with self._changed:
            self._closed = True
            self._blocks.clear()
            self._loading.clear()

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify_all()


_logger = logging.getLogger("windlass.engine")


class BlockFileReader:
    """directory: asked for when something is to be read that is not in the host's memory; see `HostSource`."""

    def __init__(
        self,
        directory: Callable[[], BlockDirectory | None],
        pages: BlockTransfer,
        known: TierIndex,
        counts: PersistCounters,
        host: HostSource | None = None,
    ) -> None:
        self._directory, self._pages, self._index, self._counts = directory, pages, known, counts
        self._host = host
        self._queue: SimpleQueue[Fetch | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._staged = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)
        self._thread.start()

    def fetch(self, wanted: Sequence[WantedBlock]) -> Fetch:
        """Begin to read blocks, those that come first in their text first."""
        fetch = Fetch(wanted, self)
        self._queue.put(fetch)
        return fetch

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> bool:
        """Until one of these has something to take, or is over; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(f.arrived or f.is_done or f.is_cancelled for f in fetches), seconds
            )

    def release_staged(self, num_bytes: int) -> None:
        with self._changed:
            self._staged -= num_bytes
            self._changed.notify_all()

    def cancel(self, fetch: Fetch) -> None:
        with self._changed:
            fetch.is_cancelled = True
            while fetch.arrived:
                block = fetch.arrived.popleft()
                self._pages.drop(block.ticket)
                self._staged -= block.num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (fetch := self._queue.get()) is not None and not self._closed:
            fetch.started_at = time.monotonic()
            try:
                self._read_all(fetch)
            except Exception:  # whatever is wrong with files, requests go on without them
                _logger.exception("cached blocks could not be read")
            with self._changed:
                fetch.is_done = True
                self._changed.notify_all()

    def _read_all(self, fetch: Fetch) -> None:
        broken = False  # the text of a prefix is
        wanted = deque(fetch.wanted)

        def stop() -> bool:
            return fetch.is_cancelled or self._closed

        while wanted and not stop():
            if broken and wanted[0].index is not None:
                wanted.popleft()
                continue
            if self._host is not None:
                began = time.monotonic()
                loaded = self._host.load(wanted, stop, skip_prefix=broken)
                fetch.idle_seconds += time.monotonic() - began  # what it waits for is the engine
                if loaded:
                    self._deliver(fetch, loaded)
                    continue
                if stop():  # it may have come while that waited, and then the first of these is wanted no more
                    return
            one = wanted.popleft()
            if not self._read(fetch, one, stop):
                broken = broken or one.index is not None

    def _read(self, fetch: Fetch, wanted: WantedBlock, stop: Callable[[], bool]) -> bool:
        key, directory = wanted.key, self._directory()
        if directory is None:
            return False
        try:
            block = directory.read(key)
        except (DamagedBlockError, ForeignBlockError) as fault:
            if isinstance(fault, DamagedBlockError):
                self._counts.damaged += 1
            else:
                self._counts.foreign += 1
            directory.remove(key)
            block = None
        except OSError as error:
            self._counts.fail(f"cached blocks cannot be read from {directory.folder}", error)
            block = None
        if block is None:
            self._index.remove(key)
            return False
        if self._index.touch(key, minute()):
            directory.touch(key, wanted.index or 0)
        self._counts.read += 1
        self._counts.read_bytes += block.num_bytes
        waited = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._staged < self._pages.max_staged_bytes or stop())
        ticket = self._pages.stage(key.group, block.planes, stop)
        fetch.idle_seconds += time.monotonic() - waited
        if ticket is not None:
            self._deliver(fetch, [ArrivedBlock(key, ticket, block.num_bytes, block.passage)])
        return True

    def _deliver(self, fetch: Fetch, blocks: Sequence[ArrivedBlock]) -> None:
        with self._changed:
            if fetch.is_cancelled:
                for block in blocks:
                    self._pages.drop(block.ticket)
                return
            self._staged += sum(block.num_bytes for block in blocks)
            fetch.arrived.extend(blocks)
            fetch.num_read += len(blocks)
            self._changed.notify_all()


_NICENESS = 10

_MIN_SCAN_INTERVAL = 1.0  # between two looks at what other processes have written, at least

_SCAN_INTERVAL_FACTOR = 100  # and so many times what a look takes

_MEASURE_SHARE = 32  # of the cap, after which the folder is measured again

_MIN_BACKOFF, _MAX_BACKOFF = 1.0, 60.0  # seconds after a failure

_MAX_PENDING_USES = 64  # texts whose use waits to be noted

_CANNOT_STORE = "cached blocks cannot be kept"

_CANNOT_WRITE = "cached blocks cannot be written to {}"

_CANNOT_REMOVE = "old files of cached blocks cannot be removed from {}, which may grow beyond its cap"


class UnusableFolderError(Exception):
    """The folder cannot be opened, and to try again is of no use."""


class BlockFileWriter:
    """open_directory: makes what `directory` is from then on; raises OSError or UnusableFolderError. It may take its time, and may
    return None when what it is given says that nobody needs it any more. max_bytes: of all files together. host: copies of
    what the pages have lost."""

    def __init__(
        self,
        open_directory: Callable[[Callable[[], bool]], BlockDirectory | None],
        pages: BlockTransfer,
        write_queue: WriteQueue,
        known: TierIndex,
        counts: PersistCounters,
        max_bytes: int,
        host: HostSource | None = None,
    ) -> None:
        self.directory: BlockDirectory | None = None
        self._open, self._pages, self._write_queue = open_directory, pages, write_queue
        self._index, self._counts, self._max_bytes, self._host = known, counts, max_bytes, host
        self._uses: deque[Sequence[BlockKey]] = deque(maxlen=_MAX_PENDING_USES)
        self._closing: float | None = None  # when it ends at last
        self._scanned_at, self._scan_seconds, self._changed_at = 0.0, 0.0, 0
        self._unmeasured = 0  # bytes written since the folder was measured
        self._pause, self._resumes_at = 0.0, 0.0
        self._has_scanned = threading.Event()  # what the folder holds, or that it cannot be opened
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are used now. Of many that come at once only the last are noted."""
        self._uses.append(keys)

    def wait_first_scan(self, seconds: float) -> None:
        """Until it is known what the folder holds, for so many seconds at most."""
        self._has_scanned.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write what is left, for so many seconds at most, and end."""
        self._closing = time.monotonic() + seconds
        self._write_queue.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._should_stop():
            try:
                if self.directory is None:
                    self.directory = self._open(self._should_stop)
                    if self.directory is None:
                        return
                    self._measure(self.directory)
                self._write_use_times(self.directory)
                self._scan(self.directory)
                self._finish_first_scan()
                self._write_next(self.directory)
            except UnusableFolderError as error:
                self._counts.fail(_CANNOT_STORE, error)
                self._write_queue.close()
                self._finish_first_scan()
                return
            except Exception as error:  # the engine goes on whatever becomes of files
                self._fail(_CANNOT_STORE, error)
                self._finish_first_scan()
                while not self._should_stop() and self._is_backing_off():
                    pass

    def _finish_first_scan(self) -> None:
        """Whoever starts need wait no longer; from here on the engine goes first."""
        if not self._has_scanned.is_set():
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self._has_scanned.set()

    def _should_stop(self) -> bool:
        if self._closing is None:
            return False
        return not len(self._write_queue) or self._pause > 0 or time.monotonic() >= self._closing

    def _write_next(self, directory: BlockDirectory) -> None:
        if self._is_backing_off():
            return
        item = self._write_queue.take(0.25)
        if item is None or not self._is_wanted(item):
            return
        held = None if self._host is None else self._host.tier.acquire(item.key)
        if held is not None and self._host is not None:
            try:
                self._write(directory, item, self._host.pages.read_host_block(held))
            finally:
                self._host.tier.release(held)
        elif item.block == EVICTED:
            self._write_queue.count_lost()
        else:
            planes = self._pages.read_block(item.key.group, item.block, item.full_since)
            if self._write_queue.finish_copy(item):
                self._write(directory, item, planes)

    def _write(self, directory: BlockDirectory, item: QueuedBlock, planes: list[Bytes]) -> None:
        what = _CANNOT_WRITE.format(directory.folder)
        try:
            size = directory.write(item.key, item.index, item.passage, planes)
        except OSError as error:
            self._write_queue.put_back(item)
            self._fail(what, error)
            return
        self._index.add(item.key, minute(), item.passage)
        self._counts.written += 1
        self._counts.written_bytes += size
        self._counts.disk_bytes += size
        self._unmeasured += size
        self._pause = 0.0
        self._counts.succeed(what)
        if self._unmeasured * _MEASURE_SHARE > self._max_bytes:
            self._measure(directory)

    def _is_backing_off(self) -> bool:
        """Whether a failure is too fresh to try again; a part of the pause is over then."""
        pause = self._resumes_at - time.monotonic()
        if pause <= 0:
            return False
        time.sleep(min(pause, 0.1))
        return True

    def _is_wanted(self, item: QueuedBlock) -> bool:
        """Whether no file holds it, or one that lacks what is known of its passage."""
        if item.key not in self._index:
            return True
        scopes = () if item.passage is None else item.passage.scopes
        return any(not self._index.is_passage_of(scope, item.key.digest) for scope in scopes)

    def _fail(self, what: str, error: Exception) -> None:
        self._counts.fail(what, error)
        self._pause = min(max(_MIN_BACKOFF, 2 * self._pause), _MAX_BACKOFF)
        self._resumes_at = time.monotonic() + self._pause

    def _measure(self, directory: BlockDirectory) -> None:
        """Hold the cap."""
        self._counts.disk_bytes, removed, fault = directory.enforce_cap()
        self._unmeasured = 0
        self._counts.evicted += removed
        what = _CANNOT_REMOVE.format(directory.folder.parent)
        if fault is not None:
            self._counts.fail(what, fault)
        elif removed:
            self._counts.succeed(what)
        self._scanned_at = 0.0  # look again at once

    def _scan(self, directory: BlockDirectory) -> None:
        """See what has come and gone."""
        began = time.monotonic()
        if began - self._scanned_at < max(_MIN_SCAN_INTERVAL, _SCAN_INTERVAL_FACTOR * self._scan_seconds):
            return
        changed_at = directory.changed_at()
        if changed_at != self._changed_at or not changed_at:
            new = self._index.compare(directory.present())
            for key in new:
                self._index.add(key, -1)
            for key in new:
                if key.group == 0 and self._closing is None:
                    with contextlib.suppress(OSError, DamagedBlockError):  # whoever reads it will see
                        passage = directory.passage_of(key)
                        if passage is not None:
                            self._index.add(key, -1, passage)
            self._changed_at = changed_at
        if self._counts.succeed(_CANNOT_STORE):
            self._pause = 0.0
        self._scanned_at = time.monotonic()
        self._scan_seconds = self._scanned_at - began

    def _write_use_times(self, directory: BlockDirectory) -> None:
        now = minute()
        while self._uses:
            for index, key in enumerate(self._uses.popleft()):
                if self._index.touch(key, now):
                    directory.touch(key, index)


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
