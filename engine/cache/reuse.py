"""Takes cached passages up into sequences whose prompts hold the same tokens somewhere else.

The blocks are held from the day they are found, and shared as they are: no byte of them changes, whoever else reads them.
What stands between passages is computed; so are the heads of passages, as far as a request asks for it. Responsible for which
passages a sequence takes and for when; what its tokens then see follows from the layout of its slots.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

from windlass.engine.api.context import NonPrefixReuseParams
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.handle import SequenceCache
from windlass.engine.cache.passages import Passage
from windlass.engine.cache.runs import HeldPassage, SlotLayout

MIN_PASSAGE_TOKENS = 32  # of a passage, without its head: fewer are not worth a run
MAX_RUNS = 64  # of one sequence


@dataclass(frozen=True, slots=True)
class ReuseLimits:
    """What a sequence may come to, in tokens.

    start, end: of the prompt, between which it may take passages. longest: prompt and output together. window: slots that
    it may hold, None for no bound.
    """

    start: int
    end: int
    longest: int
    window: int | None = None


def hold_passages(
    blocks: BlockManager,
    handle: SequenceCache,
    token_ids: abc.Sequence[int],
    rule: NonPrefixReuseParams,
    limits: ReuseLimits,
) -> None:
    """Find the passages that `handle`, which holds a prefix at most, will take up, and hold their blocks."""
    scope = handle.chain.scope
    if scope is None or handle.private or not rule.is_enabled:
        return
    found = blocks.passages.search(
        scope,
        token_ids,
        start=max(limits.start, handle.num_computed_tokens),
        end=limits.end,
        at_least=max(rule.at_least, MIN_PASSAGE_TOKENS),
        spans=rule.passages,
    )
    layout, held = handle.layout, list[HeldPassage]()
    for passage in found:
        taken = _skip_recomputed_head(blocks, passage, rule.recompute)
        if taken is None:
            continue
        after = layout.with_passage(taken.first + layout.slot_offset, taken, blocks.block_size)
        if len(after.runs) > MAX_RUNS or not _passages_fit(blocks, after, [*held, taken], limits):
            break
        held.append(taken)
        layout = after
    for taken in held:
        for pool, own in zip(blocks.pools, taken.blocks, strict=True):
            for block in own:
                pool.share(block)
    handle.hold_passages(held)


def attach_passage(blocks: BlockManager, handle: SequenceCache, token_ids: abc.Sequence[int]) -> list[HeldPassage]:
    """The passages, if any, that begin with the next token to compute, now taken up."""
    taken = []
    while handle.passages and handle.passages[0].first == handle.num_computed_tokens:
        blocks.commit(handle, token_ids)
        taken.append(handle.attach_passage(token_ids))
    return taken


def _skip_recomputed_head(blocks: BlockManager, passage: Passage, recompute: float) -> HeldPassage | None:
    """The passage behind the tokens that are computed anew; None if too few are left."""
    length = passage.end - passage.start
    # A share that comes to a whole number of tokens means that number, whatever its product in floating point.
    head = math.ceil((recompute if recompute >= 1 else recompute * length) - 1e-6)
    if length - head < MIN_PASSAGE_TOKENS:
        return None
    skipped, offset = divmod(passage.offset + head, blocks.block_size)
    digests = passage.digests[skipped:]
    own = tuple(tuple(pool.cached[digest] for digest in digests) for pool in blocks.pools)
    return HeldPassage(passage.start + head, passage.end, head, own, digests, offset, passage.position + head)


def _passages_fit(blocks: BlockManager, layout: SlotLayout, held: list[HeldPassage], limits: ReuseLimits) -> bool:
    """Whether a sequence of this layout, alone in the cache, has room up to its longest."""
    slots, size = limits.longest + layout.slot_offset, blocks.block_size
    if limits.window is not None:
        if limits.end + 1 + layout.slot_offset > limits.window:
            return False
        slots = min(slots, limits.window)
    for group, pool in enumerate(blocks.pools):
        need = -(-slots // size)
        if pool.window is not None:
            # Passages are held whole until they are taken up, and each may leave two blocks of a window half empty.
            in_sight = (pool.window + size - 2) // size + 2 + 2 * len(held)
            need = min(need, in_sight + sum(len(passage.blocks[group]) for passage in held))
        if need > pool.num_blocks:
            return False
    return True
