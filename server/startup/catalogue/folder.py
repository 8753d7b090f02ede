"""Where models that were pulled are kept, and whether one is there or elsewhere. Writes nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from windlass.server.startup.catalogue.known import KnownModel


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """WINDLASS_CACHE, else XDG_CACHE_HOME/windlass, else ~/.cache/windlass."""
    env = os.environ if environ is None else environ
    if given := env.get("WINDLASS_CACHE"):
        return Path(os.path.expandvars(given)).expanduser().absolute()
    base = Path(os.path.expandvars(env.get("XDG_CACHE_HOME") or "~/.cache")).expanduser()
    # The XDG specification has programs ignore a relative path.
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "windlass"


def model_file(model: KnownModel) -> Path:
    """Where the file of a model is kept, there or not. The model is one that has a file."""
    assert model.file is not None
    return cache_folder() / "models" / model.name / model.file.name


def is_here(model: KnownModel) -> bool:
    """Whether a model can be served without a download: its file is there, whole by its size.

    The sum was checked before the file got its name, so a start need not read it for that again.
    """
    if model.file is None:
        return True
    try:
        return model_file(model).stat().st_size == model.file.size
    except OSError:
        return False


def is_file_of(model: KnownModel, path: Path) -> bool:
    """Whether a file is the model's, byte for byte. It is read (some tenths of a second for 100 MB) only if its size is right."""
    if model.file is None:
        return False
    try:
        if not path.is_file() or path.stat().st_size != model.file.size:
            return False
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest() == model.file.sha256
    except OSError:
        return False
