"""Named keys are read again on SIGHUP. Knows the file, the signal and whom to tell."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.server.exchange.callers import Callers
from windlass.server.options.key_file import ApiKey, read_key_file

_logger = logging.getLogger("windlass.server")


class KeyFile:
    """path: None for no file, and nothing done. plain: keys without names, which stay valid beside those of the file.

    asked: whether the signal has come before `reread_on_signal`, since the file was read first.
    """

    def __init__(self, path: Path | None, plain: tuple[str, ...], callers: Callers, asked: Callable[[], bool]) -> None:
        self._path, self._plain, self._callers, self._asked = path, plain, callers, asked

    def reread_on_signal(self) -> None:
        """From now on, in the running event loop."""
        if self._path is None:
            return
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reread, self._path)
        if self._asked():
            self._reread(self._path)

    def _reread(self, path: Path) -> None:
        try:
            named = read_key_file(path)
        except LoadError as error:
            _logger.error("%s; the callers stay as they were", error)
            return
        self._callers.replace((*map(ApiKey.plain, self._plain), *named))
        _logger.warning("--api-keys %s was read again: %d callers", path, len(named))
