"""Chunked prefill: prefill tokens per step, their division among prompts, and chunk boundaries.

The limit per step adapts to measured step times (seconds, passed in; there is no clock here). Chunk boundaries make results
independent of what was cached and of how a prompt was chunked: some attention kernels treat a sequence with many new tokens
differently from one with few, so the end of a prompt, which is computed whatever is cached, attends as a sequence of its own, and
a chunk in front of it is never short. Recurrent state is cached where a chunk ends with a block.
"""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass

_FIRST_LIMIT = 64

_MIN_LIMIT = 4  # of a prompt of 30,000 tokens beside streams, 16 take half a second on two cores

_ALONE_FACTOR = 4.0  # how much longer a step may last when no stream waits for its next token

_FIRST_REROTATIONS = 512  # keys of one KV group

_AIM = 0.8  # share of the target to aim at when growing: the noise of a shared machine reaches a quarter more


class StepLimiter:
    """An adaptive bound on prefill tokens per step, one for steps beside running streams and one for steps without.

    target_seconds: how long a step beside running streams may last; one without may last four times that; 0 means no
    bound. Each bound starts low and at most doubles or halves per observation. It shrinks when a step was too long and
    grows only when a step that filled at least half of it was short, so that short prompts teach it nothing false.
    """

    __slots__ = ("_limits", "_max_tokens", "_rerotations", "_target")

    def __init__(self, target_seconds: float, max_num_batched_tokens: int) -> None:
        self._target = target_seconds
        self._max_tokens = max_num_batched_tokens
        first = min(_FIRST_LIMIT, max_num_batched_tokens)
        self._limits = {True: first, False: first}  # by: are there decode streams
        self._rerotations = _FIRST_REROTATIONS

    @property
    def rerotation_limit(self) -> int:
        """Cached tokens, of one KV group, whose keys one step may re-rotate."""
        return self._rerotations if self._target > 0 else sys.maxsize

    def observe_rerotations(self, count: int, seconds: float) -> None:
        """Learn from a finished step that re-rotated the keys of so many tokens, beside whatever else it did."""
        if self._target <= 0 or seconds <= 0:
            return
        wanted = int(count * _AIM * self._target / seconds)
        if seconds > self._target or 2 * count >= self._rerotations:
            self._rerotations = max(1, self._rerotations // 2, min(2 * self._rerotations, wanted))

    def limit(self, num_decodes: int) -> int:
        """Prefill tokens the next step may take beside `num_decodes` decode tokens."""
        return self._max_tokens if self._target <= 0 else self._limits[num_decodes > 0]

    def observe(self, num_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a finished step of `num_tokens` tokens, `num_decodes` of them of decode streams."""
        prefill = num_tokens - num_decodes
        if self._target <= 0 or prefill <= 0 or seconds <= 0:
            return
        streams = num_decodes > 0
        target = self._target if streams else self._target * _ALONE_FACTOR
        limit = self._limits[streams]
        if seconds > target:
            wanted = min(limit, int(prefill * target / seconds))
        elif 2 * prefill >= limit:
            wanted = max(limit, int(prefill * _AIM * target / seconds))
        else:
            return
        wanted = max(limit // 2, min(2 * limit, wanted))
        self._limits[streams] = min(max(wanted, _MIN_LIMIT), self._max_tokens)


def split_whole_prompt_budget(needs: abc.Sequence[int], budget: int) -> list[int]:
    """Share `budget` tokens among prompts of `needs[i]` tokens that are computed whole or not at all, best rank first.

    The best-ranked one is always computed, whatever the budget; of the others each that still fits beside those before it.
    """
    grants = []
    for index, need in enumerate(needs):
        granted = need if index == 0 or need <= budget else 0
        budget -= granted
        grants.append(granted)
    return grants


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


def split_prefill_budget(
    needs: abc.Sequence[int], budget: int, starts: abc.Sequence[int] = (), cuts: ChunkBoundaries = NO_BOUNDARIES
) -> list[int]:
    """Share `budget` tokens among prefills that need `needs[i]` tokens, given by rank, best first.

    Half goes to the first, so that the best-ranked prefill always advances, and the rest to the shortest, so that a
    new arrival with a short prompt does not wait until a long one is through. Without cuts nothing is left over while
    anybody needs more.

    starts: tokens that each has behind it. cuts: where chunks may end, which leaves a few tokens over; they hold where the budget
    has room for two chunks, or the one that is needed.
    """
    if not needs:
        return []
    if budget < cuts.fewest * min(len(needs), 2):
        cuts = NO_BOUNDARIES
    starts = starts or [0] * len(needs)

    def longest(i: int, tokens: int) -> int:
        return cuts.longest(starts[i], needs[i], tokens)

    grants = [0] * len(needs)
    half = -(-budget // 2)
    grants[0] = longest(0, half) or longest(0, budget) or min(needs[0], half)
    budget -= grants[0]
    for i in sorted(range(len(needs)), key=needs.__getitem__):  # stable: by rank among equals
        more = max(0, longest(i, grants[i] + budget) - grants[i])
        grants[i] += more
        budget -= more
    return grants
