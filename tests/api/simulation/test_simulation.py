"""The whole server over a simulated operating system: many seeds, the same seed the same run, and planted mistakes found.

A failing seed says how to run it again: `SIMULATION_SEED=N pytest tests/api/simulation -k replay`. With
`SIMULATION_SEEDS=FIRST-LAST` the longest form takes other seeds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulation.planted import MISTAKES, MISTAKES_OF_REPLICAS
from simulation.world import Report, simulate

FIRST_LONG = 1_000  # seeds of the long forms begin behind those of the short one
ENOUGH = 60  # seeds among which every planted mistake shows
# Where it is known to show, its seeds begin there.
SHOWN_BY = {
    "deadlines_are_ignored": 29,
    "a_preempted_request_loses_a_token": 27,
    "nobody_watches_the_engine": 24,
    "a_slow_reader_counts_against_the_engine": 39,
    "everybody_is_told_of_a_death": 29,
}


def told(report: Report) -> str:
    """What a person needs who sees a seed fail."""
    lines = [
        f"seed {report.seed} breaks what is promised: {len(report.violations)} times",
        *(f"  {violation[:1000]}" for violation in report.violations[:8]),
        f"  faults: {[f'{at:.3f} {kind} {of}'.strip() for at, kind, of in report.faults.log[-20:]]}",
        f"run it again: SIMULATION_SEED={report.seed} SIMULATION_REPLICAS={report.replicas} "
        ".venv/bin/pytest tests/api/simulation -k replay",
    ]
    return "\n".join(lines)


def run_seeds(seeds: range, replicas: int = 1) -> list[Report]:
    """Run them all; the first that fails ends it."""
    reports = []
    for seed in seeds:
        report = simulate(seed, replicas)
        assert not report.violations, told(report)
        reports.append(report)
    return reports


def seeds_for(mistake: str, count: int) -> list[int]:
    first = SHOWN_BY.get(mistake, 0)
    return [*range(first, count), *range(first)]


def test_seeds() -> None:
    reports = run_seeds(range(60))
    # The seeds must come to all that could go wrong, or they would show little.
    outcomes = Counter(record.status for report in reports for record in report.records)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert outcomes[200] > 150, outcomes
    assert codes >= {"deadline_exceeded", "engine_unavailable", "internal", "queue_full"}, codes
    assert sum(report.engines > 1 for report in reports) > 5
    happened = {kind for report in reports for _, kind, _ in report.faults.log}
    assert len(happened) > 10, happened


def test_seeds_with_two_engines() -> None:
    """A death is told to whoever the engine had begun with; nobody else notices it while another engine is there."""
    reports = run_seeds(range(40), replicas=2)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert "engine_unavailable" in codes
    assert sum(report.engines > 2 for report in reports) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_seeds() -> None:
    run_seeds(range(FIRST_LONG, FIRST_LONG + 300))
    run_seeds(range(FIRST_LONG, FIRST_LONG + 200), replicas=2)


@pytest.mark.parametrize("mistake", MISTAKES_OF_REPLICAS)
def test_planted_mistakes_with_two_engines_are_found(mistake: str) -> None:
    for seed in seeds_for(mistake, 3 * ENOUGH):
        with MISTAKES_OF_REPLICAS[mistake]():
            if simulate(seed, replicas=2).violations:
                return
    raise AssertionError(f"{mistake}: none of {3 * ENOUGH} seeds shows it")


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_ten_thousand_seeds() -> None:
    first, _, last = os.environ.get("SIMULATION_SEEDS", "").partition("-")
    seeds = range(int(first), int(last) + 1) if first and last else range(2 * FIRST_LONG, 2 * FIRST_LONG + 10_000)
    run_seeds(seeds)


def test_the_same_seed_is_the_same_run() -> None:
    for seed in (3, 7, 11, 20):
        first, second = simulate(seed), simulate(seed)
        assert first.digest == second.digest and first.seconds == second.seconds
        assert first.faults.log == second.faults.log
    assert simulate(3).digest != simulate(7).digest


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str) -> None:
    for seed in seeds_for(mistake, ENOUGH):
        with MISTAKES[mistake]():
            if simulate(seed).violations:
                return
    raise AssertionError(f"{mistake}: none of {ENOUGH} seeds shows it")


@pytest.mark.skipif("SIMULATION_SEED" not in os.environ, reason="runs one seed: set SIMULATION_SEED")
def test_replay() -> None:
    report = simulate(int(os.environ["SIMULATION_SEED"]), int(os.environ.get("SIMULATION_REPLICAS", "1")))
    for record in report.records:
        print(record.ask.request_id, record.ask.path, record.status, record.codes, record.broken, record.finishes)
    print(*(f"{at:.3f} {kind} {of}" for at, kind, of in report.faults.log), sep="\n")
    assert not report.violations, told(report)
