"""What becomes of a request's oldest tokens, and what it may take from other prompts, as plain data.

Torch-free: the server makes it from bodies and options, the engine follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
