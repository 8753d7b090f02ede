"""Plans how the cached keys of a sequence turn from one set of frequencies to another.

Responsible for where originals are kept and where turned keys go; the angles are the runner's business. A key as it was
computed is never changed: the first turn leaves it where it stands and puts the turned one into a block of its own, and
every later turn starts from the original again. So a sequence that has turned holds its blocks twice, and other holders
of its blocks, the prefix cache included, notice nothing.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.rotary.policy import RotaryStage
from windlass.engine.scheduling.plan import KeyMove
from windlass.engine.scheduling.sequence import KeptKeys, Sequence


def turn_needs(blocks: BlockManager, seq: Sequence, stage: RotaryStage) -> list[int]:
    """Per KV group the blocks that `turn` takes."""
    needs = [0] * len(blocks.pools)
    for group in _turning_groups(blocks, seq, stage):
        kept = seq.kept[group] if seq.kept else KeptKeys()
        for _, block, full in _new_blocks(seq, group, kept, blocks.block_size):
            if block >= 0:
                needs[group] += 1 if full or blocks.pools[group].is_writable(block) else 2
    return needs


def turn(blocks: BlockManager, seq: Sequence, stage: RotaryStage) -> tuple[list[KeyMove], list[KeyMove]]:
    """Let `seq` enter `stage`: take the blocks that needs, and return what to put aside and what to turn, in this order.

    From now on nothing that `seq` computes is shared: deeper keys and values still encode the old frequencies.
    """
    keeps: list[KeyMove] = []
    moves: list[KeyMove] = []
    if not seq.kept:
        seq.kept = [KeptKeys() for _ in blocks.pools]
    size, computed = blocks.block_size, seq.num_computed_tokens
    for group in _turning_groups(blocks, seq, stage):
        pool, table, kept = blocks.pools[group], seq.block_tables[group], seq.kept[group]
        done = kept.num_tokens
        if done % size and kept.blocks[done // size] >= 0:
            # Tokens that joined a block after it was turned: their originals join those of the block's older tokens.
            index, end = done // size, min(computed, (done // size + 1) * size)
            keeps.append(_move(seq, group, (done, end), [table[index]], [kept.blocks[index]], seq.stage, seq.stage))
        for index, block, full in _new_blocks(seq, group, kept, size):
            if block < 0:
                kept.blocks.append(-1)
            elif full:
                kept.blocks.append(block)
                table[index] = pool.take(private=True)
            else:
                # More tokens will come to this block, so the original is the one that moves aside.
                aside = pool.take(private=True)
                kept.blocks.append(aside)
                keeps.append(_move(seq, group, (index * size, computed), [block], [aside], seq.stage, seq.stage))
                if not pool.is_writable(block):
                    table[index] = pool.take(private=True)
                    pool.release(block)
                pool.private[table[index]] = True
        kept.origins.append((computed, seq.stage.specs))
        start = 0
        for end, specs in kept.origins:
            span = slice(start // size, -(-end // size))
            sources, targets = kept.blocks[span], table[span]
            # Blocks that have turned before hold their values already.
            new = end == computed
            moves.append(KeyMove(group, start, end, sources, targets, seq.first_position, specs, stage.specs, new))
            start = end
    seq.table_version += 1
    seq.stage = stage
    seq.private = True
    seq.num_turns += 1
    return keeps, moves


def _turning_groups(blocks: BlockManager, seq: Sequence, stage: RotaryStage) -> list[int]:
    """The KV groups with a layer whose frequencies change. Keys stand at unit scale, so nothing else about a spec matters."""
    changed = [old.inv_freq != new.inv_freq for old, new in zip(seq.stage.specs, stage.specs, strict=True)]
    return [group for group, pool in enumerate(blocks.pools) if any(changed[i] for i in pool.rotary_groups)]


def _new_blocks(seq: Sequence, group: int, kept: KeptKeys, size: int) -> abc.Iterator[tuple[int, int, bool]]:
    """(logical index, block, whether it is full) of the blocks with computed tokens whose originals are not kept yet."""
    computed, table = seq.num_computed_tokens, seq.block_tables[group]
    for index in range(len(kept.blocks), -(-computed // size)):
        yield index, table[index], (index + 1) * size <= computed


def _move(
    seq: Sequence,
    group: int,
    span: tuple[int, int],
    sources: list[int],
    targets: list[int],
    origin: RotaryStage,
    stage: RotaryStage,
) -> KeyMove:
    return KeyMove(group, *span, sources, targets, seq.first_position, origin.specs, stage.specs)
