"""Reads blocks for requests that wait for them, from files and, of a device's, from the host's memory: one thread, which holds
no more than it may.

What comes first in a text is read first, so whoever stops waiting has a prefix all the same. A file that is not what it should
be is removed and counted, and what follows it in its text is not read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from windlass.engine.cache.persist.block_file import DamagedBlockError, ForeignBlockError
from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.directory import BlockDirectory, minute
from windlass.engine.cache.persist.fetch import ArrivedBlock, Fetch, WantedBlock
from windlass.engine.cache.persist.host_source import HostSource
from windlass.engine.cache.persist.known import TierIndex
from windlass.engine.cache.persist.pages import BlockTransfer

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
