"""Entry point of the `windlass` script. Imports nothing before ctrl-C is handled, because the imports take a while."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command of the process's arguments, then exit."""
    try:
        from windlass.engine.process_setup import gc_paused_imports

        with gc_paused_imports():
            from windlass.server.cli.main import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(130)
