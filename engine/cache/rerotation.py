"""Key re-rotation: plans how the cached keys of a sequence are rotated to other frequencies.

Computed keys are never modified. The first re-rotation leaves them in place and writes rotated keys to new blocks; later
ones start from the originals again. So a sequence with re-rotated keys holds its blocks twice, and other holders and the
prefix cache are unaffected. The model runner computes the angles.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import KeyRerotation
from windlass.engine.cache.sequence_cache import OriginalKeys, SequenceCache
from windlass.engine.rotary.rope_scaling import RotarySpec

Specs = tuple[RotarySpec, ...]


def blocks_to_rerotate(blocks: BlockManager, cache: SequenceCache, specs: Specs) -> list[int]:
    """Per KV group the blocks that `rerotate` takes."""
    needs = [0] * len(blocks.pools)
    for group in _changing_groups(blocks, cache, specs):
        originals = cache.originals[group] if cache.originals else OriginalKeys()
        for _, block, full in _new_blocks(cache, group, originals, blocks.block_size):
            if block >= 0:
                needs[group] += 1 if full or blocks.pools[group].is_writable(block) else 2
    return needs


def rerotate(
    blocks: BlockManager, cache: SequenceCache, specs: Specs
) -> tuple[list[KeyRerotation], list[KeyRerotation]]:
    """Plan the rotation of all keys of `cache` to `specs`, and take the blocks for it.

    Returns the original keys to copy first, then the rotations. From now on the sequence shares nothing that it
    computes: deeper keys and values still encode the old frequencies.
    """
    original_copies: list[KeyRerotation] = []
    rerotations: list[KeyRerotation] = []
    cache.originals = cache.originals or [OriginalKeys() for _ in cache.tables]
    size, computed, old = blocks.block_size, cache.num_slots, cache.specs

    def copy_original(group: int, start: int, end: int, source: int, target: int) -> None:
        whole = KeyRerotation(group, start, end, (source,), (target,), 0, old, old)
        original_copies.extend(_split_at_runs(cache, size, whole))

    for group in _changing_groups(blocks, cache, specs):
        pool, table, originals = blocks.pools[group], cache.tables[group], cache.originals[group]
        retained, done = originals.blocks, originals.num_slots
        if done % size and retained[done // size] >= 0:
            # Tokens added to a block after its re-rotation: their originals join those of the block's older tokens.
            index, end = done // size, min(computed, (done // size + 1) * size)
            copy_original(group, done, end, table.blocks[index], retained[index])
        for index, block, full in _new_blocks(cache, group, originals, size):
            if block < 0:
                retained.append(-1)
            elif full:
                retained.append(block)
                table.replace(index, pool.take(private=True))
            else:
                # More tokens will be written to this block, so its originals are copied to another one.
                copy = pool.take(private=True)
                retained.append(copy)
                copy_original(group, index * size, computed, block, copy)
                if not pool.is_writable(block):
                    table.replace(index, pool.take(private=True))
                    pool.release(block)
                pool.private[table.blocks[index]] = True
        originals.origins.append((computed, old))
        start = 0
        for end, origin in originals.origins:
            column = slice(start // size, -(-end // size))
            sources, targets = tuple(retained[column]), tuple(table.blocks[column])
            new = end == computed  # blocks that were re-rotated before have their values already
            whole = KeyRerotation(group, start, end, sources, targets, 0, origin, specs, values=new)
            rerotations += _split_at_runs(cache, size, whole)
            start = end
    cache.set_rerotated_specs(specs)
    return original_copies, rerotations


def _changing_groups(blocks: BlockManager, cache: SequenceCache, specs: Specs) -> list[int]:
    """The KV groups with a layer whose frequencies change. Keys are stored at unit scale, so only frequencies matter."""
    changed = [old.inv_freq != new.inv_freq for old, new in zip(cache.specs, specs, strict=True)]
    return [group for group, pool in enumerate(blocks.pools) if any(changed[i] for i in pool.rotary_groups)]


def _new_blocks(
    cache: SequenceCache, group: int, originals: OriginalKeys, size: int
) -> abc.Iterator[tuple[int, int, bool]]:
    """(logical index, block, whether it is full) of the blocks with computed tokens whose originals are not retained yet."""
    computed, blocks = cache.num_slots, cache.tables[group].blocks
    for index in range(len(originals.blocks), -(-computed // size)):
        yield index, blocks[index], (index + 1) * size <= computed


def _split_at_runs(cache: SequenceCache, size: int, rerotation: KeyRerotation) -> abc.Iterator[KeyRerotation]:
    """One rotation for each run of slots, each with its first position."""
    for start, end, position in cache.layout.spans(rerotation.start, rerotation.end):
        yield replace(rerotation.part(start, end, size), first_position=position)
