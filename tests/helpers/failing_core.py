"""The real engine with defects: a step fails that begins a sequence whose prompt has FATAL tokens, and hangs at STUCK.

The embedding of the token POISONED is not finite, and so are the logits of whoever uses it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from windlass.engine.core.loop import ProgressCallback, default_core

FATAL, STUCK = 77, 78
POISONED = 4000  # of the bundled model, and nothing that it would say


def core(config: Any, progress: ProgressCallback) -> Any:
    made: Any = default_core(config, progress)
    decoder = made.runner.decoder
    if len(decoder.embedding) > POISONED:
        decoder.embedding = decoder.embedding.clone()  # the head is the same tensor
        decoder.embedding[POISONED] = math.nan
    execute = made.runner.execute

    def failing(plan: Any) -> Any:
        lengths = {len(new.token_ids) for new in plan.new}
        if FATAL in lengths:
            raise ArithmeticError("a kernel has failed")
        while STUCK in lengths:
            time.sleep(1)
        return execute(plan)

    made.runner.execute = failing
    return made
