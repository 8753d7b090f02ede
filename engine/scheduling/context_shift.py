"""Context shift and attention windows: what a sequence holds of its context, and which blocks it drops when that is full.

Under `shift` a sequence holds a window of slots. When they are full, the oldest block behind the pinned ones is dropped, and the
remaining tokens become adjacent, as if the dropped ones had never existed. Which tokens are held when a token is computed follows
from its index alone, so a preempted sequence recomputes the same keys. Under an attention window, blocks that no later token sees
are dropped once a step, and positions do not change.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextReport, ContextRule, ContextSize, ContextSizes


@dataclass(frozen=True, slots=True)
class SequenceContextLimits(ContextSize):
    """A request's rule in slots and whole blocks, and what follows from it for what a sequence holds."""

    def num_free_slots(self, handle: SequenceCache) -> int:
        """Tokens that may be computed before blocks have to go: those of one block where they have to go first."""
        if self.window is None:
            return sys.maxsize
        return self.window - handle.num_slots or self.block_size

    def drop_blocks(self, blocks: BlockManager, handle: SequenceCache) -> int:
        """Give up what the next token does not need or leaves no room for; returns the tokens dropped."""
        cut = self._blocks_to_drop(handle, handle.num_slots)
        return 0 if cut is None else self._drop(blocks, handle, *cut)

    def drop_blocks_early(self, blocks: BlockManager, handle: SequenceCache, num_inflight_tokens: int) -> int | None:
        """The same for the token behind so many that are being computed; None where that has to wait for them.

        What stands for the step that is being computed has to stand for the next. So nothing is given up where the layout gets
        wider by it, or is no plain one any more. Nor where a block goes that is not full yet, or the tokens under way are a block
        or more: see `SequenceCache.remove_range`.
        """
        cut = self._blocks_to_drop(handle, handle.num_slots + num_inflight_tokens)
        if cut is None:
            return 0
        size, layout = self.block_size, handle.layout
        first, end = cut
        if layout.is_plain or num_inflight_tokens >= size or end * size > handle.num_slots:
            return None
        if not layout.with_range_removed(
            first * size, end * size, close_gap=self.attention_window is None
        ).is_no_wider_than(layout):
            return None
        return self._drop(blocks, handle, first, end, num_inflight_tokens)

    def _blocks_to_drop(self, handle: SequenceCache, slot: int) -> tuple[int, int] | None:
        """The first block to give up before the token of this slot, and the one behind the last; None where none has to go."""
        if self.attention_window is None:
            return (self.retained_blocks, self.retained_blocks + 1) if slot == self.window else None
        cut = self.cut_blocks * self.block_size
        end = handle.layout.first_visible_slot(slot, self.attention_window) // cut * self.cut_blocks
        return (self.aligned_retained_blocks, end) if end > self.aligned_retained_blocks else None

    def _drop(
        self, blocks: BlockManager, handle: SequenceCache, first: int, end: int, num_inflight_tokens: int = 0
    ) -> int:
        """Give up blocks first .. end - 1; returns the tokens dropped."""
        before = handle.layout.num_dropped
        blocks.remove_range(
            handle, first, end, close_gap=self.attention_window is None, num_inflight_tokens=num_inflight_tokens
        )
        return handle.layout.num_dropped - before

    def context_report(self, handle: SequenceCache, dropped_early: int = 0) -> ContextReport | None:
        """What became of a sample's context; None where nothing ever becomes of it. dropped_early: tokens that were dropped last,
        for a token that never came."""
        reused = handle.num_reused_tokens, handle.num_reused_passages
        kept = self.retained_blocks * self.block_size
        if self.window is not None:
            dropped, shifts = handle.layout.num_dropped - dropped_early, handle.num_shifts - bool(dropped_early)
            return ContextReport(self.window, kept, dropped, shifts, *reused)
        if self.attention_window is not None:
            return ContextReport(self.attention_window, kept, 0, 0, *reused)
        return ContextReport(None, 0, 0, 0, *reused) if any(reused) else None


@dataclass(frozen=True, slots=True)
class ContextLimits(ContextSizes):
    """What sequences of one server may hold."""

    def context_limits(self, rule: ContextRule) -> SequenceContextLimits:
        """The rule of a request. Raises RequestError for one that cannot be."""
        return SequenceContextLimits(*astuple(self.size(rule)))
