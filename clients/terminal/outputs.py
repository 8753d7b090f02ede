"""Output files of a command: checked before the work starts, and written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from windlass.clients.terminal.errors import CommandError


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path] | None = None) -> None:
    """Raise CommandError for a file that cannot be written, and for two options that name the same file.

    outputs: the file of each option, None if it was not given. inputs: files that are read, which no output may replace.
    """
    taken = {path.resolve(): option for option, path in (inputs or {}).items()}
    for option, path in outputs.items():
        if path is None:
            continue
        target = path.resolve()
        if target.is_dir():
            raise CommandError(f"cannot write {option} {path}: it is a directory, give the name of a file")
        if not target.parent.is_dir():
            raise CommandError(f"cannot write {option} {path}: {target.parent} is no directory")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise CommandError(f"cannot write {option} {path}: no permission")
        if target in taken:
            raise CommandError(f"{taken[target]} and {option} are both {path}: give each a file of its own")
        taken[target] = option


def write_output(path: Path, text: str) -> None:
    """Write a file. Raises CommandError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None
