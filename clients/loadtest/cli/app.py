"""Puts the commands together. Imports nothing that takes time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from typer_injector import InjectingTyper

from windlass.clients._version import __version__
from windlass.clients.loadtest.cli.results import SidesCommand, compare, report
from windlass.clients.loadtest.cli.serve import bench_serve
from windlass.clients.terminal.run import run_app
from windlass.clients.terminal.version import version_option

_PROGRAM = "windlass-bench"


def add_commands(app: InjectingTyper) -> None:
    """Give an app the commands serve, report and compare."""
    app.command("serve")(bench_serve)
    app.command("report")(report)
    app.command("compare", cls=SidesCommand)(compare)


app = InjectingTyper(
    name=_PROGRAM,
    help="Load tests of servers that speak OpenAI's API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_commands(app)


@app.callback()
def program(version: Annotated[bool, version_option(f"{_PROGRAM} {__version__}")] = False) -> None:
    """The options before a command."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; errors are one line on standard error."""
    return run_app(app, _PROGRAM, arguments)


def main() -> None:
    """Run the command of the process's arguments, and end it."""
    sys.exit(run())


if __name__ == "__main__":
    main()
