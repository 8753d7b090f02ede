"""How a server logs: lines for people or objects for programs, on standard error. Decides nothing of what is logged."""

from __future__ import annotations

import logging
import os
import sys

from windlass.engine.process_setup import JSON_FORMAT, LOG_FORMAT_VARIABLE, log_as_json
from windlass.server.exchange.request_id import RequestFields
from windlass.server.options.engine_names import in_options


class _LogLines(logging.Formatter):
    """Log lines in the words of the command, whoever wrote them."""

    def format(self, record: logging.LogRecord) -> str:
        return in_options(super().format(record))


def log_to_stderr(level: str, log_format: str) -> None:
    """Set up logging of this process, and of those that it will start. log_format: "text" or "json"."""
    if log_format == JSON_FORMAT:
        # Before any of them is started; they are started from many places, and all of them inherit it.
        os.environ[LOG_FORMAT_VARIABLE] = JSON_FORMAT
        log_as_json("server", level, words=in_options, fields=RequestFields())
        return
    os.environ.pop(LOG_FORMAT_VARIABLE, None)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
