"""Context rules: context shift, attention windows and non-prefix KV reuse, with their sizes in tokens and blocks.

Free of torch. The server uses the same computation as the engine, so it rejects exactly what the engine would reject.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from windlass.engine.errors import RequestError

DEFAULT_KEEP_TOKENS = 16
MIN_PASSAGE_TOKENS = 32  # shortest passage that a request may reuse
UNBOUNDED = 2**62  # slots, more than any sequence uses
_MIN_FREE_BLOCKS = 2  # blocks after the retained ones, so that a token always sees its immediate predecessors


@dataclass(frozen=True, slots=True)
class ContextRule:
    """Attention window of a request, and its overflow rule.

    overflow: "stop" ends the output when the context is full; "shift" drops the oldest tokens after the retained ones, one block
    at a time, and the output continues. keep_tokens: leading tokens that are never dropped, rounded up to whole blocks.
    attention_window: keys that a token sees, itself included; None: all. attention_sinks: leading tokens that it also sees.
    """

    overflow: Literal["stop", "shift"] = "stop"
    keep_tokens: int = DEFAULT_KEEP_TOKENS
    attention_window: int | None = None
    attention_sinks: int = 0


@dataclass(frozen=True, slots=True)
class NonPrefixReuseParams:
    """Non-prefix KV reuse: which cached passages a prompt may use, whatever their original offset.

    at_least: tokens of the shortest reusable passage; 0: only those listed in `passages`. passages: spans [start, end) of the
    prompt that are looked up unchanged; empty: the entire prompt is searched. recompute: tokens at the start of each passage
    that are computed again, or their share of it if below 1. scope: passages are shared only within the same scope.
    """

    at_least: int
    passages: tuple[tuple[int, int], ...] = ()
    recompute: float = 0.0
    scope: str = ""

    @property
    def is_enabled(self) -> bool:
        """Whether this request reuses passages. Other requests of its scope can reuse its tokens in any case."""
        return self.at_least > 0 or bool(self.passages)


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Context usage of a sample, as reported in answers.

    window: the most tokens it held, or those that a token saw; None where all are held and seen. kept_tokens: retained leading
    tokens, in whole blocks. dropped_tokens, shifts: under `shift`, so far. reused_tokens, reused_passages: non-prefix KV reuse.
    """

    window: int | None = None
    kept_tokens: int = 0
    dropped_tokens: int = 0
    shifts: int = 0
    reused_tokens: int = 0
    reused_passages: int = 0


@dataclass(frozen=True, slots=True)
class ContextSize:
    """A request's context rule in slots and whole blocks.

    longest: tokens at which the sequence ends. window: maximum slots under `shift`, None where no tokens are dropped.
    retained_blocks: leading blocks that the rule retains. attention_window: keys that a token sees, None for all.
    cut_blocks: under an attention window, leading blocks are retained and others dropped in multiples of this many blocks.
    sinks: leading tokens that are seen in addition to the window.
    """

    longest: int
    block_size: int
    window: int | None = None
    retained_blocks: int = 0
    attention_window: int | None = None
    cut_blocks: int = 1
    sinks: int = 0

    @property
    def longest_prompt(self) -> int:
        """Maximum prompt tokens, without output."""
        return self.longest if self.window is None else min(self.longest, self.window)

    @property
    def rotary_length(self) -> int:
        """Maximum number of tokens that can see each other; length-dependent frequencies use it as their length."""
        if self.attention_window is not None:
            return min(self.longest, self.sinks + self.attention_window)
        return self.longest_prompt

    @property
    def sinks_window(self) -> int:
        """Windows of layers that are larger than this always contain the sinks, however long the text is."""
        return UNBOUNDED if self.attention_window is None or not self.sinks else self.attention_window

    @property
    def aligned_retained_blocks(self) -> int:
        """Leading blocks retained under an attention window: `retained_blocks` rounded up to `cut_blocks`."""
        return -(-self.retained_blocks // self.cut_blocks) * self.cut_blocks

    @property
    def floor(self) -> int:
        """Minimum slots that remain after dropping."""
        return UNBOUNDED if self.window is None else self.window - self.block_size

    def max_slots(self, chunk: int) -> int:
        """Maximum slots used at once by a sequence that computes up to `chunk` tokens in a step."""
        if self.attention_window is not None:
            return min(
                self.longest,
                (self.aligned_retained_blocks + self.cut_blocks) * self.block_size + self.attention_window + chunk,
            )
        return self.longest_prompt

    def report(self, num_computed: int) -> ContextReport | None:
        """Context usage after `num_computed` tokens; None for a rule that neither drops nor hides tokens."""
        kept = self.retained_blocks * self.block_size
        if self.attention_window is not None:
            return ContextReport(self.attention_window, kept)
        if self.window is None:
            return None
        shifts = max(0, -(-(num_computed - self.window) // self.block_size))
        return ContextReport(self.window, kept, shifts * self.block_size, shifts)


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """Context limits of all sequences of a server, in tokens; a loaded model's `ModelInfo` has them too.

    max_model_len: limit without context shift. shift_context: tokens held at once under context shift, which may continue up to
    max_total_tokens (None: unlimited). shift_refusal, reuse_refusal, window_refusal, sinks_refusal: why the model does not
    support context shift, non-prefix reuse, attention windows, or attention sinks. cut_blocks: see `ContextSize`.
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
        """A request's rule in slots and blocks. Raises RequestError if this model or its limits do not allow it."""
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
            sinks, total = rule.attention_sinks, rule.attention_window + rule.attention_sinks
            most = self.max_model_len - size * _MIN_FREE_BLOCKS
            if total > most:
                raise RequestError(
                    f"attention_window and attention_sinks are {total} tokens together, with a context of "
                    f"{self.max_model_len} they may be at most {max(0, most)}",
                    "attention_window",
                    "invalid_value",
                )
            return ContextSize(longest, size, None, -(-sinks // size), rule.attention_window, self.cut_blocks, sinks)
        if not endless:
            return ContextSize(longest, size)
        window = self.shift_context // size * size
        most = window - size * _MIN_FREE_BLOCKS
        if rule.keep_tokens < 0 or -(-rule.keep_tokens // size) * size > most:
            raise RequestError(
                f"keep_tokens must lie between 0 and {max(0, most)}: a shifted context of {window} tokens keeps them in "
                f"blocks of {size} and needs {_MIN_FREE_BLOCKS} more blocks; got {rule.keep_tokens}",
                "keep_tokens",
                "invalid_value",
            )
        return ContextSize(longest, size, window, -(-rule.keep_tokens // size))
