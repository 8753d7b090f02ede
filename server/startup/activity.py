"""A line on what the server does, every few seconds while it does something. Knows the engine's statistics alone."""

from __future__ import annotations

import asyncio
import time

from windlass.clients.terminal.lines import say
from windlass.engine.client.replicated_client import sum_stats
from windlass.engine.interface.outputs import EngineStats
from windlass.server.exchange.metrics import ServerMetrics


async def report_activity(metrics: ServerMetrics, seconds: float) -> None:
    """Say so for ever; nothing while nothing runs. seconds: between two lines, 0 for none at all."""
    before, since = EngineStats(), time.monotonic()
    while seconds > 0:
        await asyncio.sleep(seconds)
        after, now = await metrics.refresh(), time.monotonic()
        if after is None:
            continue
        line = activity_line(_comparable(before, after), after, now - since)
        if line is not None:
            say(f"{time.strftime('%H:%M:%S')} {line}")
        before, since = after, now


def _comparable(before: EngineStats, after: EngineStats) -> EngineStats:
    """What the engines of `after` had counted before; one that was started since had counted nothing."""
    pairs = zip(before.engines or (before,), after.engines or (after,), strict=False)
    known = [one if one and two and two.num_steps >= one.num_steps else None for one, two in pairs]
    return sum_stats(known)


def activity_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """What happened between two snapshots that lie `seconds` apart; None where nothing did.

    Prompt tokens are those that were computed or found in the cache.
    """
    read = after.prompt_tokens - before.prompt_tokens
    generated = after.generation_tokens - before.generation_tokens
    if not (read or generated or after.num_running or after.num_waiting):
        return None
    parts = [f"running {after.num_running:,}, waiting {after.num_waiting:,}"]
    parts.append(f"prompts {read / seconds:,.0f} tokens/s, answers {generated / seconds:,.1f} tokens/s")
    cache = f"cache {after.kv_cache_usage:.0%} in use"
    if looked_up := after.prefix_cache_queries - before.prefix_cache_queries:
        cache += f", {(after.prefix_cache_hits - before.prefix_cache_hits) / looked_up:.0%} of prompts found in it"
    parts.append(cache)
    if proposed := after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens:
        kept = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        parts.append(f"{kept / proposed:.0%} of proposals kept")
    if preempted := after.num_preemptions - before.num_preemptions:
        parts.append(f"{preempted:,} preempted")
    return "; ".join(parts)
