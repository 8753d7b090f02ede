"""What every report of `windlass rope` needs: how a model is called there, and how a file is written."""

from __future__ import annotations

from pathlib import Path

from windlass.engine.errors import LoadError


def display_name(directory: Path, given: str | None) -> str:
    """A hub id as it was given; of a directory or a file its name alone."""
    if given is None or Path(given).expanduser().is_dir():
        return directory.name
    return Path(given).name if Path(given).expanduser().is_file() else given


def write_text(path: Path, text: str) -> None:
    """Raises LoadError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from None
