"""Subcommands of a benchmark script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def run_subcommand(description: str | None, commands: dict[str, Callable[[], None]]) -> None:
    """Call the command that the first argument names. It parses the remaining arguments itself."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    chosen = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"{sys.argv[0]} {chosen}", *sys.argv[2:]]
    commands[chosen]()
