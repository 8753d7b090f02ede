"""The books of the cache as a picture of bounded size. Reads them and changes nothing."""

from __future__ import annotations

from collections import abc

import numpy as np

from windlass.engine.api.looks import MAX_CACHE_CELLS, CacheGroupSnapshot
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.handle import SequenceCache
from windlass.engine.cache.pool import BlockPool

_MIN_BLOCKS_SHOWN = 256  # blocks: a small picture would jump with every prompt


def snapshot_cache(manager: BlockManager, sequences: abc.Sequence[SequenceCache]) -> tuple[CacheGroupSnapshot, ...]:
    """A picture of each KV group; `owners` are indices into `sequences`."""
    return tuple(_inspect_group(pool, group, sequences) for group, pool in enumerate(manager.pools))


def _inspect_group(pool: BlockPool, group: int, sequences: abc.Sequence[SequenceCache]) -> CacheGroupSnapshot:
    counts = np.array(pool.ref_counts)
    known = np.zeros(pool.num_blocks, bool)
    known[list(pool.cached.values())] = True
    touched = np.flatnonzero((counts > 0) | known)
    last = int(touched[-1]) + 1 if touched.size else 0
    shown = min(pool.num_blocks, max(_MIN_BLOCKS_SHOWN, 1 << (last - 1).bit_length() if last else 0))
    per_cell = -(-shown // MAX_CACHE_CELLS)
    cells = -(-shown // per_cell)

    def count(blocks: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, ...]:
        padded = np.zeros(cells * per_cell, np.int64)
        padded[:shown] = blocks[:shown]
        return tuple(padded.reshape(cells, per_cell).sum(axis=1).tolist())

    owners = np.full(cells, -1)
    for index in range(len(sequences) - 1, -1, -1):
        blocks = np.array(_blocks_of(sequences[index], group), np.int64)
        owners[blocks[blocks >= 0] // per_cell] = index
    return CacheGroupSnapshot(
        num_blocks=pool.num_blocks,
        num_shown=shown,
        blocks_per_cell=per_cell,
        window=None if pool.holds_states else pool.window,
        held=count(counts == 1),
        shared=count(counts > 1),
        idle=count((counts == 0) & known),
        owners=tuple(owners.tolist()),
        states=pool.holds_states,
    )


def _blocks_of(handle: SequenceCache, group: int) -> list[int]:
    """All that it holds in a group; -1 for what it has left behind."""
    blocks = [block for passage in handle.passages for block in passage.blocks[group]]
    for part in (handle, handle.second_keys):
        if part is not None and part.tables:
            blocks += part.tables[group].blocks
            blocks += part.originals[group].blocks if part.originals else []
    return blocks
