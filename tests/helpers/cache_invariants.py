"""Invariants of the KV cache, which tests check between steps."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_pool import BlockPool
from windlass.engine.cache.non_prefix_reuse import PassageIndex
from windlass.engine.cache.sequence_cache import SequenceCache


def assert_consistent(blocks: BlockManager, caches: Iterable[SequenceCache]) -> None:
    """Raise AssertionError unless the reference counts equal the number of holders among `caches`."""
    counts = [[0] * pool.num_blocks for pool in blocks.pools]
    check_passages(blocks.passages)
    held = [part for cache in caches for part in (cache, cache.second_keys) if part is not None]
    for cache in held:
        for group in range(len(blocks.pools)):
            for passage in cache.passages:
                for block in passage.blocks[group]:
                    counts[group][block] += 1
        for group, table in enumerate(cache.tables):
            for entries in (table.blocks, cache.originals[group].blocks if cache.originals else []):
                for i, block in enumerate(entries):
                    assert (block < 0) == (i < table.num_dropped), "only a leading part may be dropped"
                    if block >= 0:
                        counts[group][block] += 1
    for pool, count in zip(blocks.pools, counts, strict=True):
        check_pool(pool)
        assert count == pool.ref_counts, "reference counts differ from the block tables"


def assert_balanced(blocks: BlockManager) -> None:
    """Raise AssertionError unless nothing is held and no block is lost, as in an idle engine."""
    assert_consistent(blocks, ())


def check_pool(pool: BlockPool) -> None:
    """Raise AssertionError unless every block is in exactly one state and the digests agree with the map."""
    free, idle = set(pool._free), set(pool._idle)
    assert len(free) == len(pool._free), "a block is on the free list twice"
    assert not free & idle, "a block is both free and cached"
    held = {block for block, count in enumerate(pool.ref_counts) if count > 0}
    assert min(pool.ref_counts, default=0) >= 0, "a reference count is negative"
    assert not held & (free | idle), "a held block is free or idle"
    assert len(held) + len(free) + len(idle) == pool.num_blocks, "a block is lost"
    assert all(pool.digests[block] is None for block in free), "a free block has a digest"
    assert all(pool.digests[block] is not None for block in idle), "an idle block has no digest"
    known = {digest: block for block, digest in enumerate(pool.digests) if digest is not None}
    assert known == pool.cached, "digests and the map of cached blocks differ"
    assert not any(pool.private[block] for block in pool.cached.values()), "a private block is cached"


def check_passages(index: PassageIndex) -> None:
    """Raise AssertionError unless the dictionaries of all scopes agree."""
    seen: dict[bytes, set[bytes]] = {}
    for name, entries in index._scopes.items():
        assert entries.blocks, "a scope is empty"
        for digest, block in entries.blocks.items():
            assert block.digest == digest, "a block has another's digest"
            assert entries.by_content[block.content][digest] is block, "a block is not found by its content"
            assert entries.by_parent[block.parent][digest] is block, "a block is not found by its parent"
            seen.setdefault(digest, set()).add(name)
        for blocks in (entries.by_content, entries.by_parent):
            assert all(blocks.values()), "a list of blocks is empty"
            assert sum(map(len, blocks.values())) == len(entries.blocks), "a list contains a removed block"
    assert seen == {digest: set(scopes) for digest, scopes in index._scopes_of.items()}, "scopes and blocks differ"
