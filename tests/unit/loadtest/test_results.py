"""Records, summaries and result files of load tests, against numpy and the definitions of the measures."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from helpers.load_results import simulated_run

from windlass.clients.loadtest.results import (
    COLUMNS,
    SWEEP_FORMAT,
    RequestRecord,
    RunResult,
    Summary,
    SweepResult,
    name_runs,
    read_file,
    read_json,
    unique_names,
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
def test_percentiles_equal_numpy(count):
    values = np.random.default_rng(count).exponential(size=count)
    summary = Summary.of(values)
    assert summary.mean == pytest.approx(values.mean())
    for percent in (50, 90, 95, 99):
        assert getattr(summary, f"p{percent}") == pytest.approx(np.percentile(values, percent))


def test_known_cache_counts_are_summed():
    assert GOOD.prompt_share(GOOD.cached_tokens) == 4 / 7 and GOOD.prompt_share(GOOD.reused_tokens) == 3 / 7
    assert LEFT.prompt_share(LEFT.cached_tokens) is LEFT.prompt_share(3) is None
    other = RequestRecord(index=3, intended=0, input_tokens=10, cached_tokens=5)
    summary = RunResult(records=(GOOD, other, FAILED), duration_s=1.0).summary()
    assert (summary["cached_tokens"], summary["reused_tokens"]) == (9, 3)
    assert RunResult(records=(FAILED, LEFT), duration_s=1.0).summary()["cached_tokens"] is None


def test_summary_of_nothing():
    assert Summary.of([None, None]) == Summary()


def test_measures_of_a_record():
    assert GOOD.ttft_ms == pytest.approx(500) and GOOD.ttft_actual_ms == pytest.approx(400)
    assert GOOD.tpot_ms == pytest.approx(150) and GOOD.gaps_ms == pytest.approx([100, 200])
    assert GOOD.e2el_ms == pytest.approx(900) and GOOD.lag_ms == pytest.approx(100)
    assert FAILED.ttft_ms is None and FAILED.tpot_ms is None


def test_failed_and_abandoned_requests_are_distinguished():
    summary = RUN.summary()
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert summary["errors"] == {"http_429": 1} and summary["abandoned"] == {"disconnected": 1}
    assert summary["output_tokens"] == 3 and summary["output_tokens_per_second"] == 1.5
    assert summary["request_rate"] == 0.5
    assert summary["ttft_ms"]["p99"] == pytest.approx(500)  # of completed requests only


def test_goodput_requires_every_limit():
    assert RUN.summary()["goodput"] == 0.0  # its slowest gap is 200 ms
    generous = RunResult(records=RUN.records, duration_s=2.0, slo={"ttft": 600.0, "itl": 250.0, "e2el": 950.0})
    assert generous.summary()["goodput"] == 0.5
    assert RunResult(records=RUN.records, duration_s=2.0).summary()["goodput"] is None


def test_json_file_round_trips(tmp_path):
    write_json(RUN, tmp_path / "run.json")
    assert read_json(tmp_path / "run.json") == RunResult.from_dict(RUN.to_dict()) == RUN
    data = json.loads((tmp_path / "run.json").read_text())
    assert data == json.loads(json.dumps(RUN.to_dict()))


@pytest.mark.parametrize("data", [None, [], {}, {"format": "windlass-bench/1"}, {"format": "other", "requests": []}])
def test_other_objects_are_refused(data):
    with pytest.raises(ValueError):
        RunResult.from_dict(data)


def test_csv_has_a_row_per_request(tmp_path):
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


def sweep(*rates: float) -> dict:
    runs = [simulated_run(rate=rate, count=10).to_dict() for rate in rates]
    return {"format": SWEEP_FORMAT, "slo": {"ttft": 500}, "highest_rate": 2.0, "runs": runs}


def write(tmp_path, data, name="file.json"):
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_run_file_round_trips(tmp_path):
    run = simulated_run(failing=3, slo={"ttft": 100})
    write_json(run, tmp_path / "quick.json")
    measured = read_file(tmp_path / "quick.json")
    assert measured == run and measured.slo == {"ttft": 100}


def test_runs_of_a_sweep_are_named_by_rate(tmp_path):
    data = sweep(1, 2, 2)
    data["runs"].append(simulated_run(count=10, closed_loop=True).to_dict())
    measured = read_file(write(tmp_path, data, "night.json"))
    assert [run.name for run in name_runs(measured.runs)] == ["1 req/s", "2 req/s", "2 req/s (2)", "run 4"]
    assert isinstance(measured, SweepResult) and measured.highest_rate == 2.0 and measured.slo == {"ttft": 500}
    data["highest_rate"] = None
    assert read_file(write(tmp_path, data)).highest_rate is None


def broken(field, value, request=True):
    data = simulated_run(count=3).to_dict()
    (data["requests"][1] if request else data)[field] = value
    return data


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ([], "`format` should be"),
        ({"format": "other/1"}, "`format` should be"),
        ({"format": "windlass-bench/1"}, "`requests`"),
        ({"format": SWEEP_FORMAT}, "no `runs`"),
        ({"format": SWEEP_FORMAT, "runs": []}, "no `runs`"),
        ({"format": SWEEP_FORMAT, "runs": [3]}, "`format` should be"),
        ({**sweep(1), "highest_rate": "high"}, "highest_rate"),
        ({**sweep(1), "slo": [3]}, "slo"),
        (broken("intended", "soon"), "request 1 of the run cannot be read: intended"),
        (broken("intended", None), "request 1 of the run cannot be read: intended"),
        (broken("sent", [1]), "sent"),
        (broken("ended", float("nan")), "ended"),
        (broken("chunks", [1.0, "x"]), "chunks"),
        (broken("chunks", [2.0, 1.0]), "chunks"),
        (broken("chunks", 7), "chunks should be a list"),
        (broken("output_tokens", -1), "output_tokens"),
        (broken("input_tokens", 1.5), "input_tokens"),
        (broken("output_tokens", 10**400), "output_tokens"),
        (broken("cached_tokens", "4"), "cached_tokens"),
        (broken("reused_tokens", -1), "reused_tokens"),
        (broken("asked_tokens", [3]), "asked_tokens"),
        (broken("ended", 10**400), "ended"),
        (broken("outcome", 5), "outcome"),
        (broken("message", {"a": 1}), "message"),
        (broken("surprise", 1), "unknown field `surprise`"),
        (broken("duration_s", "long", request=False), "duration_s"),
        (broken("duration_s", -1.0, request=False), "duration_s"),
        (broken("offered_rate", "x", request=False), "offered_rate"),
        (broken("settings", [], request=False), "settings"),
        (broken("server_metrics", {"a": "b"}, request=False), "server_metrics"),
        (broken("slo", {"ttft": True}, request=False), "slo"),
        (broken("requests", 5, request=False), "`requests`"),
    ],
)
def test_invalid_files_are_refused_in_one_line(tmp_path, data, fragment):
    with pytest.raises(ValueError) as caught:
        read_file(write(tmp_path, data))
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_encoding_and_missing_file(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_file(tmp_path / "binary.json")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent.json")


def test_unique_names():
    assert unique_names(["a", "a", "b", "a", "a (2)"]) == ["a", "a (2)", "b", "a (3)", "a (2) (2)"]


def test_old_sweep_format_has_no_highest_rate(tmp_path):
    older = {**sweep(1, 2), "format": "windlass-bench-sweep/1"}
    measured = read_file(write(tmp_path, older))
    assert isinstance(measured, SweepResult) and len(measured.runs) == 2 and measured.highest_rate is None
