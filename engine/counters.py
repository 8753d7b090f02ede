"""What the scheduler counts. The meaning of each name is that of the field in `EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.engine.request import EngineStats


@dataclass(slots=True)
class SchedulerCounters:
    """Counters that only grow, and per-request durations in seconds that wait to be drained."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: dict[str, int] = field(default_factory=lambda: {"preemption": 0, "full_prefix_hit": 0})
    queue_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

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
            queue_seconds=tuple(self.queue_seconds),
            prefill_seconds=tuple(self.prefill_seconds),
            decode_seconds=tuple(self.decode_seconds),
        )
        for samples in (self.queue_seconds, self.prefill_seconds, self.decode_seconds):
            samples.clear()
        return stats
