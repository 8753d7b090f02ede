"""Dummy runs: memory profiling and warm-up with sequences that belong to no request.

`profile_largest_step` and `profile_graph_memory` run before the KV cache is allocated and free everything. `warm_up` runs before
the first request, or until it arrives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

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
    """The peak memory of the largest step, in bytes, beyond what was allocated before.

    The step computes a chunk of the longest context, of `length` tokens, with prompt log-probabilities, next to streams that all
    sample. All ranks must call this at the same time. Raises torch's error if there is not enough memory.
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
            plane.zero_()  # reused memory may hold NaNs, which have no log-probabilities
    tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
    specs = RotaryPlanner(spec.rotary_groups, None).plan(length, update="frozen").stage(1).specs
    row = tables.acquire(specs)
    shared = (0,) * (start // block_size)
    own = [(*shared, *range(1, 1 + written))]
    own += [((0,) * ((end - 1) // block_size) + (1 + written + stream,)) for stream in range(streams)]
    new, chunks = [], []
    for seq_id, blocks in enumerate(own):
        changes = (TableChange(appended=blocks),) * groups + (TableChange(appended=(seq_id,)),) * has_states
        new.append(_dummy_sequence(seq_id, _PROFILE_SAMPLING, end, end, changes, row))
        samples = (seq_id,) if spec.generates else ()
        chunks.append(ScheduledSequence(seq_id, end - 1, 1, end, samples=samples))
    chunks[0] = chunks[0]._replace(start=start, num_tokens=chunk, prompt_logprobs=1 if spec.generates else None)
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
    """An estimate of the memory of all CUDA graphs, in bytes; 0 if none are captured.

    Captures a few graphs and extrapolates: all graphs share one memory pool, which the largest fills. adapters: the adapters that
    rows may have, which need not be loaded. Raises torch's error if there is not enough memory.
    """
    spec, backend = decoder.spec, decoder.backend
    cache = KVCache(spec.kv_groups, [1] * len(spec.kv_groups), block_size, cache_dtype, backend)
    tables = RotaryTables(1, [group.base for group in spec.rotary_groups], backend)
    runner = RankRunner(decoder, cache, tables, block_size, adapters)
    memory.release_cached()
    before = memory.used_by_process()
    runner.prepare_graphs(max_rows, max_blocks)
    graphs = runner.graphs
    if graphs is None:
        return 0
    sizes = graphs.sizes
    keys = [GraphKey(size) for size in sizes[:2]]
    found = _extrapolate(_capture_and_measure(graphs, memory, keys, before), len(sizes))
    if graphs.obstacle is None and adapters is not None:
        keys = [GraphKey(size, adapted=True) for size in reversed(graphs.captured)]
        found += _extrapolate(_capture_and_measure(graphs, memory, keys, memory.used_by_process()), len(sizes))
    largest = graphs.largest_ranged
    if largest is not None and largest.rows not in graphs.captured and graphs.obstacle is None:
        graphs.capture([largest.rows])
        memory.release_cached()
    if largest is not None and graphs.obstacle is None:
        keys = [largest, GraphKey(min(graphs.captured), 2)]
        measured = _capture_and_measure(graphs, memory, keys, memory.used_by_process())
        found += _extrapolate(measured, MAX_RANGED_GRAPHS)
    return found


def _capture_and_measure(graphs: DecodeGraphs, memory: DeviceMemory, keys: list[GraphKey], before: int) -> list[int]:
    """Capture steps until one fails: the memory used `before`, and after each of them, in bytes."""
    measured = [before]
    for key in keys:
        if key.ranges or key.adapted:
            graphs.lazy_graphs.capture(key)
        else:
            graphs.capture([key.rows])
        if graphs.obstacle is not None or graphs.lazy_graphs.obstacle is not None:
            break
        memory.release_cached()
        measured.append(memory.used_by_process())
    return measured


def _extrapolate(measured: list[int], count: int) -> int:
    """The memory of `count` captures, if each after the measured ones needs as much as the last of those."""
    steps = [max(0, after - before) for before, after in itertools.pairwise(measured)]
    return sum(steps) + (count - len(steps)) * steps[-1] if steps else 0


_DUMMY_ID = -1  # not the id of any request's sequence

_DECODE_STEPS = 4  # a new shape, two recordings, one replay

_GREEDY = SamplingParams(temperature=0.0)

_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)


def warm_up(
    runner: ModelRunner,
    specs: Sequence[RotarySpec],
    *,
    max_length: int,
    max_seconds: float,
    interrupted: Callable[[], bool],
) -> None:
    """Run a prompt and a few decode steps on the first blocks of every KV group, which must be free.

    specs: one for each rotary group. max_length: maximum length of a sequence; if too short, nothing
    runs. max_seconds: no step starts later, so that a slow model does not delay the start. interrupted: no step starts once it is
    true.
    """
    started = time.monotonic()
    prompt = min(runner.block_size + 1, max_length - _DECODE_STEPS)
    if prompt < 1:
        return
    blocks, spec = tuple(range(-(-(prompt + _DECODE_STEPS) // runner.block_size))), runner.decoder.spec
    tables = (TableChange(appended=blocks),) * (len(spec.kv_groups) + (spec.state_group is not None))
    row = runner.tables.acquire(specs)
    samples = (_DUMMY_ID,) if spec.generates else ()
    try:
        for step in range(1 + _DECODE_STEPS):
            if time.monotonic() - started > max_seconds or interrupted():
                break
            # A new sequence in every step, with that step's settings, as a model that does not generate samples nothing.
            known = prompt + step
            sampling = _SAMPLED if step == _DECODE_STEPS else _GREEDY
            sequence = _dummy_sequence(_DUMMY_ID, sampling, prompt, known, tables, row)
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


def _dummy_sequence(
    seq_id: int,
    sampling: SamplingParams,
    num_prompt_tokens: int,
    num_tokens: int,
    tables: tuple[TableChange, ...],
    rotary_id: int,
) -> NewSequence:
    """A sequence of `num_tokens` times token 0."""
    token_ids = (0,) * num_tokens
    changes = TableChanges(True, tables)
    return NewSequence(seq_id, 0, sampling, 0, num_prompt_tokens, (), token_ids, changes, rotary_id)
