"""Records and summaries: percentiles against numpy, figures against their definitions, and files that come back."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from windlass.clients.loadtest.results import (
    COLUMNS,
    RequestRecord,
    RunResult,
    Summary,
    read_json,
    write_csv,
    write_json,
)

GOOD = RequestRecord(
    index=0, intended=1.0, sent=1.1, chunks=(1.5, 1.6, 1.8), ended=1.9, input_tokens=7, output_tokens=3,
    cached_tokens=4, reused_tokens=3, asked_tokens=3, finish_reason="length", text="a, b", token_ids=(5, 6, 7), label="turn 1",
)  # fmt: skip
FAILED = RequestRecord(index=1, intended=1.2, sent=1.2, ended=2.0, outcome="http_429", message="full")
LEFT = RequestRecord(index=2, intended=1.3, sent=1.3, chunks=(1.7,), ended=1.7, output_tokens=1, outcome="disconnected")
RUN = RunResult(records=(GOOD, FAILED, LEFT), duration_s=2.0, offered_rate=3.0, slo={"ttft": 600.0, "itl": 150.0})


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpy_s(count):
    values = np.random.default_rng(count).exponential(size=count)
    summary = Summary.of(values)
    assert summary.mean == pytest.approx(values.mean())
    for percent in (50, 90, 95, 99):
        assert getattr(summary, f"p{percent}") == pytest.approx(np.percentile(values, percent))


def test_what_came_from_the_cache_is_summed_where_it_is_known():
    assert GOOD.cached_share == 4 / 7 and GOOD.reused_share == 3 / 7 and LEFT.cached_share is None
    other = RequestRecord(index=3, intended=0, input_tokens=10, cached_tokens=5)
    summary = RunResult(records=(GOOD, other, FAILED), duration_s=1.0).summary()
    assert (summary["cached_tokens"], summary["reused_tokens"]) == (9, 3)
    assert RunResult(records=(FAILED, LEFT), duration_s=1.0).summary()["cached_tokens"] is None


def test_nothing_measured_is_no_number():
    assert Summary.of([None, None]) == Summary()


def test_measures_are_as_defined():
    assert GOOD.ttft_ms == pytest.approx(500) and GOOD.ttft_actual_ms == pytest.approx(400)
    assert GOOD.tpot_ms == pytest.approx(150) and GOOD.gaps_ms == pytest.approx([100, 200])
    assert GOOD.e2el_ms == pytest.approx(900) and GOOD.lag_ms == pytest.approx(100)
    assert FAILED.ttft_ms is None and FAILED.tpot_ms is None


def test_failures_and_those_who_left_are_told_apart():
    summary = RUN.summary()
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert summary["errors"] == {"http_429": 1} and summary["abandoned"] == {"disconnected": 1}
    assert summary["output_tokens"] == 3 and summary["output_tokens_per_second"] == 1.5
    assert summary["request_rate"] == 0.5
    assert summary["ttft_ms"]["p99"] == pytest.approx(500)  # of the completed alone


def test_goodput_asks_for_every_limit():
    assert RUN.summary()["goodput"] == 0.0  # its slowest gap is 200 ms
    generous = RunResult(records=RUN.records, duration_s=2.0, slo={"ttft": 600.0, "itl": 250.0, "e2el": 950.0})
    assert generous.summary()["goodput"] == 0.5
    assert RunResult(records=RUN.records, duration_s=2.0).summary()["goodput"] is None


def test_a_file_comes_back_as_it_was(tmp_path):
    write_json(RUN, tmp_path / "run.json")
    assert read_json(tmp_path / "run.json") == RUN
    data = json.loads((tmp_path / "run.json").read_text())
    assert data == json.loads(json.dumps(RUN.to_dict()))


@pytest.mark.parametrize("data", [None, [], {}, {"format": "windlass-bench/1"}, {"format": "other", "requests": []}])
def test_what_is_no_load_test_is_refused(data):
    with pytest.raises(ValueError):
        RunResult.from_dict(data)


def test_the_csv_has_a_row_per_request(tmp_path):
    write_csv(RUN, tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 3
    assert (rows[0]["outcome"], float(rows[0]["ttft_ms"]), rows[0]["label"]) == (
        "completed",
        pytest.approx(500),
        "turn 1",
    )
    assert (rows[1]["outcome"], rows[1]["message"], rows[1]["ttft_ms"]) == ("http_429", "full", "")
    assert rows[0]["chunks"] == "3" and float(rows[0]["itl_mean_ms"]) == pytest.approx(150)
