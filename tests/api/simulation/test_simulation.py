"""The entire server on a simulated operating system: many seeds, reproducible runs, and planted defects that are detected.

The message of a failing seed has the command that runs it again: `SIMULATION_SEED=N pytest tests/api/simulation -k replay`.
With `SIMULATION_SEEDS=FIRST-LAST` the longest form uses other seeds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulation.planted import DEFECTS, REPLICA_DEFECTS
from simulation.world import Report, simulate

FIRST_LONG = 1_000  # first seed of the long forms
ENOUGH = 60  # seeds that detect every planted defect
# The first seed, if one is known to detect the defect.
DETECTED_BY = {
    "deadlines_are_ignored": 29,
    "preempted_request_loses_a_token": 27,
    "engine_is_not_watched": 24,
    "slow_reader_counts_as_load_of_the_engine": 39,
    "every_death_is_reported": 29,
}


def describe(report: Report) -> str:
    """Violations of a seed, its last faults, and the command that runs it again."""
    lines = [
        f"seed {report.seed} has {len(report.violations)} violations",
        *(f"  {violation[:1000]}" for violation in report.violations[:8]),
        f"  faults: {[f'{at:.3f} {kind} {of}'.strip() for at, kind, of in report.faults.log[-20:]]}",
        f"to run it again: SIMULATION_SEED={report.seed} SIMULATION_REPLICAS={report.replicas} "
        ".venv/bin/pytest tests/api/simulation -k replay",
    ]
    return "\n".join(lines)


def run_seeds(seeds: range, replicas: int = 1) -> list[Report]:
    """Run seeds until one fails."""
    reports = []
    for seed in seeds:
        report = simulate(seed, replicas)
        assert not report.violations, describe(report)
        reports.append(report)
    return reports


def seeds_for(defect: str, count: int) -> list[int]:
    first = DETECTED_BY.get(defect, 0)
    return [*range(first, count), *range(first)]


def test_seeds_have_no_violations() -> None:
    reports = run_seeds(range(60))
    # The seeds must cover most faults and outcomes.
    outcomes = Counter(record.status for report in reports for record in report.records)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert outcomes[200] > 150, outcomes
    assert codes >= {"deadline_exceeded", "engine_unavailable", "internal", "queue_full"}, codes
    assert sum(report.engines > 1 for report in reports) > 5
    happened = {kind for report in reports for _, kind, _ in report.faults.log}
    assert len(happened) > 10, happened


def test_seeds_with_two_engines_have_no_violations() -> None:
    """A death fails only the started requests of the engine, if another engine is ready."""
    reports = run_seeds(range(40), replicas=2)
    codes = {code for report in reports for record in report.records for code in record.codes}
    assert "engine_unavailable" in codes
    assert sum(report.engines > 2 for report in reports) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_seeds_have_no_violations() -> None:
    run_seeds(range(FIRST_LONG, FIRST_LONG + 300))
    run_seeds(range(FIRST_LONG, FIRST_LONG + 200), replicas=2)


@pytest.mark.parametrize("defect", REPLICA_DEFECTS)
def test_planted_defects_of_two_engines_are_detected(defect: str) -> None:
    for seed in seeds_for(defect, 3 * ENOUGH):
        with REPLICA_DEFECTS[defect]():
            if simulate(seed, replicas=2).violations:
                return
    raise AssertionError(f"{defect}: none of {3 * ENOUGH} seeds detects it")


@pytest.mark.soak
@pytest.mark.timeout(8 * 3600)
def test_ten_thousand_seeds_have_no_violations() -> None:
    first, _, last = os.environ.get("SIMULATION_SEEDS", "").partition("-")
    seeds = range(int(first), int(last) + 1) if first and last else range(2 * FIRST_LONG, 2 * FIRST_LONG + 10_000)
    run_seeds(seeds)


def test_runs_of_a_seed_are_equal() -> None:
    for seed in (3, 7, 11, 20):
        first, second = simulate(seed), simulate(seed)
        assert first.digest == second.digest and first.seconds == second.seconds
        assert first.faults.log == second.faults.log
    assert simulate(3).digest != simulate(7).digest


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_detected(defect: str) -> None:
    for seed in seeds_for(defect, ENOUGH):
        with DEFECTS[defect]():
            if simulate(seed).violations:
                return
    raise AssertionError(f"{defect}: none of {ENOUGH} seeds detects it")


@pytest.mark.skipif("SIMULATION_SEED" not in os.environ, reason="runs one seed: set SIMULATION_SEED")
def test_replay() -> None:
    report = simulate(int(os.environ["SIMULATION_SEED"]), int(os.environ.get("SIMULATION_REPLICAS", "1")))
    for record in report.records:
        print(record.ask.request_id, record.ask.path, record.status, record.codes, record.broken, record.finishes)
    print(*(f"{at:.3f} {kind} {of}" for at, kind, of in report.faults.log), sep="\n")
    assert not report.violations, describe(report)
