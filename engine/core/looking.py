"""Answers questions of people who look on, from the parts of an engine. It changes nothing that a request could notice."""

from __future__ import annotations

import time
from typing import cast

from windlass.engine.api.looks import (
    MAX_CACHE_SEQUENCES,
    A,
    AttentionQuery,
    AttentionSnapshot,
    CacheQuery,
    CacheSequenceSnapshot,
    CacheSnapshot,
    IntrospectionQuery,
)
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.picture import snapshot_cache
from windlass.engine.evaluation.attention import snapshot_attention
from windlass.engine.evaluation.scoring import SingleSequenceRunner
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.rotary.policy import RotaryPlanner
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.sequence import Sequence


def inspect(
    question: IntrospectionQuery[A],
    scheduler: Scheduler,
    blocks: BlockManager,
    runner: ModelRunner,
    planner: RotaryPlanner,
) -> A:
    """The answer; raises RequestError for what cannot be shown."""
    match question:
        case CacheQuery():
            answer: CacheSnapshot | AttentionSnapshot = _cache(scheduler, blocks)
        case AttentionQuery(token_ids, _, _, scaling):
            texts = SingleSequenceRunner(runner.decoder, runner.cache.dtype)
            answer = snapshot_attention(texts, question, planner.plan(max(1, len(token_ids)), scaling, "frozen"))
        case _:
            raise TypeError(f"an engine does not answer a {type(question).__name__}")
    return cast(A, answer)  # the question says which it is


def _cache(scheduler: Scheduler, blocks: BlockManager) -> CacheSnapshot:
    began = time.perf_counter()
    running = list(scheduler.running)[:MAX_CACHE_SEQUENCES]
    groups = snapshot_cache(blocks, [seq.cache for seq in running])
    sequences = tuple(map(_sequence, running))
    return CacheSnapshot(blocks.block_size, groups, sequences, time.perf_counter() - began)


def _sequence(seq: Sequence) -> CacheSequenceSnapshot:
    return CacheSequenceSnapshot(
        num_tokens=seq.num_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.cached_tokens or 0,
        num_blocks=sum(len(table.blocks) - table.num_dropped for table in seq.cache.tables),
        num_shifts=seq.cache.num_shifts,
        num_reused_tokens=seq.cache.num_reused_tokens,
    )
