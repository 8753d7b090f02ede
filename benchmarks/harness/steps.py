"""A decode step of an engine as a unit of time: each stream draws one token in it."""

from __future__ import annotations

import time

from windlass.engine.core.engine_core import EngineCore

ONE_BY_ONE = {"burst_seconds": 0.0}  # an engine that comes back with each token


def step_seconds(core: EngineCore, streams: int) -> float:
    """Seconds of a step of so many streams. RuntimeError where it was not one token of each that it gave."""
    begin = time.perf_counter()
    outputs = core.step()
    seconds = time.perf_counter() - begin
    check_tokens(sum(len(output.token_ids) for output in outputs), streams)
    return seconds


def check_tokens(tokens: int, streams: int) -> None:
    """RuntimeError where a step of so many streams gave another number of tokens."""
    if tokens != streams:
        raise RuntimeError(f"a step of {streams} streams gave {tokens} tokens")
