"""Named keys are read again on SIGHUP. Knows the file, the signal and whom to tell."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.server.exchange.callers import Callers
from windlass.server.options.key_file import ApiKey, read_key_file

_logger = logging.getLogger("windlass.server")


def reread_on_signal(path: Path | None, plain: tuple[str, ...], callers: Callers) -> None:
    """From now on, in the running event loop. path: None for no file, and nothing done. plain: keys without names, which stay
    valid beside those of the file."""
    if path is None:
        return
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, partial(_reread, path, plain, callers))


def _reread(path: Path, plain: tuple[str, ...], callers: Callers) -> None:
    try:
        named = read_key_file(path)
    except LoadError as error:
        _logger.error("%s; the callers stay as they were", error)
        return
    callers.replace((*map(ApiKey.plain, plain), *named))
    _logger.warning("--api-keys %s was read again: %d callers", path, len(named))
