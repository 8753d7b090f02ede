"""The real engine with a defect: a step fails that begins a sequence whose prompt has FATAL tokens, and hangs at STUCK."""

from __future__ import annotations

import time
from typing import Any

from windlass.engine.core.loop import ProgressCallback, default_core

FATAL, STUCK = 77, 78


def core(config: Any, progress: ProgressCallback) -> Any:
    made: Any = default_core(config, progress)
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
