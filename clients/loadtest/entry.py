"""Entry point of the script `windlass-bench`. Handles ctrl-C before any slow import."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the process was given, and end it."""
    try:
        from windlass.clients.loadtest.commands import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
