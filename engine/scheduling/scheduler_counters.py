"""Scheduler counters: the part of the statistics that the scheduler counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from windlass.engine.interface.outputs import MAX_TIMING_SAMPLES, STEP_TOKENS, TIMED_FIELDS, EngineStats
from windlass.engine.scheduling.sequence import Sequence

_RECOMPUTE_REASONS = ("preemption", "full_prefix_hit", "rope_update", "cache_reuse")


def _samples() -> deque[float]:
    return deque(maxlen=MAX_TIMING_SAMPLES)


@dataclass(slots=True)
class SchedulerCounters(EngineStats):
    """The statistics while they are counted. Gauges stay 0, and durations are held until a snapshot takes them."""

    recomputed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RECOMPUTE_REASONS, 0))
    queue_seconds: deque[float] = field(default_factory=_samples)
    prefill_seconds: deque[float] = field(default_factory=_samples)
    decode_seconds: deque[float] = field(default_factory=_samples)
    inference_seconds: deque[float] = field(default_factory=_samples)
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, num_tokens: int, count: int = 1) -> None:
        """Count a step of `num_tokens` tokens. count: -1 if the step is cancelled."""
        self.num_steps += count
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += count
        self.step_tokens_sum += count * num_tokens

    def count_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Count the next `num_tokens` tokens of `seq` as planned."""
        start = seq.cache.num_computed_tokens
        if start == seq.max_computed_tokens and start >= seq.num_prompt_tokens and start >= seq.full_hit_end:
            return  # a stream's next token, computed for the first time
        end = start + num_tokens
        seen = min(max(start, seq.max_computed_tokens), end)
        self.recomputed_tokens[seq.recompute_reason] += seen - start
        self.recomputed_tokens["full_prefix_hit"] += max(0, min(end, seq.full_hit_end) - seen)
        # Prompt tokens from the cache are counted here too, once a chunk uses them.
        self.prompt_tokens += max(
            0, min(end, seq.num_prompt_tokens) - min(seq.max_computed_tokens, seq.num_prompt_tokens)
        )

    def count_hit(self, seq: Sequence, full: bool, *, looked_up: bool) -> None:
        """Count the computed tokens of an admitted sequence, and its passages, as cache hits.

        full: the cache held all of its tokens. looked_up: whether the prefix cache was searched.
        """
        if seq.cached_tokens is None:
            found = min(seq.cache.num_computed_tokens, seq.num_prompt_tokens)
            seq.cached_tokens = found + sum(passage.num_tokens for passage in seq.cache.passages)
            if looked_up:
                self.prefix_cache_queries += seq.num_prompt_tokens
                self.prefix_cache_hits += found
        seq.full_hit_end = seq.num_tokens if full else 0

    def count_shift(self, dropped: int) -> None:
        """Count a context shift that dropped `dropped` tokens."""
        self.context_shifts += 1
        self.dropped_tokens += dropped

    def snapshot(self, **gauges: Any) -> EngineStats:
        """The counters together with the given gauges, which are fields of `EngineStats`. Removes the durations it returns."""
        values: dict[str, Any] = {counter.name: getattr(self, counter.name) for counter in fields(self)}
        values |= {"recomputed_tokens": dict(self.recomputed_tokens), "step_tokens": tuple(self.step_tokens)}
        for name in TIMED_FIELDS:
            samples, values[name] = values[name], tuple(values[name])
            samples.clear()
        return EngineStats(**values | gauges)
