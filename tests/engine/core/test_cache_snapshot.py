"""Cache occupancy report against a count of every block."""

from __future__ import annotations

import pytest

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.prefix_cache import HashChain
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.core.introspection import snapshot_cache
from windlass.engine.interface.introspection import MAX_CACHE_CELLS

SIZE = 4


def new_handle(manager: BlockManager) -> SequenceCache:
    return SequenceCache(HashChain(b"root", SIZE), ())


def fill(manager: BlockManager, handle: SequenceCache, tokens: list[int]) -> None:
    """Compute all of these tokens; the handle may hold some already."""
    if not handle.tables:
        manager.attach(handle, 0)
    assert manager.capacity(handle, len(tokens) - handle.num_slots) == len(tokens) - handle.num_slots
    manager.allocate(handle, len(tokens) - handle.num_slots)
    handle.chain.extend(tokens, len(tokens))
    manager.mark_computed(handle, tokens, len(tokens))


@pytest.mark.parametrize("num_blocks", [40, 300, 5000])
def test_every_block_is_counted_once(num_blocks: int) -> None:
    manager = BlockManager([KVGroupLayout(num_blocks, None, (0,))], SIZE)
    first, second, gone = (new_handle(manager) for _ in range(3))
    shared = list(range(3 * SIZE))
    fill(manager, gone, [*range(100, 100 + 5 * SIZE)])
    fill(manager, first, [*shared, 50, 51])
    found, _ = manager.match(second, [*shared, 60, 61, 62], len(shared) + 3)
    manager.attach(second, found)
    fill(manager, second, [*shared, *range(60, 60 + (num_blocks - 12) * SIZE)])
    manager.free(gone)
    (drawn,) = snapshot_cache(manager, [first, second])
    pool = manager.pools[0]
    per = drawn.blocks_per_cell
    assert len(drawn.held) <= MAX_CACHE_CELLS and (drawn.num_blocks, drawn.window) == (num_blocks, None)
    assert len(drawn.held) * per >= drawn.num_shown > 0
    assert all(
        pool.ref_counts[block] == 0 and pool.digests[block] is None for block in range(drawn.num_shown, num_blocks)
    )
    for cell, counts in enumerate(zip(drawn.held, drawn.shared, drawn.idle, strict=True)):
        blocks = range(cell * per, min((cell + 1) * per, num_blocks))
        refs = [pool.ref_counts[block] for block in blocks]
        idle = sum(pool.ref_counts[block] == 0 and pool.digests[block] is not None for block in blocks)
        assert counts == (refs.count(1), sum(count > 1 for count in refs), idle)
        holders = [i for i, handle in enumerate((first, second)) if set(handle.tables[0].blocks) & set(blocks)]
        assert drawn.owners[cell] == (holders[0] if holders else -1)
    assert sum(drawn.shared) == 3 and sum(drawn.idle) == 5


def test_an_empty_cache_and_one_that_is_not_listed() -> None:
    manager = BlockManager([KVGroupLayout(1000, 8, (0,))], SIZE)
    (drawn,) = snapshot_cache(manager, [])
    assert (drawn.num_shown, drawn.window) == (256, 8) and sum(drawn.held + drawn.shared + drawn.idle) == 0
    handle = new_handle(manager)
    fill(manager, handle, list(range(SIZE)))
    (drawn,) = snapshot_cache(manager, [])
    assert sum(drawn.held) == 1 and set(drawn.owners) == {-1}
