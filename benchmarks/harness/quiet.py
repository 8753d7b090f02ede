"""Repetition of samples that other processes disturbed."""

from __future__ import annotations

import os
import time
from collections import abc
from typing import TypeVar

from harness.machine import cpu_clock

_Value = TypeVar("_Value")


def quiet(work: abc.Callable[[], _Value], max_foreign: float, retries: int, pause: float) -> tuple[_Value, float, int]:
    """(result, others' share of the machine meanwhile, results thrown away).

    Runs `work` until others used at most `max_foreign` of the machine, `retries` more times at the most, with `pause`
    seconds in between; then the result of the quietest attempt counts.
    """
    best: tuple[_Value, float] | None = None
    for attempt in range(retries + 1):
        start = cpu_clock()
        value = work()
        end = cpu_clock()
        share = end.foreign_share(start, os.cpu_count() or 1) if start and end else 0.0
        if best is None or share < best[1]:
            best = (value, share)
        if share <= max_foreign:
            return value, share, attempt
        if attempt < retries:
            print(f"    others used {share:.0%} of the machine: measuring again", flush=True)
            time.sleep(pause)
    if best is None:
        raise ValueError("retries must not be negative")
    return best[0], best[1], retries
