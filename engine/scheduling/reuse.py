"""When sequences take up passages that stand in the cache already, and what is counted of it.

A sequence takes its cached prefix first and looks for passages behind it when it is admitted. It computes up to the first of
them, goes on behind it, and so on to the last; the last token of a prompt is always computed. One that loses its place gives
them back, and looks again unless it has begun to answer: the rest of an answer does not come to stand on other keys for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.reuse import MIN_PASSAGE_TOKENS, ReuseLimits, attach_passage, hold_passages
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PassageSearch:
    """Passages of at least `at_least` tokens between two tokens of a prompt, in one of `spans` each if there are any."""

    start: int
    end: int
    at_least: int
    spans: tuple[tuple[int, int], ...]


class NonPrefixReuse:
    def __init__(self, blocks: BlockManager, counters: SchedulerCounters) -> None:
        self._blocks = blocks
        self._counters = counters

    def find_passages(self, seq: Sequence) -> None:
        """Let a sequence that has just got its prefix, but not all of its tokens, hold the passages it will take up.

        Nothing is taken where prompt log-probabilities are asked for, where keys will be re-rotated, where tokens see a window of
        their own, and where the answer has begun.
        """
        limits, rule = self._limits_of(seq), seq.request.reuse
        if limits is not None and rule is not None:
            hold_passages(self._blocks, seq.cache, seq.token_ids, rule, limits)

    def search_for(self, seq: Sequence) -> PassageSearch | None:
        """What `find_passages` will search for, beyond the prefix."""
        limits, rule = self._limits_of(seq), seq.request.reuse
        if limits is None or rule is None or not rule.is_enabled:
            return None
        return PassageSearch(limits.start, limits.end, max(rule.at_least, MIN_PASSAGE_TOKENS), rule.passages)

    def _limits_of(self, seq: Sequence) -> ReuseLimits | None:
        rule, context_limits = seq.request.reuse, seq.context_limits
        if (
            rule is None
            or seq.needs_full_prefill
            or seq.prompt_logprobs is not None
            or context_limits.attention_window is not None
        ):
            return None
        if seq.num_output_tokens:
            return None
        if seq.rotation.policy == "rotate" and seq.stage.last_length is not None:
            return None
        longest = min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, context_limits.longest)
        kept = (
            context_limits.retained_blocks * context_limits.block_size
        )  # that these are tokens and nothing else is what `shift` goes by
        return ReuseLimits(kept, seq.num_prompt_tokens - 1, longest, context_limits.window)

    def attach_passage(self, seq: Sequence) -> None:
        """Take up what begins with the next token, if anything does."""
        for passage in attach_passage(self._blocks, seq.cache, seq.token_ids):
            self._counters.reused_passages += 1
            self._counters.reused_tokens += passage.num_tokens
            self._counters.recomputed_tokens["cache_reuse"] += passage.num_repeated
