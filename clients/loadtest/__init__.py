"""Load tests of OpenAI-compatible servers: schedules, workloads, measurement and reports."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the script `windlass-bench`. Handles ctrl-C during the slow imports, too."""
    try:
        from windlass.clients.loadtest.commands import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
