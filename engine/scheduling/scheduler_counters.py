"""Scheduler counters. Each name means what the field of that name in `EngineStats` means."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from windlass.engine.interface.outputs import MAX_TIMING_SAMPLES, STEP_TOKENS, EngineStats
from windlass.engine.scheduling.sequence import Sequence

_RECOMPUTE_REASONS = ("preemption", "full_prefix_hit", "rope_update", "cache_reuse")


@dataclass(slots=True)
class SchedulerCounters:
    """Counters that only grow, and per-request durations in seconds that wait to be drained: the last MAX_TIMING_SAMPLES of each."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RECOMPUTE_REASONS, 0))
    key_moves: int = 0
    context_shifts: int = 0
    dropped_tokens: int = 0
    reused_passages: int = 0
    reused_tokens: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_model_num_drafts: int = 0
    spec_decode_model_num_draft_tokens: int = 0
    spec_decode_model_num_accepted_tokens: int = 0
    queue_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    prefill_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    inference_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    step_tokens_sum: int = 0

    def count_step(self, num_tokens: int, count: int = 1) -> None:
        """Book a step that computes so many tokens. count: -1 for one that is not computed after all."""
        self.num_steps += count
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += count
        self.step_tokens_sum += count * num_tokens

    def count_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Book the next `num_tokens` tokens of `seq` as planned."""
        start = seq.cache.num_computed_tokens
        if start == seq.max_computed_tokens and start >= seq.num_prompt_tokens and start >= seq.full_hit_end:
            return  # a stream's next token, seen for the first time
        end = start + num_tokens
        seen = min(max(start, seq.max_computed_tokens), end)
        self.recomputed_tokens[seq.recompute_reason] += seen - start
        self.recomputed_tokens["full_prefix_hit"] += max(0, min(end, seq.full_hit_end) - seen)
        # Those that came from the cache are counted here too, now that they are put to use.
        self.prompt_tokens += max(
            0, min(end, seq.num_prompt_tokens) - min(seq.max_computed_tokens, seq.num_prompt_tokens)
        )

    def count_hit(self, seq: Sequence, full: bool, *, looked_up: bool) -> None:
        """Book that the tokens of `seq` computed by now, and those of passages to come, are from the cache.

        full: the cache held all of them. looked_up: whether the cache was asked at all.
        """
        if seq.cached_tokens is None:
            found = min(seq.cache.num_computed_tokens, seq.num_prompt_tokens)
            seq.cached_tokens = found + sum(passage.num_tokens for passage in seq.cache.passages)
            if looked_up:
                self.prefix_cache_queries += seq.num_prompt_tokens
                self.prefix_cache_hits += found
        seq.full_hit_end = seq.num_tokens if full else 0

    def count_shift(self, dropped: int) -> None:
        """Book that a sequence dropped its oldest tokens."""
        self.context_shifts += 1
        self.dropped_tokens += dropped

    def snapshot(
        self,
        *,
        num_running: int,
        num_waiting: int,
        kv_blocks_total: int,
        kv_blocks_used: int,
        kv_cache_usage: float,
    ) -> EngineStats:
        """The counters beside the given gauges. Durations are handed out once, then forgotten."""
        stats = EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_blocks_total=kv_blocks_total,
            kv_blocks_used=kv_blocks_used,
            kv_cache_usage=kv_cache_usage,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            recomputed_tokens=dict(self.recomputed_tokens),
            key_moves=self.key_moves,
            context_shifts=self.context_shifts,
            dropped_tokens=self.dropped_tokens,
            reused_passages=self.reused_passages,
            reused_tokens=self.reused_tokens,
            spec_decode_num_drafts=self.spec_decode_num_drafts,
            spec_decode_num_draft_tokens=self.spec_decode_num_draft_tokens,
            spec_decode_num_accepted_tokens=self.spec_decode_num_accepted_tokens,
            spec_decode_model_num_drafts=self.spec_decode_model_num_drafts,
            spec_decode_model_num_draft_tokens=self.spec_decode_model_num_draft_tokens,
            spec_decode_model_num_accepted_tokens=self.spec_decode_model_num_accepted_tokens,
            queue_seconds=tuple(self.queue_seconds),
            prefill_seconds=tuple(self.prefill_seconds),
            decode_seconds=tuple(self.decode_seconds),
            inference_seconds=tuple(self.inference_seconds),
            step_tokens=tuple(self.step_tokens),
            step_tokens_sum=self.step_tokens_sum,
        )
        for samples in (self.queue_seconds, self.prefill_seconds, self.decode_seconds, self.inference_seconds):
            samples.clear()
        return stats
