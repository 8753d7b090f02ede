"""Whether blocks can be kept: the folder, made if it is not there, room in memory, what cannot go with it. Imports no torch."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from windlass.engine.api.config import PERSIST_SIZE, EngineConfig
from windlass.engine.api.machine import available_memory
from windlass.engine.cache.memory import gib
from windlass.engine.errors import LoadError

_MIN_BLOCKS = 64  # of all KV groups, that the cap has to have room for
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_tier_options(config: EngineConfig) -> None:
    """Make the folder that is asked for, if any is. Raises LoadError where no model at all can be served so."""
    for field, asked in (("persist", config.cache.persist), ("host_memory", config.cache.host_memory)):
        if asked is not None and not config.cache.prefix_caching:
            raise LoadError(
                f"`cache.{field}` keeps what prompts share, and they share nothing without `cache.prefix_caching`"
            )
    free, size = available_memory(), config.cache.host_memory
    if size is not None and free is not None and size > free:
        raise LoadError(f"`cache.host_memory` is {gib(size)}, and {gib(free)} of main memory are free: lower it")
    if config.cache.persist is not None:
        prepare_folder(config.cache.persist)


def check_tier_support(config: EngineConfig, token_bytes: int, *, is_bidirectional: bool, on_device: bool) -> None:
    """Raises LoadError where blocks of this model cannot be kept as asked for. token_bytes: of a token in the cache. on_device:
    whether the cache lies in a memory of its own."""
    cache = config.cache
    if cache.host_memory is not None and not on_device:
        raise LoadError(
            "`cache.host_memory` takes what a GPU's cache evicts, and this cache lies in main memory already: leave it out and "
            "raise `cache.memory`"
        )
    for field, size in (
        ("persist", None if cache.persist is None else cache.persist_size or PERSIST_SIZE),
        ("host_memory", cache.host_memory),
    ):
        if size is None:
            continue
        if is_bidirectional:
            raise LoadError(
                f"`cache.{field}` keeps what texts share, and a token of this model sees those behind it: leave it out"
            )
        fewest = _MIN_BLOCKS * cache.block_size * token_bytes
        if size < fewest:
            name = "persist_size" if field == "persist" else field
            raise LoadError(
                f"`cache.{name}` is {gib(size)}, and {_MIN_BLOCKS} blocks of this model take {gib(fewest)}: raise it"
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
