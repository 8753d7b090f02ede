"""Plans how the cached keys of a sequence are re-rotated from one set of frequencies to another.

Responsible for where originals are kept and where re-rotated keys go; the angles are the runner's business. A key as it
was computed is never changed: the first re-rotation leaves it where it stands and puts the new one into a block of its
own, and every later one starts from the original again. So a sequence with re-rotated keys holds its blocks twice, and
other holders of its blocks, the prefix cache included, notice nothing.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.changes import KeyRerotation
from windlass.engine.cache.handle import SequenceCache
from windlass.engine.cache.tables import OriginalKeys
from windlass.engine.rotary.scaling import RotarySpec

Specs = tuple[RotarySpec, ...]


def blocks_to_rerotate(blocks: BlockManager, handle: SequenceCache, specs: Specs) -> list[int]:
    """Per KV group the blocks that `rerotate` takes."""
    needs = [0] * len(blocks.pools)
    for group in _changing_groups(blocks, handle, specs):
        originals = handle.originals[group] if handle.originals else OriginalKeys()
        for _, block, full in _new_blocks(handle, group, originals, blocks.block_size):
            if block >= 0:
                needs[group] += 1 if full or blocks.pools[group].is_writable(block) else 2
    return needs


def rerotate(
    blocks: BlockManager, handle: SequenceCache, specs: Specs
) -> tuple[list[KeyRerotation], list[KeyRerotation]]:
    """Bring the keys that `handle` holds under `specs`: take the blocks that needs.

    Returns which originals to set aside, and then what to re-rotate. From now on nothing that is computed is shared:
    deeper keys and values still encode the old frequencies.
    """
    original_copies: list[KeyRerotation] = []
    rerotations: list[KeyRerotation] = []
    all_originals = handle.start_originals()
    size, computed, old = blocks.block_size, handle.num_slots, handle.specs
    for group in _changing_groups(blocks, handle, specs):
        pool, table, originals = blocks.pools[group], handle.tables[group], all_originals[group]
        kept, done = originals.blocks, originals.num_slots
        if done % size and kept[done // size] >= 0:
            # Tokens that joined a block after it was re-rotated: their originals join those of the block's older tokens.
            index, end = done // size, min(computed, (done // size + 1) * size)
            source, target = [table.blocks[index]], [kept[index]]
            original_copies += _rerotations(handle, group, (done, end), source, target, old, old, size)
        for index, block, full in _new_blocks(handle, group, originals, size):
            if block < 0:
                kept.append(-1)
            elif full:
                kept.append(block)
                table.replace(index, pool.take(private=True))
            else:
                # More tokens will come to this block, so its originals are what goes elsewhere.
                aside = pool.take(private=True)
                kept.append(aside)
                original_copies += _rerotations(
                    handle, group, (index * size, computed), [block], [aside], old, old, size
                )
                if not pool.is_writable(block):
                    table.replace(index, pool.take(private=True))
                    pool.release(block)
                pool.private[table.blocks[index]] = True
        originals.origins.append((computed, old))
        start = 0
        for end, origin in originals.origins:
            column = slice(start // size, -(-end // size))
            # Blocks that were re-rotated before hold their values already.
            new = end == computed
            rerotations += _rerotations(
                handle, group, (start, end), kept[column], table.blocks[column], origin, specs, size, values=new
            )
            start = end
    handle.set_rerotated_specs(specs)
    return original_copies, rerotations


def _changing_groups(blocks: BlockManager, handle: SequenceCache, specs: Specs) -> list[int]:
    """The KV groups with a layer whose frequencies change. Keys stand at unit scale, so nothing else about a spec matters."""
    changed = [old.inv_freq != new.inv_freq for old, new in zip(handle.specs, specs, strict=True)]
    return [group for group, pool in enumerate(blocks.pools) if any(changed[i] for i in pool.rotary_groups)]


def _new_blocks(
    handle: SequenceCache, group: int, originals: OriginalKeys, size: int
) -> abc.Iterator[tuple[int, int, bool]]:
    """(logical index, block, whether it is full) of the blocks with computed tokens whose originals are not kept yet."""
    computed, blocks = handle.num_slots, handle.tables[group].blocks
    for index in range(len(originals.blocks), -(-computed // size)):
        yield index, blocks[index], (index + 1) * size <= computed


def _rerotations(
    handle: SequenceCache,
    group: int,
    span: tuple[int, int],
    sources: list[int],
    targets: list[int],
    origin: Specs,
    specs: Specs,
    size: int,
    *,
    values: bool = True,
) -> abc.Iterator[KeyRerotation]:
    """Those of one span of slots, one for each run of positions. sources, targets: from the span's first block on."""
    first = span[0] // size
    for start, end, position in handle.layout.spans(*span):
        column = slice(start // size - first, -(-end // size) - first)
        yield KeyRerotation(
            group=group,
            start=start,
            end=end,
            sources=tuple(sources[column]),
            targets=tuple(targets[column]),
            first_position=position,
            from_specs=origin,
            to_specs=specs,
            values=values,
        )
