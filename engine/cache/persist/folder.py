"""Whether blocks can be kept: the folder, made if it is not there, and what cannot go with it. Imports no torch."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from windlass.engine.api.config import PERSIST_SIZE, EngineConfig
from windlass.engine.cache.memory import gib
from windlass.engine.errors import LoadError

_FEWEST_BLOCKS = 64  # of all KV groups, that the cap has to have room for
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_folder(config: EngineConfig) -> None:
    """Make the folder that is asked for, if any is. Raises LoadError where no model at all could be served so."""
    if config.cache.persist is None:
        return
    if not config.cache.prefix_caching:
        raise LoadError(
            "`cache.persist` keeps what prompts share, and they share nothing without `cache.prefix_caching`"
        )
    prepare_folder(config.cache.persist)


def check_keeping(config: EngineConfig, device: str, token_bytes: int, *, sees_whole_texts: bool) -> None:
    """Raises LoadError where blocks of this model cannot be kept as asked for. token_bytes: of a token in the cache."""
    if config.cache.persist is None:
        return
    if device.partition(":")[0] != "cpu":
        raise LoadError(
            f"`cache.persist` keeps blocks of main memory, and this model's are on {device}: leave it out, or use "
            "`compute.device=cpu`"
        )
    if sees_whole_texts:
        raise LoadError(
            "`cache.persist` keeps what texts share, and a token of this model sees those behind it: leave it out"
        )
    size = config.cache.persist_size or PERSIST_SIZE
    fewest = _FEWEST_BLOCKS * config.cache.block_size * token_bytes
    if size < fewest:
        raise LoadError(
            f"`cache.persist_size` is {gib(size)}, and {_FEWEST_BLOCKS} blocks of this model take {gib(fewest)}: raise it"
        )


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
