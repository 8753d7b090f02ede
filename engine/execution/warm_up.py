"""A few steps before the first request, so that no stream waits for what is set up when it is first needed.

Responsible for what those steps look like: a prompt that fills a block and begins the next, then decode steps until
they are repeated, greedy and sampled ones. Their blocks belong to nobody, and nothing of them is counted or kept. It
knows nothing of requests or of the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from windlass.engine.api.request import SamplingParams
from windlass.engine.cache.changes import TableChange, TableChanges
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.rotary.scaling import RotarySpec
from windlass.engine.scheduling.plan import (
    NewSequence,
    RotaryRow,
    ScheduledSequence,
    SchedulerOutput,
    Snapshot,
)

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
