"""Files of load tests: what is read, and one plain line for everything else."""

from __future__ import annotations

import json

import pytest
from helpers.load_results import simulated_run

from windlass.clients.loadtest.results import SWEEP_FORMAT, read_file, unique_names, write_json


def sweep(*rates: float) -> dict:
    runs = [simulated_run(rate=rate, count=10).to_dict() for rate in rates]
    return {"format": SWEEP_FORMAT, "slo": {"ttft": 500}, "highest_rate": 2.0, "runs": runs}


def write(tmp_path, data, name="file.json"):
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_a_run_comes_back_as_it_was_written(tmp_path):
    run = simulated_run(failing=3, slo={"ttft": 100})
    write_json(run, tmp_path / "quick.json")
    measured = read_file(tmp_path / "quick.json")
    assert measured.runs[0].result == run and measured.runs[0].name == "quick" and not measured.sweep
    assert measured.slo == {"ttft": 100}


def test_a_sweep_names_its_runs_by_rate(tmp_path):
    data = sweep(1, 2, 2)
    data["runs"].append(simulated_run(count=10, closed_loop=True).to_dict())
    measured = read_file(write(tmp_path, data, "night.json"))
    assert [run.name for run in measured.runs] == ["1 req/s", "2 req/s", "2 req/s (2)", "run 4"]
    assert measured.sweep and measured.highest_rate == 2.0 and measured.slo == {"ttft": 500}
    data["highest_rate"] = None
    assert read_file(write(tmp_path, data)).highest_rate is None


def broken(field, value, request=True):
    data = simulated_run(count=3).to_dict()
    (data["requests"][1] if request else data)[field] = value
    return data


@pytest.mark.parametrize(
    ("data", "says"),
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
def test_anything_else_is_refused_in_one_line(tmp_path, data, says):
    with pytest.raises(ValueError) as caught:
        read_file(write(tmp_path, data))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_other_encodings_and_missing_files_are_told_apart(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_file(tmp_path / "binary.json")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent.json")


def test_names_are_made_unique():
    assert unique_names(["a", "a", "b", "a", "a (2)"]) == ["a", "a (2)", "b", "a (3)", "a (2) (2)"]


def test_an_older_sweep_has_no_highest_rate_as_it_did_not_ask_what_was_kept_up_with(tmp_path):
    older = {**sweep(1, 2), "format": "windlass-bench-sweep/1"}
    measured = read_file(write(tmp_path, older))
    assert measured.sweep and len(measured.runs) == 2 and measured.highest_rate is None
