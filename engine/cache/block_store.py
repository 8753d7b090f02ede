"""Block store: persisted and offloaded KV blocks of one engine, with a writer and a reader thread.

Blocks are offered when they become full and withdrawn when they are evicted; in between, the writer copies them to
files. Evicted device blocks go to the host tier. The reader fetches the missing blocks of a prompt, in order. The engine
thread only updates indexes, in microseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from windlass.engine.cache.cache_operations import SavedBlock
from windlass.engine.cache.disk_tier import (
    BlockDirectory,
    BlockFormat,
    Bytes,
    DamagedBlockError,
    ForeignBlockError,
    PersistCounters,
    PlaneForm,
    TierIndex,
    minute,
)
from windlass.engine.cache.host_tier import BlockTransfer, HostBlock, HostTier
from windlass.engine.cache.non_prefix_reuse import Passage, PassageRecord, PassageSearch
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.interface.outputs import PersistStats

_logger = logging.getLogger("windlass.engine")


# -- fetches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """index: blocks before it in its sequence; None for a block of a passage, which is useful without preceding blocks."""

    key: BlockKey
    index: int | None


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    key: BlockKey
    ticket: int
    num_bytes: int
    passage: PassageRecord | None


class Fetch:
    """Blocks that sequences wait for. The engine thread takes those that have arrived, and may cancel at any time.

    keys: of all blocks. num_read: blocks read so far. is_done: no more blocks will arrive. num_waiting: sequences that
    wait for it. num_loaded: blocks loaded into the cache, by KV group.
    """

    def __init__(self, wanted: Sequence[WantedBlock], reader: BlockFileReader) -> None:
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
        self.idle_seconds = 0.0  # waiting for the engine to take staged blocks

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.is_cancelled or (self.is_done and not self.arrived)

    def tokens_read(self, block_size: int) -> float:
        """Approximate number of tokens read: with several KV groups or second keys, several blocks hold the same tokens."""
        return self.num_read * block_size * self._num_distinct_blocks / max(1, len(self.wanted))

    def busy_seconds(self, now: float) -> float:
        """Seconds spent reading; before reading starts, seconds in the queue."""
        return now - (self.queued_at if self.started_at is None else self.started_at) - self.idle_seconds

    def take(self) -> ArrivedBlock:
        """The next block that has arrived."""
        block = self.arrived.popleft()
        self._reader.release_staged(block.num_bytes)
        return block

    def remove_waiter(self) -> None:
        """One sequence less waits. Without any, the fetch is cancelled."""
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.cancel()

    def cancel(self) -> None:
        self._reader.cancel(self)


# -- write queue ---------------------------------------------------------------------------------------------------

EVICTED = -1


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """A cached block that no file holds yet.

    block: its id, or `EVICTED` if it is only in host memory. index: blocks before it in its sequence. full_since: time,
    by the monotonic clock, at which it was full at the latest.
    """

    key: BlockKey
    block: int
    index: int
    passage: PassageRecord | None = None
    full_since: float = field(default_factory=time.monotonic)


class WriteQueue:
    """Blocks to be written. Thread-safe. num_lost: blocks that were evicted before they were written."""

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
        """Add a block. is_loading: the block has no valid data before `finish_loading`."""
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
                item = replace(item, passage=waiting.passage)  # it was computed again and is back in the cache
            self._blocks[item.key] = item
            self._changed.notify()

    def finish_loading(self) -> None:
        """All loads are done or submitted to the device, so that later copies of these blocks are valid."""
        if not self._loading:
            return
        with self._changed:
            loading, self._loading = self._loading, {}
            for item in loading.values():
                self.offer(replace(item, full_since=time.monotonic()))

    def withdraw(self, key: BlockKey, *, in_host_memory: bool) -> None:
        """The block is about to be overwritten. in_host_memory: the host tier has admitted it."""
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
        """The host tier has evicted the block."""
        with self._changed:
            item = self._blocks.get(key)
            if item is not None and item.block == EVICTED:
                del self._blocks[key]
                self.num_lost += 1

    def take(self, seconds: float) -> QueuedBlock | None:
        """The next block, to be copied now; None if there is none within this time."""
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
        """The block could not be written: it becomes the first of the queue again, unless it was evicted."""
        with self._changed:
            if self._copying is item and item.key not in self._blocks:
                self._blocks[item.key] = item
                self._blocks.move_to_end(item.key, last=False)
            self._copying = None

    def finish_copy(self, item: QueuedBlock) -> bool:
        """Whether the block was not overwritten during the copy."""
        with self._changed:
            if self._copying is item:
                return True
            self.num_lost += item.key not in self._blocks  # else it is queued again
            return False

    def count_lost(self) -> None:
        """A block that was taken is neither in the cache nor in host memory."""
        with self._changed:
            self.num_lost += 1

    def close(self) -> None:
        """Discard all blocks, and those offered from now on."""
        with self._changed:
            self._closed = True
            self._blocks.clear()
            self._loading.clear()

    def wake(self) -> None:
        """Make `take` return."""
        with self._changed:
            self._changed.notify_all()


# -- folder of the disk tier ---------------------------------------------------------------------------------------

_HASH_CHUNK_BYTES = 1 << 22


class UnusableFolderError(Exception):
    """The folder cannot be opened, and a later attempt would not help."""


@dataclass(slots=True)
class PersistFolder:
    """Folder of the disk tier, whose blocks can be used by engines with the same namespace.

    root: checked by `prepare_folder`. max_bytes: of all files in it. files: of the weights, hashed whole. identity:
    everything else that all blocks of an engine depend on, as text. is_current: whether the files are unchanged since
    the engine has read them. directory: None before `open` has succeeded.
    """

    root: Path
    max_bytes: int
    files: Sequence[Path]
    identity: str
    is_current: Callable[[], bool]
    directory: BlockDirectory | None = None
    _namespace: bytes | None = None

    def open(self, forms: Sequence[Sequence[PlaneForm]], stop: Callable[[], bool]) -> BlockDirectory | None:
        """Open the directory; None if `stop` became true. Raises OSError or UnusableFolderError.

        Weights are hashed only once, however often the folder cannot be opened.
        """
        if self._namespace is None:
            self._namespace = self._hash(stop)
        if self._namespace is not None:
            self.directory = BlockDirectory(self.root, BlockFormat(self._namespace, forms), self.max_bytes)
        return self.directory

    def _hash(self, stop: Callable[[], bool]) -> bytes | None:
        self._check()  # before gigabytes are read in vain
        digest = hashlib.sha256(f"windlass KV blocks 1\0{self.identity}".encode())
        for path in self.files:
            content = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_HASH_CHUNK_BYTES):
                    if stop():
                        return None
                    content.update(piece)
            digest.update(content.digest())
        self._check()
        return digest.digest()

    def _check(self) -> None:
        if not self.is_current():
            raise UnusableFolderError("the checkpoint has changed since it was read: start the engine again")


# -- reader --------------------------------------------------------------------------------------------------------


class BlockFileReader:
    """Thread that reads the blocks of fetches, from host memory if possible, else from files."""

    def __init__(
        self, folder: PersistFolder | None, transfer: BlockTransfer, index: TierIndex, counts: PersistCounters
    ) -> None:
        self._folder, self._transfer, self._index, self._counts = folder, transfer, index, counts
        self._queue: SimpleQueue[Fetch | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._staged = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)
        self._thread.start()

    def fetch(self, wanted: Sequence[WantedBlock]) -> Fetch:
        """Begin to read blocks, in this order."""
        fetch = Fetch(wanted, self)
        self._queue.put(fetch)
        return fetch

    def wait(self, fetches: Sequence[Fetch], seconds: float) -> bool:
        """Wait until one of these has a block to take or is over; False after a timeout."""
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
                self._transfer.drop(block.ticket)
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
            except Exception:  # requests never fail because of files
                _logger.exception("cached blocks could not be read")
            with self._changed:
                fetch.is_done = True
                self._changed.notify_all()

    def _read_all(self, fetch: Fetch) -> None:
        broken = False  # a block of the prefix is missing, so that later ones are useless
        wanted = deque(fetch.wanted)

        def stop() -> bool:
            return fetch.is_cancelled or self._closed

        while wanted and not stop():
            if broken and wanted[0].index is not None:
                wanted.popleft()
                continue
            if self._transfer.tier is not None:
                began = time.monotonic()
                loaded = self._load_from_host(self._transfer.tier, wanted, stop, skip_prefix=broken)
                fetch.idle_seconds += time.monotonic() - began  # it waits for the engine only
                if loaded:
                    self._deliver(fetch, loaded)
                    continue
                if stop():  # it may have become true meanwhile, after blocks were removed from `wanted`
                    return
            one = wanted.popleft()
            if not self._read(fetch, one, stop):
                broken = broken or one.index is not None

    def _load_from_host(
        self, tier: HostTier, wanted: deque[WantedBlock], stop: Callable[[], bool], *, skip_prefix: bool
    ) -> list[ArrivedBlock]:
        """Load the first of these blocks, up to the first that is not in host memory, and remove them from `wanted`.

        At most `max_blocks_per_load`. skip_prefix: end before a block of a prefix. Empty if `stop` became true.
        """
        held: list[HostBlock] = []
        try:
            while wanted and len(held) < self._transfer.max_blocks_per_load:
                if skip_prefix and wanted[0].index is not None:
                    break
                block = tier.acquire(wanted[0].key)
                if block is None:
                    break
                held.append(block)
                wanted.popleft()
            tickets = self._transfer.load(held, stop) if held else None
        finally:
            for block in held:
                tier.release(block)
        if tickets is None:
            return []
        sizes = self._transfer.block_bytes
        found = [
            ArrivedBlock(block.key, ticket, sizes[block.key.group], block.passage)
            for block, ticket in zip(held, tickets, strict=True)
        ]
        self._counts.host_read_blocks += len(found)
        self._counts.host_read_bytes += sum(block.num_bytes for block in found)
        return found

    def _read(self, fetch: Fetch, wanted: WantedBlock, stop: Callable[[], bool]) -> bool:
        key, directory = wanted.key, None if self._folder is None else self._folder.directory
        if directory is None:
            return False
        try:
            block = directory.read(key)
        except (DamagedBlockError, ForeignBlockError) as fault:
            self._counts.damaged_blocks += isinstance(fault, DamagedBlockError)
            self._counts.foreign_blocks += isinstance(fault, ForeignBlockError)
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
        self._counts.read_blocks += 1
        self._counts.read_bytes += block.num_bytes
        waited = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._staged < self._transfer.max_staged_bytes or stop())
        ticket = self._transfer.stage(key.group, block.planes, stop)
        fetch.idle_seconds += time.monotonic() - waited
        if ticket is not None:
            self._deliver(fetch, [ArrivedBlock(key, ticket, block.num_bytes, block.passage)])
        return True

    def _deliver(self, fetch: Fetch, blocks: Sequence[ArrivedBlock]) -> None:
        with self._changed:
            if fetch.is_cancelled:
                for block in blocks:
                    self._transfer.drop(block.ticket)
                return
            self._staged += sum(block.num_bytes for block in blocks)
            fetch.arrived.extend(blocks)
            fetch.num_read += len(blocks)
            self._changed.notify_all()


# -- writer --------------------------------------------------------------------------------------------------------

_NICENESS = 10
_MIN_SCAN_INTERVAL = 1.0  # seconds between two scans for files of other processes, at least
_SCAN_INTERVAL_FACTOR = 100  # times the duration of a scan, at least
_MEASURE_SHARE = 32  # the folder is measured again after 1/32 of the cap was written
_MIN_BACKOFF, _MAX_BACKOFF = 1.0, 60.0  # seconds after a failure
_MAX_PENDING_USES = 64  # sequences whose use is not recorded yet
_CANNOT_STORE = "cached blocks cannot be stored"
_CANNOT_WRITE = "cached blocks cannot be written to {}"
_CANNOT_REPLACE = "some cached blocks cannot be written to {}, where a directory has the name of a block's file"
_CANNOT_REMOVE = "old files of cached blocks cannot be removed from {}, which may grow beyond its cap"


class BlockFileWriter:
    """Thread that writes queued blocks to files, scans for files of other processes, and enforces the cap."""

    def __init__(
        self,
        folder: PersistFolder,
        transfer: BlockTransfer,
        write_queue: WriteQueue,
        index: TierIndex,
        counts: PersistCounters,
    ) -> None:
        self._folder, self._transfer, self._write_queue = folder, transfer, write_queue
        self._index, self._counts = index, counts
        self._uses: deque[Sequence[BlockKey]] = deque(maxlen=_MAX_PENDING_USES)
        self._closing: float | None = None  # deadline after `close`
        self._scanned_at, self._scan_seconds, self._changed_at = 0.0, 0.0, 0
        self._unmeasured = 0  # bytes written since the folder was measured
        self._pause, self._resumes_at = 0.0, 0.0
        self.has_scanned = threading.Event()  # or the folder cannot be opened
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks of a sequence, in order. If uses come too fast, only the latest are recorded."""
        self._uses.append(keys)

    def close(self, seconds: float) -> None:
        """Write the remaining blocks, with a time limit, and end the thread."""
        self._closing = time.monotonic() + seconds
        self._write_queue.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._should_stop():
            try:
                directory = self._folder.directory
                if directory is None:
                    directory = self._folder.open(self._transfer.forms, self._should_stop)
                    if directory is None:
                        return
                    self._measure(directory)
                self._write_use_times(directory)
                self._scan(directory)
                self._finish_first_scan()
                self._write_next(directory)
            except UnusableFolderError as error:
                self._counts.fail(_CANNOT_STORE, error)
                self._write_queue.close()
                self._finish_first_scan()
                return
            except Exception as error:  # the engine never fails because of files
                self._fail(_CANNOT_STORE, error)
                self._finish_first_scan()
                while not self._should_stop() and self._is_backing_off():
                    pass

    def _finish_first_scan(self) -> None:
        """Set `has_scanned`, and lower the priority of this thread below the engine's."""
        if not self.has_scanned.is_set():
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self.has_scanned.set()

    def _should_stop(self) -> bool:
        if self._closing is None:
            return False
        return not len(self._write_queue) or self._pause > 0 or time.monotonic() >= self._closing

    def _write_next(self, directory: BlockDirectory) -> None:
        if self._is_backing_off():
            return
        item = self._write_queue.take(0.25)
        if item is None or not self._index.lacks(item.key, item.passage):
            return
        tier = self._transfer.tier
        held = None if tier is None else tier.acquire(item.key)
        if tier is not None and held is not None:
            try:
                self._write(directory, item, self._transfer.read_host_block(held))
            finally:
                tier.release(held)
        elif item.block == EVICTED:
            self._write_queue.count_lost()
        else:
            planes = self._transfer.read_block(item.key.group, item.block, item.full_since)
            if self._write_queue.finish_copy(item):
                self._write(directory, item, planes)

    def _write(self, directory: BlockDirectory, item: QueuedBlock, planes: list[Bytes]) -> None:
        what = _CANNOT_WRITE.format(directory.folder)
        try:
            size = directory.write(item.key, item.index, item.passage, planes)
        except IsADirectoryError as error:  # it has the name of this block: only this block is not stored
            self._counts.fail(_CANNOT_REPLACE.format(directory.folder), error)
            return
        except OSError as error:
            self._write_queue.put_back(item)
            self._fail(what, error)
            return
        self._index.add(item.key, minute(), item.passage)
        self._counts.written_blocks += 1
        self._counts.written_bytes += size
        self._counts.disk_bytes += size
        self._unmeasured += size
        self._pause = 0.0
        self._counts.succeed(what)
        if self._unmeasured * _MEASURE_SHARE > self._folder.max_bytes:
            self._measure(directory)

    def _is_backing_off(self) -> bool:
        """Whether the pause after a failure is not over; if so, sleep for a part of it."""
        pause = self._resumes_at - time.monotonic()
        if pause <= 0:
            return False
        time.sleep(min(pause, 0.1))
        return True

    def _fail(self, what: str, error: Exception) -> None:
        self._counts.fail(what, error)
        self._pause = min(max(_MIN_BACKOFF, 2 * self._pause), _MAX_BACKOFF)
        self._resumes_at = time.monotonic() + self._pause

    def _measure(self, directory: BlockDirectory) -> None:
        """Measure the folder and enforce the cap."""
        self._counts.disk_bytes, removed, fault = directory.enforce_cap()
        self._unmeasured = 0
        self._counts.evicted_blocks += removed
        what = _CANNOT_REMOVE.format(directory.folder.parent)
        if fault is not None:
            self._counts.fail(what, fault)
        elif removed:
            self._counts.succeed(what)
        self._scanned_at = 0.0  # scan again at once

    def _scan(self, directory: BlockDirectory) -> None:
        """Update the index with files that were added or removed."""
        began = time.monotonic()
        if began - self._scanned_at < max(_MIN_SCAN_INTERVAL, _SCAN_INTERVAL_FACTOR * self._scan_seconds):
            return
        changed_at = directory.changed_at()
        if changed_at != self._changed_at or not changed_at:
            for key in self._index.update(directory.present()):
                if key.group == 0 and self._closing is None:
                    with contextlib.suppress(OSError, DamagedBlockError):  # detected when it is read
                        self._index.add(key, -1, directory.passage_of(key))
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


# -- store ---------------------------------------------------------------------------------------------------------


class BlockStore:
    """Disk and host tiers of one engine; the `BlockListener` of its block manager.

    folder: for files; None without a disk tier. transfer: with an index of host memory if there is a host tier.
    block_size: tokens of a block.
    """

    def __init__(self, folder: PersistFolder | None, transfer: BlockTransfer, block_size: int) -> None:
        self.transfer = transfer
        self._is_closed = False
        self._host = host = transfer.tier
        self.counts = PersistCounters() if host is None else host.counts
        self._index = TierIndex(block_size)
        self._write_queue = WriteQueue()
        self._loaded: set[tuple[int, int]] = set()  # (group, block), by the step that is being planned
        self._writer: BlockFileWriter | None = None
        if folder is not None:
            if host is not None:
                host.on_evicted = self._write_queue.host_evicted
            self._writer = BlockFileWriter(folder, transfer, self._write_queue, self._index, self.counts)
        self.reader = BlockFileReader(folder, transfer, self._index, self.counts)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a file or host memory holds the block, according to the indexes."""
        return key in self._index or (self._host is not None and key in self._host)

    def wait_scanned(self, seconds: float) -> None:
        """Wait until the files are indexed, so that requests find them, with a timeout."""
        if self._writer is not None:
            self._writer.has_scanned.wait(seconds)

    def offer(self, key: BlockKey, block: int, index: int, passage: PassageRecord | None = None) -> None:
        """Queue a block to be written. One whose file lacks a scope of its passage is written again."""
        if self._writer is not None and self._index.lacks(key, passage):
            item = QueuedBlock(key, block, index, passage)
            self._write_queue.offer(item, is_loading=(key.group, block) in self._loaded)

    def withdraw(self, key: BlockKey, block: int, passage: PassageRecord | None) -> None:
        """A block is evicted and may be overwritten. If the host tier admits it, the next step saves it first."""
        is_loading = (key.group, block) in self._loaded
        in_host_memory = self._host is not None and self._host.admit(key, block, passage, is_loading=is_loading)
        if self._writer is not None:
            self._write_queue.withdraw(key, in_host_memory=in_host_memory)

    def note_loaded(self, group: int, block: int) -> None:
        """The step that is being planned loads this block: it has no valid data until the step is executed."""
        self._loaded.add((group, block))

    def take_saved(self) -> list[SavedBlock]:
        """The blocks that the planned step must copy to host memory before anything else."""
        self._loaded.clear()
        return [] if self._host is None else self._host.take_pending_saves()

    def note_applied(self) -> None:
        """The step has been executed or submitted to the device, including its loads."""
        self._write_queue.finish_loading()

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks of a sequence, in order: they are evicted later."""
        if self._writer is not None:
            self._writer.note_use(keys)
        if self._host is not None:
            self._host.touch(keys)

    def search(self, scope: bytes, token_ids: Sequence[int], search: PassageSearch) -> list[Passage]:
        """Passages in host memory, followed by those in files."""
        found = [] if self._host is None else self._host.index.search(scope, token_ids, search)
        return found + self._index.search(scope, token_ids, search)

    def stats(self) -> PersistStats:
        return self.counts.snapshot(
            lost_blocks=self._write_queue.num_lost,
            waiting_blocks=len(self._write_queue),
            known_blocks=len(self._index),
            host_blocks=0 if self._host is None else self._host.num_blocks,
            host_bytes=0 if self._host is None else self._host.num_bytes,
        )

    def close(self, seconds: float) -> None:
        """Write the remaining blocks, with a time limit, and end both threads. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._writer is not None:
                self._writer.close(seconds)
            self.reader.close()
