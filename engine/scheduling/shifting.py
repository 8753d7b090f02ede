"""What one request may hold of its context, and which blocks it gives up when that is full.

Under `shift` a sequence holds a window of slots. When they are taken, the oldest block behind the kept ones goes, so that the
next token has room; the kept tokens then stand next to those that are left, as if what was dropped had never been between
them. Under an attention window the blocks go that no token to come sees, and every token stays where it stands. Which
tokens are held when a token is computed follows from its index alone, so a sequence that lost its blocks comes to the same
keys again by computing from its first token.

Responsible for these rules; blocks are the block manager's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from windlass.engine.api.context import ContextReport, ContextRule
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.handle import CacheHandle
from windlass.engine.cache.runs import OPEN_END
from windlass.engine.errors import RequestError

_FEWEST_FREE_BLOCKS = 2  # behind the kept ones, so that a token always sees what came right before it


@dataclass(frozen=True, slots=True)
class HeldContext:
    """A request's rule in slots and whole blocks.

    longest: tokens at which the sequence ends. window: slots it holds at most under `shift`, None where none are dropped.
    kept_blocks: leading blocks that stay. seen: keys that a token sees under an attention window, None for all.
    """

    longest: int
    block_size: int
    window: int | None = None
    kept_blocks: int = 0
    seen: int | None = None

    @property
    def rotary_length(self) -> int:
        """Tokens that stand in sight of each other at most: what frequencies that depend on a length go by."""
        if self.seen is not None:
            return min(self.longest, self.kept_blocks * self.block_size + self.seen)
        return self.longest if self.window is None else min(self.longest, self.window)

    @property
    def floor(self) -> int:
        """Slots that dropping never brings a sequence below."""
        return OPEN_END if self.window is None else self.window - self.block_size

    def most_slots(self, chunk: int) -> int:
        """Slots taken at once by a sequence that computes up to `chunk` tokens in a step."""
        if self.seen is not None:
            return min(self.longest, (self.kept_blocks + 1) * self.block_size + self.seen + chunk)
        return self.longest if self.window is None else min(self.longest, self.window)

    def room(self, handle: CacheHandle) -> int:
        """Tokens that may be computed before blocks have to go: those of one block where they have to go first."""
        if self.window is None:
            return sys.maxsize
        return self.window - handle.num_slots or self.block_size

    def make_room(self, blocks: BlockManager, handle: CacheHandle) -> int:
        """Give up what the next token does not need or leaves no room for; returns the tokens dropped."""
        before, kept = handle.layout.num_dropped, self.kept_blocks
        if self.seen is not None:
            first = handle.layout.first_seen(handle.num_slots, self.seen) // self.block_size
            if first > kept:
                blocks.cut_out(handle, kept, first, closing=False)
        elif handle.num_slots == self.window:
            blocks.cut_out(handle, kept, kept + 1, closing=True)
        return handle.layout.num_dropped - before

    def report(self, handle: CacheHandle) -> ContextReport | None:
        """What became of a sample's context; None where nothing ever becomes of it."""
        reused = handle.num_reused_tokens, handle.num_reused_passages
        if self.window is None and self.seen is None:
            return ContextReport(None, 0, 0, 0, *reused) if any(reused) else None
        held = self.seen if self.seen is not None else self.window
        kept = self.kept_blocks * self.block_size
        return ContextReport(held, kept, handle.layout.num_dropped, handle.num_shifts, *reused)


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """What sequences of one server may hold, in tokens.

    max_model_len: of a sequence that drops nothing. shift_context: of one that drops its oldest tokens, which goes on up to
    max_total_tokens (None: for ever). shift_refusal: why none of this model may.
    """

    max_model_len: int
    block_size: int
    shift_context: int
    max_total_tokens: int | None = None
    shift_refusal: str | None = None

    def held(self, rule: ContextRule) -> HeldContext:
        """The rule of a request in slots and blocks. Raises RequestError for one that cannot be."""
        size, endless = self.block_size, rule.overflow == "shift"
        if (endless or rule.attention_window is not None) and self.shift_refusal is not None:
            param = "context_overflow" if endless else "attention_window"
            raise RequestError(f"{param}: {self.shift_refusal}", param, "unsupported_value")
        longest = self.max_model_len
        if endless:
            longest = sys.maxsize if self.max_total_tokens is None else self.max_total_tokens
        if rule.attention_window is not None:
            if rule.attention_window < 1 or rule.attention_sinks < 0:
                raise RequestError(
                    "attention_window must be at least 1, attention_sinks at least 0", "attention_window"
                )
            most = self.max_model_len - size * _FEWEST_FREE_BLOCKS
            if rule.attention_window + rule.attention_sinks > most:
                raise RequestError(
                    f"attention_window and attention_sinks come to {rule.attention_window + rule.attention_sinks} tokens, "
                    f"with a context of {self.max_model_len} they may come to {max(0, most)}",
                    "attention_window",
                    "invalid_value",
                )
            return HeldContext(longest, size, None, -(-rule.attention_sinks // size), rule.attention_window)
        if not endless:
            return HeldContext(longest, size)
        window = self.shift_context // size * size
        most = window - size * _FEWEST_FREE_BLOCKS
        if rule.keep_tokens < 0 or -(-rule.keep_tokens // size) * size > most:
            raise RequestError(
                f"keep_tokens must lie between 0 and {max(0, most)}: a context of {window} tokens that drops its oldest "
                f"holds them in blocks of {size}, and at least {_FEWEST_FREE_BLOCKS} are for what follows; "
                f"got {rule.keep_tokens}",
                "keep_tokens",
                "invalid_value",
            )
        return HeldContext(longest, size, window, -(-rule.keep_tokens // size))
