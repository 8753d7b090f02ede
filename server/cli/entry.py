"""Where the `windlass` script begins. Imports nothing before ctrl-C is taken for what it is: the imports take a while."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the process was given, and end it."""
    try:
        from windlass.engine.process_setup import gc_paused_imports

        with gc_paused_imports():
            from windlass.server.cli.main import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(130)
