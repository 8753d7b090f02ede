"""Entry point of the `windlass` script. Imports little before signals are handled, because the imports take a while."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command of the process's arguments, then exit."""
    # As process 1 of a container, a program without a handler is not ended by SIGTERM at all.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        from windlass.engine.process_setup import gc_paused_imports

        with gc_paused_imports():
            from windlass.server.cli.main import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(130)
