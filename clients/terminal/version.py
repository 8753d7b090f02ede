"""The option every program has: --version. Knows no other."""

from __future__ import annotations

from typing import Any

import typer


def version_option(line: str) -> Any:
    """The option --version, short -V: prints the line and ends the program."""

    def tell(asked: bool) -> None:
        if asked:
            print(line)
            raise typer.Exit

    return typer.Option("--version", "-V", is_eager=True, callback=tell, help="Print the version.")
