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
from windlass.engine.cache.memory import gib
from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.device_pages import DeviceBlockTransfer
from windlass.engine.cache.persist.folder import check_tier_support
from windlass.engine.cache.persist.host_rows import pinned_rows_within
from windlass.engine.cache.persist.host_source import HostSource
from windlass.engine.cache.persist.pages import CPUBlockTransfer, bytes_of_blocks, planes_of
from windlass.engine.cache.persist.store import BlockNamespace, BlockStore, PersistFolder
from windlass.engine.cache.persist.tier import HostTier
from windlass.engine.cache.storage import KVCache
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.checkpoint import weight_files, weights_digest
from windlass.engine.model.loading.loader import LoadedModel
from windlass.kernels import is_out_of_memory

_FORMAT = 2  # raise it when the meaning of a kept block changes


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """A model, where its files are, and its pages."""

    directory: str
    model: LoadedModel
    storage: KVCache


def open_block_store(config: EngineConfig, owners: Sequence[CacheOwner]) -> BlockStore | None:
    """None where nothing is kept. owners: the model and, if there is one, its draft model.

    The folder is there: see `check_tier_options`. Raises LoadError that says what to change.
    """
    cache, decoder = config.cache, owners[0].model.decoder
    if cache.persist is None and cache.host_memory is None:
        return None
    copies = decoder.backend.make_copies()
    planes = planes_of([owner.storage for owner in owners])
    sizes = bytes_of_blocks(planes)
    check_tier_support(
        config,
        sum(sizes) // cache.block_size,
        is_bidirectional=decoder.spec.is_bidirectional,
        on_device=copies is not None,
    )
    folder = None
    if cache.persist is not None:
        folder = PersistFolder(Path(cache.persist), cache.persist_size or PERSIST_SIZE, _origin(config, owners))
    counts = PersistCounters()
    if copies is None:
        return BlockStore(folder, CPUBlockTransfer(planes), cache.block_size, counts)
    tier = None
    if cache.host_memory is not None:
        tier = HostTier(pinned_rows_within(cache.host_memory, sizes), sizes, cache.block_size, counts)
    try:
        pages = DeviceBlockTransfer(planes, copies, tier)
    except (MemoryError, RuntimeError) as error:
        raise LoadError(_no_memory(config, error, on_device=is_out_of_memory(error))) from None
    host = None if tier is None else HostSource(tier, pages, counts)
    return BlockStore(folder, pages, cache.block_size, counts, host)


def _no_memory(config: EngineConfig, error: Exception, *, on_device: bool) -> str:
    if on_device and config.cache.host_memory is None:
        return "no memory is left on the device for the copies of `cache.persist`: lower `cache.memory` or `cache.device_share`"
    size = gib(config.cache.host_memory or 0)
    return (
        f"`cache.host_memory`: the system does not give {size} that a device can copy from, or the device has no room for the "
        f"copies ({str(error).splitlines()[0]}): lower it, or raise the limit of locked memory"
    )


def _origin(config: EngineConfig, owners: Sequence[CacheOwner]) -> BlockNamespace:
    identity: list[object] = [_FORMAT, __version__, torch.__version__, config.cache.block_size]
    files: list[Path] = []
    read: list[tuple[Path, bytes]] = []
    for owner in owners:
        directory, model, decoder = Path(owner.directory), owner.model, owner.model.decoder
        # Scalings are each chain's own, and threads and cores change no more than how steps are cut does.
        spec = replace(decoder.spec, rotary_groups=(), notices=())
        compute = replace(config.compute, cores=None, threads=None)
        plan = sorted((name, [(part.rows, part.storage) for part in parts]) for name, parts in decoder.plan.items())
        identity += [spec, compute, plan, decoder.dtype, decoder.weight_dtype, model.cache_dtype, model.quantization]
        identity.append(decoder.backend.explain())
        if config.loading.format == "dummy":
            identity.append(model.digest)
        else:
            files += weight_files(directory)
            read.append((directory, model.digest))

    def is_current() -> bool:
        return all(weights_digest(directory) == digest for directory, digest in read)

    return BlockNamespace(tuple(files), repr(identity), is_current)
