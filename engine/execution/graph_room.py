"""What captured decode steps take of a device's memory, found by capturing some before there are pages.

All share one memory, which the largest fills; the next one shows what each of the others takes besides. So it is with those
whose rows have ranges, which are captured later. Nothing of them is kept.
"""

from __future__ import annotations

import itertools

import torch

from windlass.engine.cache.storage import KVStorage
from windlass.engine.execution.ranged_graphs import MOST_RANGED, RangedKey
from windlass.engine.execution.runner import Runner
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.kernels import DeviceMemory


def bytes_of_graphs(
    decoder: Decoder,
    memory: DeviceMemory,
    *,
    cache_dtype: torch.dtype,
    block_size: int,
    most_rows: int,
    most_blocks: int,
) -> int:
    """0 where nothing is captured. Raises what torch raises where there is no memory for them."""
    spec, backend = decoder.spec, decoder.backend
    cache = KVStorage(spec.kv_groups, [1] * len(spec.kv_groups), block_size, cache_dtype, backend)
    tables = RotaryTables(1, [group.base for group in spec.rotary_groups], backend)
    runner = Runner(decoder, cache, tables, Sampler(spec.vocab_size, backend), block_size)
    memory.give_back()
    seen = [memory.taken()]
    runner.make_graphs(most_rows, most_blocks)
    if runner.graphs is None:
        return 0
    sizes = runner.graphs.sizes
    for size in sizes[:2]:
        runner.graphs.capture([size])
        if runner.graphs.obstacle is not None:
            break
        memory.give_back()
        seen.append(memory.taken())
    found = _of_all(seen, len(sizes))
    largest = runner.graphs.largest_ranged
    if largest is not None and largest.rows not in runner.graphs.captured and runner.graphs.obstacle is None:
        runner.graphs.capture([largest.rows])
        memory.give_back()
    if largest is not None and runner.graphs.obstacle is None:
        seen = [memory.taken()]
        for key in (largest, RangedKey(min(runner.graphs.captured), 2)):
            runner.graphs.capture_ranged(key)
            if runner.graphs.ranged.obstacle is not None:
                break
            memory.give_back()
            seen.append(memory.taken())
        found += _of_all(seen, MOST_RANGED)
    return found


def _of_all(seen: list[int], count: int) -> int:
    """What so many take, if none behind those that were seen takes more than the last of them. seen: taken in between."""
    steps = [max(0, after - before) for before, after in itertools.pairwise(seen)]
    return sum(steps) + (count - len(steps)) * steps[-1] if steps else 0
