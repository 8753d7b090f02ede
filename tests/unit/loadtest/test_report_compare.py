"""Verdicts on simulated runs: the same server, a slower one, a failing one, too few requests."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from helpers.load_results import simulated_run

from windlass.clients.loadtest.compare import compare
from windlass.clients.loadtest.intervals import compare_means
from windlass.clients.loadtest.results import RequestRecord, RunResult

FAST = {"resamples": 300}


def verdicts(comparison) -> dict[tuple[str, str], str]:
    return {(line.measure, line.statistic): line.verdict for line in comparison.lines}


def test_run_compared_with_itself_shows_no_difference():
    run = simulated_run(count=120, slo={"ttft": 300})
    found = compare(run, run, **FAST)
    assert found.paired and not found.differing and not found.cautions
    assert {line.measure for line in found.lines} >= {"output", "requests", "goodput", "failed", "ttft", "itl", "e2el"}
    for line in found.lines:
        assert line.verdict in ("one run cannot tell", "too few requests")
        assert line.first == line.second and line.change in (0.0, None)


def test_compared_values_equal_the_summaries():
    first, second = simulated_run(seed=1, failing=4), simulated_run(seed=2)
    summaries = [run.summary() for run in (first, second)]
    for line in compare(first, second, **FAST).lines:
        key = {"output": "output_tokens_per_second", "requests": "request_rate"}.get(line.measure)
        for value, summary in zip((line.first, line.second), summaries, strict=True):
            if key:
                assert value == pytest.approx(summary[key])
            elif line.measure == "failed":
                assert value == pytest.approx(summary["failed"] / 60)
            else:
                assert value == pytest.approx(summary[f"{line.measure}_ms"][line.statistic])


def days(*, count: int = 150, slowness: float = 1.0, first_seed: int = 0, spread: float = 0.05) -> list[RunResult]:
    """Three runs of one server, each slower or faster by some percent."""
    chance = random.Random(first_seed)
    return [
        simulated_run(
            count=count, seed=first_seed + k, rate=2, slowness=slowness * (1 + spread * chance.uniform(-1, 1))
        )
        for k in range(3)
    ]


def test_one_run_of_each_side_gets_no_verdict():
    """Intervals within the runs exclude zero, although both are runs of one server."""
    first, second = simulated_run(count=150, seed=1, rate=2), simulated_run(count=150, seed=1, rate=2, slowness=0.9)
    found = compare(first, second, **FAST)
    lines = {(line.measure, line.statistic): line for line in found.lines}
    assert lines["itl", "mean"].interval[1] < 0 and lines["itl", "mean"].change == pytest.approx(-0.1, abs=0.02)
    assert set(verdicts(found).values()) == {"one run cannot tell", "too few requests"}
    assert found.intervals_over == "requests within a run" and found.runs == (1, 1) and found.paired


@pytest.mark.slow
def test_drift_between_runs_is_not_a_difference():
    """A verdict is by chance here. Figures of one run are correlated, so that chance verdicts are rarer than 1 in 20."""
    lucky = 0
    for seed in range(0, 100, 10):
        found = verdicts(compare(days(first_seed=seed, count=40), days(first_seed=seed + 1000, count=40), **FAST))
        lucky += found["itl", "mean"] in ("better", "worse")
    assert lucky <= 3  # of 10; more have a probability of 0.1 %


def test_one_run_against_several_is_refused():
    with pytest.raises(ValueError, match="repeat it, too"):
        compare(simulated_run(), days(), **FAST)
    with pytest.raises(ValueError, match="a run of each side"):
        compare([], days(), **FAST)


def test_intervals_over_runs_are_welch_intervals():
    first, second = days(first_seed=1), days(first_seed=9, slowness=1.2)
    found = {(line.measure, line.statistic): line for line in compare(first, second, **FAST).lines}
    values = [[run.summary()["ttft_ms"]["p50"] for run in side] for side in (first, second)]
    line, expected = found["ttft", "p50"], compare_means(*values, 0.95)
    assert line.first == pytest.approx(expected.first) and line.second == pytest.approx(expected.second)
    assert line.interval == pytest.approx((expected.interval.low, expected.interval.high))


def test_slower_server_is_worse():
    quick, slow = days(first_seed=1), days(first_seed=5, slowness=1.4)
    worse, better = verdicts(compare(quick, slow, **FAST)), verdicts(compare(slow, quick, **FAST))
    for name in [("itl", "mean"), ("itl", "p50"), ("tpot", "mean"), ("ttft", "p50"), ("e2el", "p50")]:
        assert worse[name] == "worse" and better[name] == "better"
    assert worse["ttft", "p99"] == "too few requests"


def test_more_throughput_is_better():
    """A closed loop: the same requests in two thirds of the time."""

    def steady(gap: float) -> RunResult:
        records = [
            RequestRecord(
                index=k, intended=k * gap, sent=k * gap, chunks=(k * gap + 0.1,), ended=k * gap + 0.1, output_tokens=1
            )
            for k in range(100)
        ]
        return RunResult(records=tuple(records), duration_s=100 * gap)

    slow, quick = [steady(gap) for gap in (0.29, 0.3, 0.31)], [steady(gap) for gap in (0.19, 0.2, 0.21)]
    found = verdicts(compare(slow, quick, **FAST))
    assert found["output", "per second"] == found["requests", "per second"] == "better"
    assert verdicts(compare(quick, slow, **FAST))["output", "per second"] == "worse"


def test_failures_count_and_are_cautioned():
    good = [simulated_run(count=200, seed=seed) for seed in (1, 2)]
    bad = [simulated_run(count=200, seed=seed, failing=20) for seed in (1, 2)]
    found = compare(good, bad, **FAST)
    assert verdicts(found)["failed", "share"] == "worse"
    assert any("second side's run 2: 20 of 200 requests failed" in caution for caution in found.cautions)
    assert any("second run: 20 of 200 requests failed" in c for c in compare(good[0], bad[0], **FAST).cautions)


def test_cautions_and_differing_settings():
    first = simulated_run(limited=True, interrupted=True, slo={"ttft": 5})
    second = dataclasses.replace(simulated_run(rate=8), server={"model": "other"})
    found = compare(first, second, **FAST)
    assert found.differing["rate"] == ("4", "8") and found.differing["server.model"] == ("demo", "other")
    assert found.differing["server.rotary.factor"] == ("4", "–")
    text = "; ".join(found.cautions)
    for part in ("first run: the run was interrupted", "first run: the load generator", "different SLOs"):
        assert part in text
    assert not any(line.measure == "goodput" for line in found.lines)


def test_settings_are_compared_per_side():
    first = [simulated_run(seed=seed, rate=4) for seed in (1, 2)]
    second = [simulated_run(seed=seed, rate=rate) for seed, rate in ((2, 8), (1, 9))]
    found = compare(first, second, **FAST)
    assert found.differing == {"rate": ("4", "8, 9")}  # both sides have the same two seeds
    assert any("the second side differ in rate" in caution for caution in found.cautions)


def test_growing_waits_are_cautioned():
    overloaded, calm = simulated_run(rate=200, count=150), simulated_run(rate=1, count=150)
    found = compare(calm, overloaded, **FAST)
    assert any("second run: time to first token kept growing" in caution for caution in found.cautions)
    assert not any("first run: time to first token" in caution for caution in found.cautions)


@pytest.mark.slow
def test_requests_pair_by_index_and_length_only():
    run = simulated_run(count=40)
    shuffled = dataclasses.replace(run, records=tuple(reversed(run.records)))
    assert compare(run, shuffled, **FAST).paired
    unknown = dataclasses.replace(run.records[5], outcome="timeout", input_tokens=0, chunks=(), output_tokens=0)
    failed = dataclasses.replace(run, records=(*run.records[:5], unknown, *run.records[6:]))
    assert compare(run, failed, **FAST).paired
    assert not compare(run, simulated_run(count=41), **FAST).paired
    assert not compare(run, simulated_run(count=40, input_tokens=(7,)), **FAST).paired
    twice = dataclasses.replace(run, records=(*run.records, run.records[0]))
    assert not compare(twice, twice, **FAST).paired


@pytest.mark.parametrize(
    "run",
    [
        RunResult(records=(), duration_s=0.0),
        RunResult(records=(RequestRecord(index=0, intended=0.0, outcome="connect"),), duration_s=0.0),
    ],
)
def test_empty_runs_can_be_compared(run):
    found = compare(simulated_run(count=30), run, **FAST)
    assert all(line.verdict in ("too few requests", "one run cannot tell") for line in found.lines)
    assert not any(line.measure == "ttft" for line in found.lines)
    json.dumps(found.to_dict(), allow_nan=False)
    json.dumps(compare(run, run, **FAST).to_dict(), allow_nan=False)


def with_cache(run: RunResult, cached: float, reused: float | None) -> RunResult:
    """The run with cached and reused shares of each prompt, slightly smaller in every second request."""
    records = []
    for record in run.records:
        less = 1 - 0.01 * (record.index % 2)
        counts = (None if share is None else round(share * less * 10_000) for share in (cached, reused))
        cached_tokens, reused_tokens = counts
        records.append(
            dataclasses.replace(record, input_tokens=10_000, cached_tokens=cached_tokens, reused_tokens=reused_tokens)
        )
    return dataclasses.replace(run, records=tuple(records))


@pytest.mark.slow
def test_cache_shares_are_compared_where_both_sides_report_them():
    runs = [simulated_run(count=40, seed=seed) for seed in (1, 2, 3)]
    plain = [with_cache(run, 0.3 + 0.01 * k, 0.0) for k, run in enumerate(runs)]
    taken = [with_cache(run, 0.9 + 0.01 * k, 0.6 + 0.01 * k) for k, run in enumerate(runs)]
    lines = {line.measure: line for line in compare(plain, taken, **FAST).lines}
    assert lines["cached"].first == pytest.approx(0.31 * 0.995) and lines["cached"].second == pytest.approx(
        0.91 * 0.995
    )
    assert lines["reused"].first == 0 and lines["reused"].second == pytest.approx(0.61 * 0.995)
    assert lines["cached"].statistic == "share" and lines["cached"].verdict == lines["reused"].verdict == "better"
    assert {line.verdict for line in compare(taken, plain, **FAST).lines if line.measure == "cached"} == {"worse"}
    single = {line.measure: line for line in compare(plain[0], taken[0], **FAST).lines}
    assert single["reused"].second == pytest.approx(0.6 * 0.995) and single["reused"].verdict == "one run cannot tell"
    low, high = single["cached"].interval
    assert low < 0.6 * 0.995 < high
    assert "reused" not in measures_of(compare(plain, plain, **FAST))  # zero on both sides
    unknown = [with_cache(run, 0.5, None) for run in runs]
    assert measures_of(compare(unknown, taken, **FAST)) & {"cached", "reused"} == {"cached"}


def measures_of(comparison) -> set[str]:
    return {line.measure for line in comparison.lines}
