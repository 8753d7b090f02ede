"""Introspection: snapshots of cache occupancy and attention, taken between two steps."""

from __future__ import annotations

import time
from collections import abc
from typing import cast

import numpy as np

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.block_pool import BlockPool
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.execution.attention_maps import snapshot_attention
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.execution.single_sequence import SingleSequenceRunner
from windlass.engine.interface.introspection import (
    MAX_CACHE_CELLS,
    MAX_CACHE_SEQUENCES,
    A,
    AttentionQuery,
    AttentionSnapshot,
    CacheGroupSnapshot,
    CacheQuery,
    CacheSequenceSnapshot,
    CacheSnapshot,
    IntrospectionQuery,
)
from windlass.engine.rotary.rotary_policy import RotaryPlanner
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.sequence import Sequence

_MIN_BLOCKS_SHOWN = 256  # with fewer, the scale of the picture would change with every prompt


def inspect(query: IntrospectionQuery[A], scheduler: Scheduler, runner: ModelRunner, planner: RotaryPlanner) -> A:
    """Answer a query. Raises RequestError if the attention cannot be computed."""
    match query:
        case CacheQuery():
            answer: CacheSnapshot | AttentionSnapshot = _snapshot_engine(scheduler)
        case AttentionQuery(token_ids, _, _, scaling):
            sequence_runner = SingleSequenceRunner(runner.decoder, runner.cache.dtype)
            answer = snapshot_attention(sequence_runner, query, planner.plan(max(1, len(token_ids)), scaling, "frozen"))
        case _:
            raise TypeError(f"an engine does not answer a {type(query).__name__}")
    return cast(A, answer)


def _snapshot_engine(scheduler: Scheduler) -> CacheSnapshot:
    started_at = time.perf_counter()
    running = list(scheduler.running)[:MAX_CACHE_SEQUENCES]
    groups = snapshot_cache(scheduler.blocks, [seq.cache for seq in running])
    sequences = tuple(map(_sequence, running))
    return CacheSnapshot(scheduler.blocks.block_size, groups, sequences, time.perf_counter() - started_at)


def _sequence(seq: Sequence) -> CacheSequenceSnapshot:
    return CacheSequenceSnapshot(
        num_tokens=seq.num_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.cached_tokens or 0,
        num_blocks=sum(len(table.blocks) - table.num_dropped for table in seq.cache.tables),
        num_shifts=seq.cache.num_shifts,
        num_reused_tokens=seq.cache.num_reused_tokens,
    )


def snapshot_cache(manager: BlockManager, sequences: abc.Sequence[SequenceCache]) -> tuple[CacheGroupSnapshot, ...]:
    """A snapshot of each KV group; `owners` are indices into `sequences`."""
    return tuple(_inspect_group(pool, group, sequences) for group, pool in enumerate(manager.pools))


def _inspect_group(pool: BlockPool, group: int, sequences: abc.Sequence[SequenceCache]) -> CacheGroupSnapshot:
    counts = np.array(pool.ref_counts)
    known = np.zeros(pool.num_blocks, bool)
    known[list(pool.cached.values())] = True
    touched = np.flatnonzero((counts > 0) | known)
    last = int(touched[-1]) + 1 if touched.size else 0
    shown = min(pool.num_blocks, max(_MIN_BLOCKS_SHOWN, 1 << (last - 1).bit_length() if last else 0))
    per_cell = -(-shown // MAX_CACHE_CELLS)
    cells = -(-shown // per_cell)

    def count(blocks: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, ...]:
        padded = np.zeros(cells * per_cell, np.int64)
        padded[:shown] = blocks[:shown]
        return tuple(padded.reshape(cells, per_cell).sum(axis=1).tolist())

    owners = np.full(cells, -1)
    for index in range(len(sequences) - 1, -1, -1):
        blocks = np.array(_blocks_of(sequences[index], group), np.int64)
        owners[blocks[blocks >= 0] // per_cell] = index
    return CacheGroupSnapshot(
        num_blocks=pool.num_blocks,
        num_shown=shown,
        blocks_per_cell=per_cell,
        window=None if pool.holds_states else pool.window,
        held=count(counts == 1),
        shared=count(counts > 1),
        idle=count((counts == 0) & known),
        owners=tuple(owners.tolist()),
        states=pool.holds_states,
    )


def _blocks_of(cache: SequenceCache, group: int) -> list[int]:
    """All blocks that a sequence holds in a group; -1 for dropped ones."""
    blocks = [block for passage in cache.passages for block in passage.blocks[group]]
    for part in (cache, cache.second_keys):
        if part is not None and part.tables:
            blocks += part.tables[group].blocks
            blocks += part.originals[group].blocks if part.originals else []
    return blocks
