"""Engine with defects: the first step of a prompt of FATAL tokens fails, of STUCK tokens hangs.

The last forward pass of a prompt of FULL tokens raises as on a GPU without memory, of LOST as on a failed GPU.

The embedding of POISONED is not finite, and so are the logits of sequences that contain it.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from windlass.engine.core.engine_process import default_core
from windlass.engine.core.messages import ProgressCallback

FATAL, STUCK = 77, 78
FULL, LOST = 79, 80
POISONED = 4000  # of the bundled model, which never generates it


def core(config: Any, progress: ProgressCallback) -> Any:
    made: Any = default_core(config, progress)
    decoder = made.runner.decoder
    if len(decoder.embedding) > POISONED:
        decoder.embedding = decoder.embedding.clone()  # the head is tied
        decoder.embedding[POISONED] = math.nan
    start, forward = made.runner.start, decoder.forward

    def out_of_luck(batch: Any, cache: Any) -> Any:
        hidden, counts = forward(batch, cache), batch.query_start.diff().tolist()
        lengths = {length for length, count in zip(batch.seq_lens.tolist(), counts, strict=True) if count > 1}
        if FULL in lengths:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if LOST in lengths:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return hidden

    decoder.forward = out_of_luck

    def failing(plan: Any) -> Any:
        lengths = {len(new.token_ids) for new in plan.new}
        if FATAL in lengths:
            raise ArithmeticError("a kernel has failed")
        while STUCK in lengths:
            time.sleep(1)
        return start(plan)

    made.runner.start = failing
    return made
