"""Where prompts are cut, so that what comes of one depends neither on what was cached of it nor on what fitted into a step.

Attention of a backend may treat a sequence with many new tokens otherwise than one with few. Then the end of a prompt, which is
computed whatever is cached, attends as a sequence of its own, and a chunk of what is before it is never short. And a model may
carry states, which can be kept for later prompts where a chunk ends with a block. Knows numbers of tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkBoundaries:
    """fewest: new tokens of a sequence from which all are treated alike, 0 where any are. block: tokens of a cached block.
    align_to_blocks: chunks end with blocks, the last one aside."""

    fewest: int = 0
    block: int = 1
    align_to_blocks: bool = False

    def end(self, known: int) -> int:
        """Where the end of so many tokens begins: the cache is looked up in whole blocks, and the last token never."""
        return (known - 1) // self.block * self.block

    def parts(self, first: int, count: int, known: int) -> list[tuple[int, int]]:
        """Those (first, tokens) of a piece of the last chunk of `known` tokens that attend on their own."""
        end = self.end(known)
        if not self.fewest or not first < end < first + count:
            return [(first, count)]
        return [(first, end - first), (end, first + count - end)]

    def longest(self, start: int, due: int, tokens: int) -> int:
        """How many of the `due` tokens from `start` on a chunk takes that may take so many; perhaps none."""
        if self.align_to_blocks:
            return self._to_end_of_block(start, due, tokens)
        if tokens >= due or not self.fewest:
            return min(tokens, due)
        before = self.end(start + due) - start
        if before <= tokens:
            return max(0, before)
        taken = min(tokens, before - self.fewest)
        return taken if taken >= self.fewest else 0

    def _to_end_of_block(self, start: int, due: int, tokens: int) -> int:
        before = self.end(start + due) - start
        if before <= 0:
            return min(tokens, due)
        if tokens >= before:
            return before
        end = (start + min(tokens, before - self.fewest)) // self.block * self.block
        return end - start if end - start >= max(1, self.fewest) else 0


NO_BOUNDARIES = ChunkBoundaries()
