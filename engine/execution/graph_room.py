"""What captured decode steps take of a device's memory, found by capturing some before there are pages.

All share one memory, which the largest fills; the next one shows what each of the others takes besides. So it is with those
whose rows have adapters, and those whose rows have ranges, which are captured later. Nothing of them is kept.
"""

from __future__ import annotations

import itertools

import torch

from windlass.engine.cache.storage import KVCache
from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.graphs_on_demand import MAX_RANGED_GRAPHS, GraphKey
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.kernels import DeviceMemory


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
