"""The largest step that an engine may be asked for, run once before it has pages: what it takes of memory beside them.

Responsible for what such a step looks like: as many tokens as one may have, of a prompt that ends at the longest context and of
streams as long, each of which draws, and log-probabilities of the prompt. Its pages are few, and all contexts but their ends
are the same block of them. Nothing of it is kept.
"""

from __future__ import annotations

import torch

from windlass.engine.api.request import SamplingParams
from windlass.engine.cache.changes import TableChange, TableChanges
from windlass.engine.cache.storage import KVCache
from windlass.engine.execution.rank_runner import RankRunner
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.policy import RotaryPlanner
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.plan import NewSequence, RotaryRow, ScheduledSequence, SchedulerOutput
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
