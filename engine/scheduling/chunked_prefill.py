"""Chunked prefill: prefill tokens per step, their division among prompts, and chunk boundaries.

The limit per step adapts to measured step times (seconds, passed in by the caller). Chunk boundaries make results
independent of what was cached and of how a prompt was chunked: some attention kernels treat a sequence with many new tokens
differently from one with few. The tail of a prompt, which is computed whatever is cached, therefore attends as a sequence of its
own, and a chunk before it is never short. Recurrent state is cached where a chunk ends with a block.
"""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass

_FIRST_LIMIT = 64

_MIN_LIMIT = 4  # next to streams, 16 tokens of a prompt of 30,000 take half a second on two cores

_SLOW_DECODE_FACTOR = 1.5  # how much longer than its decoding a step may last if that alone comes close to the target

_ALONE_FACTOR = 4.0  # how much longer a step may last when no stream waits for its next token

_PROBE_STEPS = 32  # steps with prefill after which one only decodes, which shows how long that takes

_FIRST_PROBE = 4  # as above, when the number of streams has doubled or halved since then

_FIRST_REROTATIONS = 512  # keys of one KV group

_AIM = 0.8  # share of the target to aim at when growing: the noise of a shared machine adds up to a quarter


class StepLimiter:
    """Adaptive bounds on the prefill tokens of a step: one for steps with running streams and one for steps without.

    target_seconds: how long a step with running streams may last; one without may last four times that; 0: no bound. Where
    decoding takes more than two thirds of it, prompts get half of the time of decoding: otherwise they would wait for all
    streams to end, and batches would stay small. Each bound starts low and at most doubles or halves per observation. It
    shrinks when a step was too long. It grows only when a step that filled at least half of it was short, so that short
    prompts do not raise it wrongly. The rest of a step, which prefill does not change, is known from steps that only decode:
    while prompts wait, one of `_PROBE_STEPS` is such a step.
    """

    __slots__ = ("_decode_step", "_limits", "_max_tokens", "_rerotations", "_steps_since", "_target")

    def __init__(self, target_seconds: float, max_num_batched_tokens: int) -> None:
        self._target = target_seconds
        self._max_tokens = max_num_batched_tokens
        first = min(_FIRST_LIMIT, max_num_batched_tokens)
        self._limits = {True: first, False: first}  # by whether there are decode streams
        self._rerotations = _FIRST_REROTATIONS
        self._decode_step: tuple[int, float] | None = None  # streams and seconds of the last one without prefill
        self._steps_since = 0  # steps with streams and prefill since that one

    @property
    def rerotation_limit(self) -> int:
        """Cached tokens of one KV group whose keys a step may re-rotate."""
        return self._rerotations if self._target > 0 else sys.maxsize

    def observe_rerotations(self, count: int, seconds: float) -> None:
        """Adapt to a finished step that re-rotated the keys of `count` tokens and possibly computed others."""
        if self._target <= 0 or seconds <= 0:
            return
        wanted = int(count * _AIM * self._target / seconds)
        if seconds > self._target or 2 * count >= self._rerotations:
            self._rerotations = max(1, self._rerotations // 2, min(2 * self._rerotations, wanted))

    def limit(self, num_decodes: int) -> int:
        """Prefill tokens that the next step, for which it is called once, may compute next to `num_decodes` decode tokens."""
        if self._target <= 0:
            return self._max_tokens
        if num_decodes and self._steps_since >= (_PROBE_STEPS if self._is_known(num_decodes) else _FIRST_PROBE):
            self._steps_since = 0  # a single step, even if it cannot be measured
            return 0
        return self._limits[num_decodes > 0]

    def observe(self, num_tokens: int, num_decodes: int, seconds: float) -> None:
        """Adapt to a finished step of `num_tokens` tokens, `num_decodes` of them of decode streams."""
        prefill = num_tokens - num_decodes
        if prefill == 0 < num_decodes:
            self._decode_step, self._steps_since = (num_decodes, seconds), 0
        if self._target <= 0 or prefill <= 0 or seconds <= 0:
            return
        streams = num_decodes > 0
        self._steps_since += streams
        decoding = self._decode_seconds(num_tokens, num_decodes, seconds)
        target = max(self._target, _SLOW_DECODE_FACTOR * decoding) if streams else self._target * _ALONE_FACTOR
        limit = self._limits[streams]
        if seconds > target:
            wanted = min(limit, int(prefill * (target - decoding) / (seconds - decoding)))
        elif 2 * prefill >= limit:
            wanted = max(limit, int(prefill * (_AIM * target - decoding) / max(seconds - decoding, 0.1 * target)))
        else:
            return
        wanted = max(limit // 2, min(2 * limit, wanted))
        self._limits[streams] = min(max(wanted, _MIN_LIMIT), self._max_tokens)

    def _is_known(self, num_decodes: int) -> bool:
        """Whether a step that only decoded had a similar number of streams."""
        return self._decode_step is not None and self._decode_step[0] / 2 <= num_decodes <= 2 * self._decode_step[0]

    def _decode_seconds(self, num_tokens: int, num_decodes: int, seconds: float) -> float:
        """Estimated duration of a step without its prefill, less than `seconds`.

        The share of its tokens is a fallback: it is too small where a product of few rows takes as long as one of more, and too
        large where prefill tokens cost more, next to a long prompt.
        """
        share = seconds * num_decodes / num_tokens
        if self._decode_step is None:
            return share
        streams, measured = self._decode_step
        measured *= max(1.0, num_decodes / streams)
        return min(measured if self._is_known(num_decodes) else min(share, measured), 0.95 * seconds)


@dataclass(frozen=True, slots=True)
class ChunkBoundaries:
    """Positions at which prefill chunks may end.

    min_tokens: the number of new tokens of a sequence from which kernels treat all numbers alike; 0: they always do.
    block_size: tokens of a cached block. align_to_blocks: chunks end with blocks, except for the last one.
    """

    min_tokens: int = 0
    block_size: int = 1
    align_to_blocks: bool = False

    def tail_start(self, known: int) -> int:
        """Start of the tail of `known` tokens: the cache is searched in whole blocks and never for the last token."""
        return (known - 1) // self.block_size * self.block_size

    def attention_segments(self, first: int, count: int, known: int) -> list[tuple[int, int]]:
        """The (first, count) segments of the last chunk of `known` tokens that attend as sequences of their own."""
        tail = self.tail_start(known)
        if not self.min_tokens or not first < tail < first + count:
            return [(first, count)]
        return [(first, tail - first), (tail, first + count - tail)]

    def max_chunk(self, start: int, needed: int, budget: int) -> int:
        """Tokens of the longest chunk from `start` of `needed` tokens within `budget`; 0 if no boundary is within reach."""
        if not self.align_to_blocks and (budget >= needed or not self.min_tokens):
            return min(budget, needed)
        before_tail = self.tail_start(start + needed) - start
        if self.align_to_blocks:
            if before_tail <= 0:
                return min(budget, needed)
            if budget >= before_tail:
                return before_tail
            end = (start + min(budget, before_tail - self.min_tokens)) // self.block_size * self.block_size
            return end - start if end - start >= max(1, self.min_tokens) else 0
        if before_tail <= budget:
            return max(0, before_tail)
        tokens = min(budget, before_tail - self.min_tokens)
        return tokens if tokens >= self.min_tokens else 0


NO_BOUNDARIES = ChunkBoundaries()


def split_prefill_budget(
    needs: abc.Sequence[int], budget: int, starts: abc.Sequence[int] = (), boundaries: ChunkBoundaries = NO_BOUNDARIES
) -> list[int]:
    """Divide `budget` tokens among prefills that need `needs[i]` tokens, in order of rank.

    Half goes to the first, so that the best-ranked prefill always advances, and the rest to the shortest, so that a
    new arrival with a short prompt does not wait for a long one. Without boundaries the budget is used up while any prefill
    needs more.

    starts: computed tokens of each. boundaries: where chunks may end, which may leave a few tokens unused. They are ignored
    if the budget has no space for two chunks, or for one if there is one prefill.
    """
    if not needs:
        return []
    if budget < boundaries.min_tokens * min(len(needs), 2):
        boundaries = NO_BOUNDARIES
    starts = starts or [0] * len(needs)

    def max_chunk(i: int, tokens: int) -> int:
        return boundaries.max_chunk(starts[i], needs[i], tokens)

    grants = [0] * len(needs)
    half = -(-budget // 2)
    grants[0] = max_chunk(0, half) or max_chunk(0, budget) or min(needs[0], half)
    budget -= grants[0]
    for i in sorted(range(len(needs)), key=needs.__getitem__):  # stable: by rank among equals
        more = max(0, max_chunk(i, grants[i] + budget) - grants[i])
        grants[i] += more
        budget -= more
    return grants


def split_whole_prompt_budget(needs: abc.Sequence[int], budget: int) -> list[int]:
    """Divide `budget` tokens among prompts that are computed in one step or not at all, in order of rank.

    The best-ranked prompt is always computed, whatever the budget, and each further one that fits in what is left.
    """
    grants = []
    for index, need in enumerate(needs):
        granted = need if index == 0 or need <= budget else 0
        budget -= granted
        grants.append(granted)
    return grants
