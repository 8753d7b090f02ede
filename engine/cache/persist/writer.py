"""Writes blocks to files, and keeps the folder in order: one thread, which only a start waits for, and not for long. From then
on its priority is low.

One block at a time is in memory beside the pages. Where a block cannot be written the thread pauses, longer each time, and
tries again: blocks wait in the pages as long as they are cached there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from windlass.engine.cache.persist.block_file import Bytes, DamagedBlockError
from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.directory import BlockDirectory, minute
from windlass.engine.cache.persist.host_source import HostSource
from windlass.engine.cache.persist.keys import BlockKey
from windlass.engine.cache.persist.known import TierIndex
from windlass.engine.cache.persist.pages import BlockTransfer
from windlass.engine.cache.persist.unwritten import EVICTED, QueuedBlock, WriteQueue

_logger = logging.getLogger("windlass.engine")

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
