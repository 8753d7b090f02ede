"""A few steps before the first request, so that no stream waits for what is set up when it is first needed.

Responsible for what those steps look like: a prompt that fills a block and begins the next, then decode steps until
they are repeated, greedy and sampled ones. Their blocks belong to nobody, and nothing of them is counted or kept. It
knows nothing of requests or of the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from windlass.engine.api.request import SamplingParams
from windlass.engine.execution.runner import Runner
from windlass.engine.rotary.scaling import RotarySpec
from windlass.engine.scheduling.plan import SampleSlot, ScheduledSequence, SchedulerOutput

_SEQUENCE = -1  # no sequence of a request has this id
_DECODE_STEPS = 4  # a shape is met, recorded twice, repeated
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)


def warm_up(
    runner: Runner, specs: Sequence[RotarySpec], *, num_groups: int, block_size: int, room: int, most_seconds: float
) -> None:
    """Run steps on the first blocks of every KV group, which have to be free.

    specs: the rotation, one per rotary group. num_groups: KV groups. room: tokens that a sequence can hold; nothing is
    done where that is too few. most_seconds: no step begins later, as the start shall not wait for a slow model.
    """
    started = time.monotonic()
    prompt = min(block_size + 1, room - _DECODE_STEPS)
    if prompt < 1:
        return
    token_ids = [0] * prompt
    blocks = list(range(-(-(prompt + _DECODE_STEPS) // block_size)))
    chunk = ScheduledSequence(
        seq_id=_SEQUENCE,
        start=0,
        num_tokens=prompt,
        token_ids=token_ids,
        block_tables=[blocks] * num_groups,
        rotary_id=runner.tables.acquire(specs),
        first_position=0,
        num_prompt_tokens=prompt,
    )
    try:
        for step in range(1 + _DECODE_STEPS):
            if time.monotonic() - started > most_seconds:
                break
            sampling = _SAMPLED if step == _DECODE_STEPS else _GREEDY
            sample = SampleSlot(_SEQUENCE, 0, sampling, seed=0, num_prompt_tokens=prompt, token_ids=token_ids)
            runner.execute(SchedulerOutput(sequences=[replace(chunk, samples=(sample,))]))
            chunk = replace(chunk, start=len(token_ids), num_tokens=1)
            token_ids.append(0)  # not what was drawn: a model may draw nothing at all
    finally:
        runner.tables.release(chunk.rotary_id)
        runner.sampler.forget(_SEQUENCE)
        runner.positions_computed = 0
