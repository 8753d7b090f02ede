"""Expected duration of the next step."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.engines import greedy, make_core

import windlass
from windlass.engine.core import engine_core
from windlass.engine.core.engine_core import StepTimeEstimator

DEMO = Path(windlass.__file__).parent / "models" / "demo"


def test_nothing_is_known_before_a_step_so_small_was_seen() -> None:
    seen = StepTimeEstimator()
    assert seen.seconds(1) is None
    seen.observe(64, 1.0)
    assert seen.seconds(1) is None and seen.seconds(63) is None
    assert seen.seconds(64) == seen.seconds(127) == 1.0


def test_the_slowest_of_a_size_counts() -> None:
    seen = StepTimeEstimator()
    for seconds in (0.5, 2.0, 1.0):
        seen.observe(8, seconds)
    assert seen.seconds(15) == 2.0


def test_a_larger_size_is_the_nearest_one_below_doubled_for_each_between() -> None:
    seen = StepTimeEstimator()
    seen.observe(1, 0.25)
    seen.observe(16, 1.0)
    assert seen.seconds(128) == 8.0
    assert seen.seconds(4) == 1.0  # 0.25 doubled twice
    seen.observe(1, 30.0)  # one token behind a very long context
    assert seen.seconds(16) == 30.0
    assert seen.seconds(0) is None


def test_an_engine_announces_what_it_cannot_know_and_what_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(DEMO)
    told: list[float | None] = []
    core.add(greedy("a", [5, 6, 7], max_tokens=3))
    while core.has_work():
        core.step(told.append)
    assert told == [None, None]  # a prompt of three tokens, and then the first step of one
    monkeypatch.setattr(engine_core, "ANNOUNCE_SECONDS", 0.0)
    core.add(greedy("b", [5, 6, 7, 8], max_tokens=1))
    core.step(told.append)
    assert len(told) == 3 and told[-1] is not None and 0.0 < told[-1] < 60.0
