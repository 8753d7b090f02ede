"""Context shift and attention windows: what a sequence holds of its context, and which blocks it drops when that is full.

Under `shift` a sequence holds a window of slots. When they are full, the oldest block after the retained ones is dropped, and the
remaining tokens become adjacent, as if the dropped ones had never existed. Which tokens are held when a token is computed follows
from its index alone, so a preempted sequence recomputes the same keys. Under an attention window, blocks that no later token sees
are dropped once per step, and positions do not change.

`limits` is the rule of a request in slots and whole blocks.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextReport, ContextSize


def num_free_slots(limits: ContextSize, cache: SequenceCache) -> int:
    """Tokens that may be computed before blocks are dropped. If a drop is due first, the slots that it frees."""
    if limits.window is None:
        return sys.maxsize
    return limits.window - cache.num_slots or limits.block_size


def drop_blocks(limits: ContextSize, blocks: BlockManager, cache: SequenceCache) -> int:
    """Drop the blocks that the next token does not see, or needs dropped to find a slot. Returns the number of dropped tokens."""
    dropped = _blocks_to_drop(limits, cache, cache.num_slots)
    return 0 if dropped is None else _drop(limits, blocks, cache, *dropped)


def drop_blocks_early(
    limits: ContextSize, blocks: BlockManager, cache: SequenceCache, num_inflight_tokens: int
) -> int | None:
    """Drop blocks for the token after those in flight. Returns the number of dropped tokens.

    Returns None if the drop has to wait for the tokens in flight, because the step that computes them and the next one share
    a layout. That is the case if the layout would become wider or is still plain, if a block to drop is not full yet, or if
    a block or more is in flight (see `SequenceCache.remove_range`).
    """
    dropped = _blocks_to_drop(limits, cache, cache.num_slots + num_inflight_tokens)
    if dropped is None:
        return 0
    size, layout = limits.block_size, cache.layout
    first, end = dropped
    if layout.is_plain or num_inflight_tokens >= size or end * size > cache.num_slots:
        return None
    after = layout.with_range_removed(first * size, end * size, close_gap=limits.attention_window is None)
    return _drop(limits, blocks, cache, first, end, num_inflight_tokens) if after.is_no_wider_than(layout) else None


def context_report(limits: ContextSize, cache: SequenceCache, dropped_early: int = 0) -> ContextReport | None:
    """Report of dropped and reused tokens of a sample, or None if its rule never drops any and none were reused.

    dropped_early: tokens dropped last, for a token that was never computed.
    """
    nothing = ContextReport()
    report = limits.report(0) or nothing
    if limits.window is not None:
        dropped, shifts = cache.layout.num_dropped - dropped_early, cache.num_shifts - bool(dropped_early)
        report = replace(report, dropped_tokens=dropped, shifts=shifts)
    report = replace(report, reused_tokens=cache.num_reused_tokens, reused_passages=cache.num_reused_passages)
    return None if report == nothing else report


def _blocks_to_drop(limits: ContextSize, cache: SequenceCache, slot: int) -> tuple[int, int] | None:
    """First and end index of the blocks to drop before the token of this slot, None if there are none."""
    if limits.attention_window is None:
        return (limits.retained_blocks, limits.retained_blocks + 1) if slot == limits.window else None
    split = limits.cut_blocks * limits.block_size
    end = cache.layout.first_visible_slot(slot, limits.attention_window) // split * limits.cut_blocks
    return (limits.aligned_retained_blocks, end) if end > limits.aligned_retained_blocks else None


def _drop(
    limits: ContextSize, blocks: BlockManager, cache: SequenceCache, first: int, end: int, num_inflight_tokens: int = 0
) -> int:
    before = cache.layout.num_dropped
    close_gap = limits.attention_window is None
    blocks.remove_range(cache, first, end, close_gap=close_gap, num_inflight_tokens=num_inflight_tokens)
    return cache.layout.num_dropped - before
