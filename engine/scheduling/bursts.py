"""How many tokens each running stream computes in one step, one forward pass after the other.

Planning a step, booking it and telling of it costs the same for one pass as for several. Where passes are short that is a
tenth of the time and more, so streams alone in a step may draw a few tokens before they come back. A burst changes no
token: each pass computes what the one before it drew.

Responsible for how many passes a step has, within a length of time. It knows no clock: it is told the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.plan import SchedulerOutput
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep

MAX_PASSES = 8  # what arrives meanwhile waits for the end
_SHARE = 0.25  # of the last step in what is known of a pass


class MultiStepDecoding:
    """seconds: how long a step of several passes may last; 0: there are none."""

    def __init__(self, seconds: float, blocks: BlockManager) -> None:
        self._seconds, self._blocks = seconds, blocks
        self._pass_seconds: dict[int, float] = {}  # by the rows of a pass, where 2^k to 2^(k+1) - 1 are one size

    def extend(self, step: PlannedStep) -> None:
        """Let a planned step go on for more passes, where it holds running streams and nothing else, from free blocks."""
        if self._seconds <= 0 or not step.chunks or step.has_page_operations:
            return
        num_passes = self._max_passes(len(step.chunks), self._seconds)
        for chunk in step.chunks:
            if num_passes < 2:
                return
            num_passes = min(num_passes, 1 + chunk.seq.num_lookahead_tokens) if chunk.is_next_token else 1
        for chunk in step.chunks:
            num_passes = min(num_passes, self._blocks.capacity(chunk.seq.cache, num_passes))
            step.copies += self._blocks.allocate(chunk.seq.cache, num_passes)
        step.num_passes = num_passes

    def extend_async(self, chunks: Sequence[PlannedChunk], ahead: int) -> int:
        """How many passes streams may have behind `ahead` others that are not over: their blocks are taken then. 0: none.

        What arrives waits for both, so each has half the time.
        """
        num_passes = max(1, self._max_passes(len(chunks), self._seconds / 2))
        for chunk in chunks:
            num_passes = min(num_passes, 1 + chunk.seq.num_lookahead_tokens - ahead)
        for chunk in chunks:
            num_passes = min(num_passes, self._blocks.capacity(chunk.seq.cache, ahead + num_passes) - ahead)
            if num_passes < 1:
                return 0
            self._blocks.allocate(chunk.seq.cache, ahead + num_passes)
        return num_passes

    def _max_passes(self, rows: int, seconds: float) -> int:
        known = self._pass_seconds.get(rows.bit_length())
        return 1 if known is None else min(MAX_PASSES, int(seconds / known))

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn from a finished step of running streams alone how long a pass takes."""
        rows = len(output.sequences)
        if self._seconds <= 0 or not rows or output.rerotations:
            return
        if any(item.start + 1 < item.num_known_tokens for item in output.sequences):
            return
        size, one = rows.bit_length(), seconds / output.num_passes
        known = self._pass_seconds.get(size, one)
        self._pass_seconds[size] = known + _SHARE * (one - known)
