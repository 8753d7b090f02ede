"""Context rules: context shift, attention windows and non-prefix KV reuse, with their sizes in tokens and blocks.

Free of torch. The server uses the same computation as the engine, so it rejects exactly what the engine would reject.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from windlass.engine.errors import RequestError
from windlass.engine.interface.model_info import ModelInfo

DEFAULT_KEEP_TOKENS = 16

MIN_PASSAGE_TOKENS = 32  # tokens of one that requests may ask to take up


@dataclass(frozen=True, slots=True)
class ContextRule:
    """What a token sees of those before it, and what is done where the context is full.

    overflow: "stop" ends the output there; under "shift" the oldest tokens behind the kept ones are dropped, a block at a
    time, and the output goes on. keep_tokens: leading tokens that are never dropped, rounded up to whole blocks.
    attention_window: keys that a token sees, itself included; None: all there are. attention_sinks: leading tokens that it
    sees besides.
    """

    overflow: Literal["stop", "shift"] = "stop"
    keep_tokens: int = DEFAULT_KEEP_TOKENS
    attention_window: int | None = None
    attention_sinks: int = 0


@dataclass(frozen=True, slots=True)
class NonPrefixReuseParams:
    """Cached passages that a prompt may take up wherever they stood before.

    at_least: tokens of the shortest passage taken; 0: only those of `passages`. passages: spans [start, end) of the prompt
    that are looked for as they are; empty: the whole prompt is searched. recompute: tokens at the head of each passage that
    are computed anew, or their share of it if below 1. scope: passages are shared within one only.
    """

    at_least: int
    passages: tuple[tuple[int, int], ...] = ()
    recompute: float = 0.0
    scope: str = ""

    @property
    def is_enabled(self) -> bool:
        """Whether any is taken at all; the request's own tokens can be found by others of its scope in any case."""
        return self.at_least > 0 or bool(self.passages)


@dataclass(frozen=True, slots=True)
class ContextReport:
    """What became of a sample's context, as answers tell it.

    window: tokens it held at most, or those that a token saw; None where all are held and seen. kept_tokens: leading ones
    that stay, in whole blocks. dropped_tokens, shifts: under `shift`, so far. reused_tokens: taken from passages that stood
    elsewhere; reused_passages: how many passages those were.
    """

    window: int | None = None
    kept_tokens: int = 0
    dropped_tokens: int = 0
    shifts: int = 0
    reused_tokens: int = 0
    reused_passages: int = 0


UNBOUNDED = 2**62  # slots that no sequence takes

_MIN_FREE_BLOCKS = 2  # behind the kept ones, so that a token always sees what came right before it


@dataclass(frozen=True, slots=True)
class ContextSize:
    """A request's rule in slots and whole blocks.

    longest: tokens at which the sequence ends. window: slots it holds at most under `shift`, None where none are dropped.
    retained_blocks: leading blocks that a rule asks to stay. seen: keys that a token sees under an attention window, None for all.
    cut_blocks: blocks of a multiple of which those stay and others go under an attention window. sinks: tokens that are seen
    besides.
    """

    longest: int
    block_size: int
    window: int | None = None
    retained_blocks: int = 0
    attention_window: int | None = None
    cut_blocks: int = 1
    sinks: int = 0

    @property
    def rotary_length(self) -> int:
        """Tokens that stand in sight of each other at most: what frequencies that depend on a length go by."""
        if self.attention_window is not None:
            return min(self.longest, self.sinks + self.attention_window)
        return self.longest if self.window is None else min(self.longest, self.window)

    @property
    def sinks_window(self) -> int:
        """Tokens of a layer's own window beyond which it sees sinks however far the text goes: they stand within it."""
        return UNBOUNDED if self.attention_window is None or not self.sinks else self.attention_window

    @property
    def aligned_retained_blocks(self) -> int:
        """Leading blocks that stay under an attention window."""
        return -(-self.retained_blocks // self.cut_blocks) * self.cut_blocks

    @property
    def floor(self) -> int:
        """Slots that dropping never brings a sequence below."""
        return UNBOUNDED if self.window is None else self.window - self.block_size

    def max_slots(self, chunk: int) -> int:
        """Slots taken at once by a sequence that computes up to `chunk` tokens in a step."""
        if self.attention_window is not None:
            return min(
                self.longest,
                (self.aligned_retained_blocks + self.cut_blocks) * self.block_size + self.attention_window + chunk,
            )
        return self.longest if self.window is None else min(self.longest, self.window)

    def report(self, num_computed: int) -> ContextReport | None:
        """What became of a sample's context once so many tokens were computed; None where nothing ever becomes of it."""
        kept = self.retained_blocks * self.block_size
        if self.attention_window is not None:
            return ContextReport(self.attention_window, kept)
        if self.window is None:
            return None
        shifts = max(0, -(-(num_computed - self.window) // self.block_size))
        return ContextReport(self.window, kept, shifts * self.block_size, shifts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt with nothing behind it."""
        return self.longest if self.window is None else min(self.longest, self.window)


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """What sequences of one server may hold, in tokens.

    max_model_len: of a sequence that drops nothing. shift_context: of one that drops its oldest tokens, which goes on up to
    max_total_tokens (None: for ever). shift_refusal: why none of this model may. reuse_refusal: why none may take up passages.
    window_refusal, sinks_refusal: why none may have an attention window, or sinks in front of it. cut_blocks: see `ContextSize`.
    """

    max_model_len: int
    block_size: int
    shift_context: int
    max_total_tokens: int | None = None
    shift_refusal: str | None = None
    reuse_refusal: str | None = None
    window_refusal: str | None = None
    sinks_refusal: str | None = None
    cut_blocks: int = 1

    def size(self, rule: ContextRule) -> ContextSize:
        """The rule of a request in slots and blocks. Raises RequestError for one that cannot be."""
        size, endless = self.block_size, rule.overflow == "shift"
        for param, asked, refusal in (
            ("context_overflow", endless, self.shift_refusal),
            ("attention_window", rule.attention_window is not None, self.window_refusal),
            ("attention_sinks", rule.attention_window is not None and rule.attention_sinks > 0, self.sinks_refusal),
        ):
            if asked and refusal is not None:
                raise RequestError(f"{param}: {refusal}", param, "unsupported_value")
        longest = self.max_model_len
        if endless:
            longest = sys.maxsize if self.max_total_tokens is None else self.max_total_tokens
        if rule.attention_window is not None:
            if rule.attention_window < 1 or rule.attention_sinks < 0:
                raise RequestError(
                    "attention_window must be at least 1, attention_sinks at least 0", "attention_window"
                )
            most = self.max_model_len - size * _MIN_FREE_BLOCKS
            if rule.attention_window + rule.attention_sinks > most:
                raise RequestError(
                    f"attention_window and attention_sinks come to {rule.attention_window + rule.attention_sinks} tokens, "
                    f"with a context of {self.max_model_len} they may come to {max(0, most)}",
                    "attention_window",
                    "invalid_value",
                )
            kept = -(-rule.attention_sinks // size)
            sinks = rule.attention_sinks
            return ContextSize(longest, size, None, kept, rule.attention_window, self.cut_blocks, sinks)
        if not endless:
            return ContextSize(longest, size)
        window = self.shift_context // size * size
        most = window - size * _MIN_FREE_BLOCKS
        if rule.keep_tokens < 0 or -(-rule.keep_tokens // size) * size > most:
            raise RequestError(
                f"keep_tokens must lie between 0 and {max(0, most)}: a context of {window} tokens that drops its oldest "
                f"holds them in blocks of {size}, and at least {_MIN_FREE_BLOCKS} are for what follows; "
                f"got {rule.keep_tokens}",
                "keep_tokens",
                "invalid_value",
            )
        return ContextSize(longest, size, window, -(-rule.keep_tokens // size))


def context_sizes_of(info: ModelInfo) -> ContextSizes:
    """What sequences of a loaded model may hold."""
    return ContextSizes(
        info.max_model_len,
        info.block_size,
        info.shift_context or info.max_model_len,
        info.max_total_tokens,
        info.shift_refusal,
        info.reuse_refusal,
        info.window_refusal,
        info.sinks_refusal,
    )
