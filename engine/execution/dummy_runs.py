"""Dummy runs: memory profiling and warm-up with sequences that belong to no request.

`profile_largest_step` returns the peak memory of the largest step (longest context, all streams sampling, prompt log-probabilities); `profile_graph_memory` captures a few CUDA graphs and extrapolates, as all graphs share one memory pool that the largest fills; both run before the KV cache is allocated and free everything. `warm_up` runs a prompt and a few decode steps before the first request.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from windlass.engine.cache.cache_operations import TableChange, TableChanges
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.cuda_graphs import MAX_RANGED_GRAPHS, DecodeGraphs, GraphKey
from windlass.engine.execution.model_runner import ModelRunner, RankRunner
from windlass.engine.interface.request import SamplingParams
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.rope_scaling import RotarySpec
from windlass.engine.rotary.rotary_policy import RotaryPlanner
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.scheduler_output import (
    NewSequence,
    RotaryRow,
    ScheduledSequence,
    SchedulerOutput,
    Snapshot,
)
from windlass.kernels import DeviceMemory

_PROFILE_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)


def profile_largest_step(
    decoder: Decoder,
    memory: DeviceMemory,
    *,
    cache_dtype: torch.dtype,
    block_size: int,
    max_tokens: int,
    max_seqs: int,
    length: int,
) -> int:
    """What the step has alive at once, beside what was there before. length: tokens of the longest context.

    Where there are several ranks, all of them call it at the same time. Raises what torch raises where there is no memory for it.
    """
    spec = decoder.spec
    streams = min(max_seqs, max_tokens) - 1 if spec.generates and not spec.is_bidirectional else 0
    chunk = min(max_tokens - streams, length)
    start = 0 if spec.is_bidirectional else length - chunk
    end = start + chunk
    written = -(-end // block_size) - start // block_size
    groups = len(spec.kv_groups)
    cache = KVCache(
        spec.kv_groups,
        [1 + written + streams] * groups,
        block_size,
        cache_dtype,
        decoder.backend,
        states=spec.state_group,
        num_states=1 + streams,
    )
    has_states = spec.state_group is not None
    for planes in cache.planes:
        for plane in planes:
            plane.zero_()  # memory that was another's may hold what is no number, and none has a log-probability
    tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
    specs = RotaryPlanner(spec.rotary_groups, None).plan(length, update="frozen").stage(1).specs
    row = tables.acquire(specs)
    shared = (0,) * (start // block_size)
    own = [(*shared, *range(1, 1 + written))]
    own += [((0,) * ((end - 1) // block_size) + (1 + written + stream,)) for stream in range(streams)]
    new = [
        NewSequence(
            seq_id=seq_id,
            index=0,
            sampling=_PROFILE_SAMPLING,
            seed=0,
            num_prompt_tokens=end,
            stop_ids=(),
            token_ids=(0,) * end,
            tables=TableChanges(
                True, (TableChange(appended=blocks),) * groups + (TableChange(appended=(seq_id,)),) * has_states
            ),
            rotary_id=row,
        )
        for seq_id, blocks in enumerate(own)
    ]
    chunks = [
        ScheduledSequence(
            seq_id,
            start if seq_id == 0 else end - 1,
            chunk if seq_id == 0 else 1,
            end,
            samples=(seq_id,) if spec.generates else (),
            prompt_logprobs=1 if seq_id == 0 and spec.generates else None,
        )
        for seq_id in range(len(own))
    ]
    plan = SchedulerOutput(
        step=1, rotary_rows=(RotaryRow(row, specs),), new=tuple(new), sequences=tuple(reversed(chunks))
    )
    memory.release_cached()
    memory.reset_peak()
    before = memory.allocated()
    ranks = decoder.backend.options.ranks
    if ranks is None or ranks.rank == 0:
        ModelRunner(decoder, cache, tables, Sampler(spec.vocab_size, decoder.backend), block_size).execute(plan)
    else:
        RankRunner(decoder, cache, tables, block_size).execute_rank(plan)
    return memory.peak() - before


def profile_graph_memory(
    decoder: Decoder,
    memory: DeviceMemory,
    *,
    cache_dtype: torch.dtype,
    block_size: int,
    max_rows: int,
    max_blocks: int,
    adapters: LoadedAdapters | None = None,
) -> int:
    """0 where nothing is captured. adapters: that rows may have, none of which has to be loaded. Raises what torch raises where
    there is no memory for them."""
    spec, backend = decoder.spec, decoder.backend
    cache = KVCache(spec.kv_groups, [1] * len(spec.kv_groups), block_size, cache_dtype, backend)
    tables = RotaryTables(1, [group.base for group in spec.rotary_groups], backend)
    runner = ModelRunner(decoder, cache, tables, Sampler(spec.vocab_size, backend), block_size, adapters=adapters)
    memory.release_cached()
    measured = [memory.used_by_process()]
    runner.make_graph_runner(max_rows, max_blocks)
    graphs = runner.graphs
    if graphs is None:
        return 0
    sizes = graphs.sizes
    for size in sizes[:2]:
        graphs.capture([size])
        if graphs.obstacle is not None:
            break
        memory.release_cached()
        measured.append(memory.used_by_process())
    found = _extrapolate(measured, len(sizes))
    if graphs.obstacle is None and adapters is not None:
        kinds = [GraphKey(size, adapted=True) for size in reversed(graphs.captured)]
        found += _extrapolate(_capture_and_measure(graphs, memory, kinds), len(sizes))
    largest = graphs.largest_ranged
    if largest is not None and largest.rows not in graphs.captured and graphs.obstacle is None:
        graphs.capture([largest.rows])
        memory.release_cached()
    if largest is not None and graphs.obstacle is None:
        kinds = [largest, GraphKey(min(graphs.captured), 2)]
        found += _extrapolate(_capture_and_measure(graphs, memory, kinds), MAX_RANGED_GRAPHS)
    return found


def _capture_and_measure(graphs: DecodeGraphs, memory: DeviceMemory, kinds: list[GraphKey]) -> list[int]:
    """Capture these, as far as that can be done: what was taken before, and after each of them."""
    measured = [memory.used_by_process()]
    for kind in kinds:
        graphs.capture_key(kind)
        if graphs.lazy_graphs.obstacle is not None:
            break
        memory.release_cached()
        measured.append(memory.used_by_process())
    return measured


def _extrapolate(measured: list[int], count: int) -> int:
    """What so many take, if none behind those that were seen takes more than the last of them. seen: taken in between."""
    steps = [max(0, after - before) for before, after in itertools.pairwise(measured)]
    return sum(steps) + (count - len(steps)) * steps[-1] if steps else 0


_DUMMY_ID = -1  # no sequence of a request has this id

_DECODE_STEPS = 4  # a shape is met, recorded twice, repeated

_GREEDY = SamplingParams(temperature=0.0)

_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)


def warm_up(
    runner: ModelRunner,
    specs: Sequence[RotarySpec],
    *,
    num_groups: int,
    block_size: int,
    max_length: int,
    max_seconds: float,
) -> None:
    """Run steps on the first blocks of every KV group, which have to be free.

    A model that generates nothing draws nothing here either.

    specs: the rotation, one per rotary group. num_groups: KV groups. room: tokens that a sequence can hold; nothing is
    done where that is too few. max_seconds: no step begins later, as the start shall not wait for a slow model.
    """
    started = time.monotonic()
    prompt = min(block_size + 1, max_length - _DECODE_STEPS)
    if prompt < 1:
        return
    blocks = tuple(range(-(-(prompt + _DECODE_STEPS) // block_size)))
    row = runner.tables.acquire(specs)
    samples = (_DUMMY_ID,) if runner.decoder.spec.generates else ()
    try:
        for step in range(1 + _DECODE_STEPS):
            if time.monotonic() - started > max_seconds:
                break
            # Begun anew in every step, with the settings of that step.
            known = prompt + step
            sequence = NewSequence(
                seq_id=_DUMMY_ID,
                index=0,
                sampling=_SAMPLED if step == _DECODE_STEPS else _GREEDY,
                seed=0,
                num_prompt_tokens=prompt,
                stop_ids=(),
                token_ids=(0,) * known,  # not what was drawn: a model may draw nothing at all
                tables=TableChanges(True, (TableChange(appended=blocks),) * num_groups),
                rotary_id=row,
            )
            start = known - 1 if step else 0
            chunk = ScheduledSequence(_DUMMY_ID, start, known - start, known, samples=samples)
            plan = SchedulerOutput(
                step=step + 1,
                removed=(_DUMMY_ID,) if step else (),
                rotary_rows=(RotaryRow(row, tuple(specs)),),
                new=(sequence,),
                sequences=(chunk,),
            )
            runner.execute(plan)
    finally:
        runner.tables.release(row)
        runner.restore(Snapshot(0))
        runner.positions_computed = 0
