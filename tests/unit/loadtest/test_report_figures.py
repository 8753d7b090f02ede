"""Figures of the charts, against counting by hand and numpy."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from helpers.load_results import simulated_run
from hypothesis import given
from hypothesis import strategies as st

from windlass.clients.loadtest import figures
from windlass.clients.loadtest.results import NamedRun, RequestRecord, RunResult

RUN = simulated_run(rate=6, count=80, failing=5, seed=3)


def test_gaps_are_at_input_length_plus_position():
    record = RequestRecord(
        index=0, intended=0, sent=0, chunks=(1.0, 1.01, 1.03), ended=1.04, input_tokens=100, output_tokens=3
    )
    found = figures.gaps_at_context(record)
    assert [context for context, _ in found] == [101, 102] and [gap for _, gap in found] == pytest.approx([10, 20])
    twice = dataclasses.replace(record, output_tokens=6)
    assert [context for context, _ in figures.gaps_at_context(twice)] == [102, 104]
    unknown = dataclasses.replace(record, output_tokens=0)
    assert [context for context, _ in figures.gaps_at_context(unknown)] == [101, 102]


def test_speed_counts_tokens_and_not_chunks():
    records = [
        RequestRecord(index=0, intended=0, sent=0, chunks=(1.0, 1.1, 1.2), ended=1.3, input_tokens=9, output_tokens=6)
    ]
    (entry,) = figures.against_context([NamedRun(name="x", result=RunResult(records=tuple(records), duration_s=2))])
    assert [speed for _, speed in entry["decode"]] == pytest.approx([20.0, 20.0])


@given(
    st.lists(st.tuples(st.integers(0, 5000).map(float), st.floats(0, 1e4, allow_subnormal=False)), max_size=80),
    st.integers(1, 30),
)
def test_bins_contain_every_point_once_in_order(pairs, bins):
    found = figures.bin_points(pairs, bins)
    assert sum(b["count"] for b in found) == len(pairs)
    assert [b["x"] for b in found] == sorted(b["x"] for b in found) and len(found) <= bins
    left = sorted(pairs)
    for b in found:
        here, left = left[: b["count"]], left[b["count"] :]
        assert b["x"] == pytest.approx(np.mean([x for x, _ in here]))
        ys = [y for _, y in here]
        assert b["median"] == pytest.approx(np.median(ys)) and b["p95"] == pytest.approx(np.percentile(ys, 95))
        assert b["mean"] == pytest.approx(np.mean(ys))


def test_fit_equals_numpy_and_its_error_the_sandwich_estimator():
    chance = np.random.default_rng(4)
    clusters = []
    for start in chance.uniform(0, 1000, size=25):
        shift = chance.normal()  # common to the gaps of a request
        clusters.append([(start + k, 5 + 0.01 * (start + k) + shift + chance.normal()) for k in range(8)])
    fit = figures.linear_fit(clusters)
    x, y = np.array([point for cluster in clusters for point in cluster]).T
    slope, intercept = np.polyfit(x, y, 1)
    assert (fit.slope, fit.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    design = np.stack([np.ones_like(x), x], axis=1)
    bread = np.linalg.inv(design.T @ design)
    residuals = y - design @ [intercept, slope]
    owner = np.repeat(np.arange(25), 8)
    pulls = np.array([design[owner == g].T @ residuals[owner == g] for g in range(25)])
    robust = 25 / 24 * bread @ (pulls.T @ pulls) @ bread
    assert fit.error == pytest.approx(math.sqrt(robust[1, 1]))
    naive = math.sqrt(residuals.var() / ((x - x.mean()) ** 2).sum())
    assert fit.error > 1.3 * naive  # the gaps of one request are not eight observations


def test_too_few_points_have_no_fit():
    assert figures.linear_fit([[(1.0, 2.0)], [(1.0, 3.0)], [(1.0, 4.0)]]) is None
    assert figures.linear_fit([[(1.0, 2.0), (2.0, 3.0)], [(3.0, 3.0)], []]) is None


def test_number_of_bins():
    chance = np.random.default_rng(0)

    def bins(lengths) -> int:
        return figures.bins_for([RequestRecord(index=0, intended=0, input_tokens=int(n)) for n in lengths])

    assert bins([1024, 2048, 4096, 8192, 16384]) == 40 and bins(list(range(40)) * 2) == 40
    assert bins(range(9)) == 3 and bins(chance.permutation(1000)[:41]) == 5 and bins(range(1000)) == 40


def test_tokens_and_open_requests_over_time():
    found = figures.over_time(RUN)
    assert len(found["seconds"]) <= 100
    assert sum(found["widths"]) == pytest.approx(RUN.duration_s)
    assert all(width == found["step_s"] for width in found["widths"][:-1])
    assert 0.5 <= found["widths"][-1] / found["step_s"] <= 1.5
    tokens = sum(rate * width for rate, width in zip(found["tokens_per_second"], found["widths"], strict=True))
    assert tokens == pytest.approx(sum(r.output_tokens for r in RUN.records))
    for moment, waiting, decoding in zip(found["seconds"], found["waiting"], found["decoding"], strict=True):
        open_ = [r for r in RUN.records if r.sent <= moment < r.ended]
        silent = [r for r in open_ if not r.chunks or r.chunks[0] > moment]
        assert (waiting, decoding) == (len(silent), len(open_) - len(silent))
    assert max(found["waiting"]) > 0 and max(found["decoding"]) > 0


def test_steps_begin_at_the_first_intended_send():
    records = [
        RequestRecord(index=k, intended=5.0 + k, sent=5.0 + k, chunks=(5.5 + k,), ended=6.0 + k, output_tokens=1)
        for k in range(10)
    ]
    found = figures.over_time(RunResult(records=tuple(records), duration_s=10.0), max_points=10)
    assert found["seconds"] == [5.5 + k for k in range(10)] and found["tokens_per_second"] == [1.0] * 10


@given(st.floats(1e-4, 1e6), st.integers(2, 200))
def test_steps_of_the_time_axis(span, max_points):
    step = figures.nice_step(span, max_points)
    assert span / step <= max_points
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9)) in (1, 2, 5)
    assert span / step > max_points / 10.001


def test_tail_curve_ends_with_the_data():
    values = list(np.random.default_rng(0).exponential(size=200))
    curve = figures.tail_curve(values)
    assert curve[0] == (0.0, min(values)) and curve[-1][0] == pytest.approx(99.5)
    for percent, value in curve:
        assert value == pytest.approx(np.percentile(values, percent))
    assert figures.tail_curve([]) == [] and figures.tail_curve([4.0]) == [(0.0, 4.0)]


def test_thinned_timeline_includes_every_failure():
    found = figures.timeline(RUN, max_points=20)
    assert len(found["rows"]) <= 20 and found["left_out"] == 80 - len(found["rows"])
    failed = [row for row in found["rows"] if row["outcome"] is not None]
    assert len(failed) == 5 and failed[0]["message"] == "the queue is full" and failed[0]["first"] is None
    assert [row["intended"] for row in found["rows"]] == sorted(row["intended"] for row in found["rows"])
    whole = figures.timeline(RUN)
    assert len(whole["rows"]) == 80 and whole["left_out"] == 0


def test_context_figures_recover_the_simulated_costs():
    """The simulated server needs 12 ms per token and 4 ms more per 1,000 tokens of context, times a factor of known mean."""
    runs = [NamedRun(name="a", result=simulated_run(count=200, seed=1)), NamedRun(name="b", result=RUN)]
    found = figures.against_context(runs)
    assert [entry["name"] for entry in found] == ["a", "b"]
    fit, factor = found[0]["itl_fit"], math.exp(0.2**2 / 2)
    assert fit["slope"] * 1000 == pytest.approx(4 * factor, rel=0.05)
    assert fit["intercept"] == pytest.approx(12 * factor, rel=0.02)
    for context, speed in found[0]["decode"]:
        assert speed == pytest.approx(1000 / ((12 + 4 * context / 1000) * factor), rel=0.03)
    assert len(found[0]["ttft"]["points"]) == 200 and found[0]["ttft"]["left_out"] == 0
    together = figures.against_context([NamedRun(name=r.name, result=r.result, series="all") for r in runs])
    assert [entry["name"] for entry in together] == ["all"]
    assert sum(b["count"] for b in together[0]["ttft"]["bins"]) == 200 + 75


def test_single_context_length_has_no_fit():
    run = NamedRun(name="x", result=simulated_run(input_tokens=(512,)))
    assert figures.against_context([run])[0]["itl_fit"] is None


def test_prefill_speed_excludes_cached_tokens():
    record = RequestRecord(
        index=0, intended=0, sent=0, chunks=(0.5,), ended=1, input_tokens=100, cached_tokens=60, output_tokens=1
    )
    (entry,) = figures.against_context([NamedRun(name="x", result=RunResult(records=(record,), duration_s=1))])
    assert entry["prefill"]["points"] == [(100.0, 80.0)]


def test_load_is_offered_rate_or_concurrency():
    runs = [NamedRun(name=str(r), result=simulated_run(rate=r, count=20)) for r in (8, 2)]
    found = figures.against_rate(runs)
    assert found["offered"] and [row["load"] for row in found["rows"]] == [2, 8]
    assert figures.against_rate(runs[:1]) is None and figures.against_rate([runs[0], runs[0]]) is None
    closed = [
        NamedRun(name=str(clients), result=dataclasses.replace(simulated_run(closed_loop=True), settings=settings))
        for clients, settings in ((4, {"concurrency": 4}), (1, {"concurrency": 1}))
    ]
    found = figures.against_rate(closed)
    assert not found["offered"] and [row["load"] for row in found["rows"]] == [1, 4]
    assert figures.against_rate([*closed, *runs]) is None
    unknown = NamedRun(name="x", result=simulated_run(closed_loop=True))
    assert figures.against_rate([*closed, unknown]) is None
    two = [dataclasses.replace(run, series=series) for series in ("old", "new") for run in runs]
    rows = figures.against_rate(two)["rows"]
    assert [(row["group"], row["load"]) for row in rows] == [("old", 2), ("old", 8), ("new", 2), ("new", 8)]


def test_bins_do_not_split_a_cluster():
    """An edge of forty equal bins is within the contexts 4,096 to 4,127."""
    pairs = [(float(start + k), 1.0) for start in (1024, 2048, 4096, 8192, 16384) for k in range(32)]
    assert [b["count"] for b in figures.bin_points(pairs)] == [32] * 5


@pytest.mark.parametrize(
    "run",
    [
        RunResult(records=(), duration_s=0.0),
        RunResult(records=(RequestRecord(index=0, intended=0.0, outcome="connect"),), duration_s=0.0),
        RunResult(records=(RequestRecord(index=0, intended=0.0, sent=0.0, chunks=(0.1,), ended=None),), duration_s=0.1),
    ],
    ids=["empty", "never sent", "never ended"],
)
def test_figures_of_nearly_empty_runs_are_valid_json(run):
    named = [NamedRun(name="x", result=run)]
    data = [figures.over_time(run), figures.timeline(run), figures.against_context(named)]
    json.dumps(figures.round_floats(data), allow_nan=False)


def test_only_floats_are_rounded():
    assert figures.round_floats({"a": [1.23456789, None, "x", 7, True], "b": (0.0,)}, 3) == {
        "a": [1.23, None, "x", 7, True],
        "b": [0.0],
    }
