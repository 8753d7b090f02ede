"""What is counted of kept blocks, and what is said where something goes wrong: once, until it goes well again."""

from __future__ import annotations

import logging

from windlass.engine.api.request import PersistStats

_logger = logging.getLogger("windlass.engine")


class PersistCounters:
    """Each number has one thread that raises it. The meaning of each is that of the field in `PersistStats`."""

    def __init__(self) -> None:
        self.written = self.written_bytes = 0
        self.read = self.read_bytes = 0
        self.damaged = self.foreign = self.failed = self.evicted = 0
        self.disk_bytes = 0
        self.host_saved = self.host_saved_bytes = self.host_read = self.host_read_bytes = 0
        self.host_lost = self.host_evicted = 0
        self._reported: set[str] = set()

    def fail(self, what: str, error: Exception) -> None:
        """Count a failure, and say it unless it was said since it last went well."""
        self.failed += 1
        if what not in self._reported:
            self._reported.add(what)
            reason = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            _logger.warning("%s (%s): the engine goes on without", what, reason)

    def succeed(self, what: str) -> bool:
        """It went well; returns whether it did not before."""
        if what not in self._reported:
            return False
        self._reported.discard(what)
        _logger.warning("%s: this is over", what)
        return True

    def stats(
        self, *, lost: int, waiting: int, known: int, tokens: int, host_blocks: int, host_bytes: int
    ) -> PersistStats:
        return PersistStats(
            written_blocks=self.written,
            written_bytes=self.written_bytes,
            read_blocks=self.read,
            read_bytes=self.read_bytes,
            restored_tokens=tokens,
            damaged_blocks=self.damaged,
            foreign_blocks=self.foreign,
            lost_blocks=lost,
            evicted_blocks=self.evicted,
            failures=self.failed,
            waiting_blocks=waiting,
            known_blocks=known,
            disk_bytes=self.disk_bytes,
            host_saved_blocks=self.host_saved,
            host_saved_bytes=self.host_saved_bytes,
            host_read_blocks=self.host_read,
            host_read_bytes=self.host_read_bytes,
            host_lost_blocks=self.host_lost,
            host_evicted_blocks=self.host_evicted,
            host_blocks=host_blocks,
            host_bytes=host_bytes,
        )
