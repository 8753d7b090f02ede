"""The store of cached blocks that outlive an engine, for the model and the options at hand; refused where it cannot be.

Responsible for what the blocks' names cover beside the tokens: whatever changes a key or a value by one bit, or where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from windlass._version import __version__
from windlass.engine.api.config import PERSIST_SIZE, EngineConfig
from windlass.engine.cache.persist.folder import check_keeping
from windlass.engine.cache.persist.pages import PersistedPages
from windlass.engine.cache.persist.store import BlockOrigin, BlockStore
from windlass.engine.cache.storage import KVStorage
from windlass.engine.model.loading.checkpoint import weight_files, weights_digest
from windlass.engine.model.loading.loader import LoadedModel

_FORMAT = 1  # raise it when the meaning of a kept block changes


@dataclass(frozen=True, slots=True)
class PageOwner:
    """A model, where its files are, and its pages."""

    directory: str
    model: LoadedModel
    storage: KVStorage


def open_store(config: EngineConfig, owners: Sequence[PageOwner]) -> BlockStore | None:
    """None where none is asked for. owners: the model and, if there is one, its draft model.

    The folder is there: see `check_folder`. Raises LoadError that says what to change.
    """
    if config.cache.persist is None:
        return None
    decoder, pages = owners[0].model.decoder, PersistedPages([owner.storage for owner in owners])
    token_bytes = sum(pages.block_bytes) // config.cache.block_size
    check_keeping(config, str(decoder.device), token_bytes, sees_whole_texts=decoder.spec.sees_whole_texts)
    size = config.cache.persist_size or PERSIST_SIZE
    return BlockStore(Path(config.cache.persist), size, _origin(config, owners), pages, config.cache.block_size)


def _origin(config: EngineConfig, owners: Sequence[PageOwner]) -> BlockOrigin:
    said: list[object] = [_FORMAT, __version__, torch.__version__, config.cache.block_size]
    files: list[Path] = []
    read: list[tuple[Path, bytes]] = []
    for owner in owners:
        directory, model, decoder = Path(owner.directory), owner.model, owner.model.decoder
        # Scalings are each chain's own, and threads and cores change no more than how steps are cut does.
        spec = replace(decoder.spec, rotary_groups=(), notices=())
        compute = replace(config.compute, cores=None, threads=None)
        plan = sorted((name, [(part.rows, part.storage) for part in parts]) for name, parts in decoder.plan.items())
        said += [spec, compute, plan, decoder.dtype, decoder.weight_dtype, model.cache_dtype, model.quantization]
        said.append(decoder.backend.explain())
        if config.loading.format == "dummy":
            said.append(model.digest)
        else:
            files += weight_files(directory)
            read.append((directory, model.digest))

    def is_current() -> bool:
        return all(weights_digest(directory) == digest for directory, digest in read)

    return BlockOrigin(tuple(files), repr(said), is_current)
