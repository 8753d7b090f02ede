"""The folder that blocks are kept in: made if it is not there, refused where it cannot serve. Imports no torch."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from windlass.engine.errors import LoadError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def prepare_folder(name: str) -> Path:
    """The folder, for its owner alone where it is made here. Raises LoadError that says what is wrong with it."""
    path = Path(name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise LoadError(f"`cache.persist={name}` is a file: give a folder") from None
    except OSError as error:
        raise LoadError(
            f"`cache.persist={name}` cannot be written to ({error.strerror or error}): give a folder of this user's"
        ) from None
    if mode & _OTHERS_MAY_WRITE and os.name == "posix":
        raise LoadError(
            f"`cache.persist={name}` may be written to by other users, who could plant what is answered from it: "
            f"chmod 700 {name}, or give a new folder in it"
        )
    return path
