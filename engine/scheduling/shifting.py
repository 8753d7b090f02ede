"""What one request may hold of its context, and which blocks it gives up when that is full.

Under `shift` a sequence holds a window of slots. When they are taken, the oldest block behind the kept ones goes, so that the
next token has room; the kept tokens then stand next to those that are left, as if what was dropped had never been between
them. Which tokens are held when a token is computed follows from its index alone, so a sequence that lost its blocks comes to
the same keys again by computing from its first token. Under an attention window the blocks go that no token to come sees, once a
step, and every token stays where it stands.

Responsible for these rules; blocks are the block manager's.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass

from windlass.engine.api.context import ContextReport, ContextRule
from windlass.engine.api.context_size import ContextSize, ContextSizes
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.handle import CacheHandle


@dataclass(frozen=True, slots=True)
class HeldContext(ContextSize):
    """A request's rule in slots and whole blocks, and what follows from it for what a sequence holds."""

    def room(self, handle: CacheHandle) -> int:
        """Tokens that may be computed before blocks have to go: those of one block where they have to go first."""
        if self.window is None:
            return sys.maxsize
        return self.window - handle.num_slots or self.block_size

    def make_room(self, blocks: BlockManager, handle: CacheHandle) -> int:
        """Give up what the next token does not need or leaves no room for; returns the tokens dropped."""
        before, kept = handle.layout.num_dropped, self.kept_blocks
        if self.has_unseen(handle):
            blocks.cut_out(handle, self.staying_blocks, self._first_seen(handle), closing=False)
        elif handle.num_slots == self.window:
            blocks.cut_out(handle, kept, kept + 1, closing=True)
        return handle.layout.num_dropped - before

    def make_room_behind(self, blocks: BlockManager, handle: CacheHandle, under_way: int) -> int:
        """The same for the token behind so many that are being computed, where they take the last of the room.

        Nothing is given up where the layout gets wider by it, or is no plain one any more: what stands for the step that is being
        computed has to stand for the next. Nor where the tokens under way are a block or more: see `CacheHandle.cut_out`.
        """
        first, size, layout = self.kept_blocks, self.block_size, handle.layout
        if handle.num_slots + under_way != self.window or under_way >= size or layout.is_plain:
            return 0
        if not layout.without(first * size, (first + 1) * size, closing=True).is_no_wider_than(layout):
            return 0
        blocks.cut_out(handle, first, first + 1, closing=True)
        return handle.layout.num_dropped - layout.num_dropped

    def has_unseen(self, handle: CacheHandle) -> bool:
        """Whether there are blocks that an attention window lets it give up."""
        return self.seen is not None and self._first_seen(handle) > self.staying_blocks

    def _first_seen(self, handle: CacheHandle) -> int:
        """The multiple of `cut_blocks` before which the next token sees no block under an attention window, kept ones aside."""
        assert self.seen is not None
        cut = self.cut_blocks * self.block_size
        return handle.layout.first_seen(handle.num_slots, self.seen) // cut * self.cut_blocks

    def report_of(self, handle: CacheHandle, dropped_ahead: int = 0) -> ContextReport | None:
        """What became of a sample's context; None where nothing ever becomes of it. dropped_ahead: tokens that were dropped last,
        for a token that never came."""
        reused = handle.num_reused_tokens, handle.num_reused_passages
        kept = self.kept_blocks * self.block_size
        if self.window is not None:
            dropped, shifts = handle.layout.num_dropped - dropped_ahead, handle.num_shifts - bool(dropped_ahead)
            return ContextReport(self.window, kept, dropped, shifts, *reused)
        if self.seen is not None:
            return ContextReport(self.seen, kept, 0, 0, *reused)
        return ContextReport(None, 0, 0, 0, *reused) if any(reused) else None


@dataclass(frozen=True, slots=True)
class ContextLimits(ContextSizes):
    """What sequences of one server may hold."""

    def held(self, rule: ContextRule) -> HeldContext:
        """The rule of a request. Raises RequestError for one that cannot be."""
        return HeldContext(*astuple(self.size(rule)))
