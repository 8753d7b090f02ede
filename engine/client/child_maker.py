"""Makes a client's engine processes, and has one at hand where one may be needed.

It imports meanwhile, which takes most of a start.
Loads nothing, watches nobody, and does not know why one is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from windlass.engine.client.child import ChildProcess, ProcessPlacement, preload_module

_logger = logging.getLogger("windlass.engine.client")


class ChildSpawner:
    """core, log_level: see `ChildProcess`. seat: tells where the next one runs. waiting: one that waits already, taken first."""

    def __init__(
        self,
        core: str,
        log_level: str,
        process_placement: Callable[[], ProcessPlacement],
        waiting: ChildProcess | None = None,
    ) -> None:
        self._core, self._log_level, self._placement = core, log_level, process_placement
        self.waiting = waiting

    def take(self) -> ChildProcess:
        """The one that waits, else a new one. Raises OSError where the system has no memory, process or descriptor for it."""
        child, self.waiting = self.waiting, None
        if child is None or child.ended:
            if child is not None:
                _discard(child)
            return ChildProcess(self._core, self._log_level, process_placement=self._placement())
        return child

    def set_standby(self, wanted: bool) -> None:
        """Have one wait, or none. Where the system has none to give, `take` will say so."""
        if not wanted:
            self.drop()
        elif self.waiting is None:
            try:
                self.waiting = ChildProcess(
                    self._core, self._log_level, preload=preload_module(self._core), process_placement=self._placement()
                )
            except OSError as error:
                _logger.warning("no process for an engine in reserve: %s", error)

    def drop(self, *, reap: bool = False) -> None:
        """End the one that waits. reap: see `ChildProcess.kill`."""
        spare, self.waiting = self.waiting, None
        if spare is not None:
            _discard(spare, reap=reap)


def _discard(child: ChildProcess, *, reap: bool = False) -> None:
    child.kill(reap=reap)
    child.socket.close()
    child.release()
