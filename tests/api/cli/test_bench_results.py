"""`windlass bench report` and `windlass bench compare`: files, texts and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from helpers.load_results import simulated_run
from helpers.scripted_http import scripted_llm, stream

from windlass.clients.loadtest.results import SWEEP_FORMAT, write_json
from windlass.server.cli.main import run


@pytest.fixture
def files(tmp_path):
    """A folder with the files of two runs and a sweep."""
    write_json(simulated_run(count=100, rate=2, seed=1), tmp_path / "before.json")
    write_json(simulated_run(count=100, rate=2, seed=1, slowness=1.4), tmp_path / "after.json")
    runs = [simulated_run(count=20, rate=rate).to_dict() for rate in (1, 2)]
    sweep = {"format": SWEEP_FORMAT, "slo": {}, "highest_rate": 2.0, "runs": runs}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    return tmp_path


def test_a_report_of_one_run(files, capsys):
    page = files / "page.html"
    assert run(["bench", "report", str(files / "before.json"), "--html", str(page), "--title", "Tuesday"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<title>Tuesday</title>" in text and "before" in text
    assert str(page) in capsys.readouterr().out


def test_a_report_of_a_sweep_and_of_named_files(files):
    page = files / "page.html"
    assert run(["bench", "report", str(files / "sweep.json"), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert (
        "2 requests per second" in text and "<summary>1 req/s</summary>" in text and "<h1>Load test: sweep</h1>" in text
    )
    both = [str(files / "before.json"), str(files / "sweep.json")]
    assert run(["bench", "report", *both, "--html", str(page), "--name", "old", "--name", "new"]) == 0
    text = page.read_text(encoding="utf-8")
    for name in ("old", "new, 1 req/s", "new, 2 req/s"):
        assert f"<summary>{name}</summary>" in text
    assert "Highest rate" not in text
    assert json.loads(re.search(r'id="report-data">(.*?)</script>', text)[1])["rate"]["rows"][-1]["group"] == "new"


def test_sweeps_with_equal_names_have_separate_lines(files):
    (files / "other").mkdir()
    (files / "other" / "sweep.json").write_text((files / "sweep.json").read_text(encoding="utf-8"), encoding="utf-8")
    both = [str(files / "sweep.json"), str(files / "other" / "sweep.json")]
    assert run(["bench", "report", *both, "--html", str(files / "page.html")]) == 0
    text = (files / "page.html").read_text(encoding="utf-8")
    rows = json.loads(re.search(r'id="report-data">(.*?)</script>', text)[1])["rate"]["rows"]
    assert [(row["group"], row["load"]) for row in rows] == [
        ("sweep", 1),
        ("sweep", 2),
        ("sweep (2)", 1),
        ("sweep (2)", 2),
    ]


def test_a_comparison_as_text(files, capsys):
    assert run(["bench", "compare", str(files / "before.json"), str(files / "after.json"), "--resamples", "200"]) == 0
    out = capsys.readouterr().out
    for part in ("before.json", "prompts of the same lengths", "one run cannot tell", "too few requests", "95% within"):
        assert part in out
    assert "worse" not in out and "better" not in out and "a3.json -- b1.json" in out.replace("\n", " ")


@pytest.mark.slow
def test_several_runs_of_each_side_get_a_verdict(files, capsys):
    for seed in (1, 2, 3):
        write_json(simulated_run(count=100, rate=2, seed=seed), files / f"a{seed}.json")
        write_json(simulated_run(count=100, rate=2, seed=seed, slowness=1.4 + seed / 50), files / f"b{seed}.json")
    sides = [[str(files / f"{side}{seed}.json") for seed in (1, 2, 3)] for side in "ab"]
    assert run(["bench", "compare", *sides[0], "--", *sides[1], "--confidence", "0.9"]) == 0
    out = capsys.readouterr().out
    assert "worse" in out and "90% over runs" in out and "means over 3 and 3 runs" in out and "cannot tell" not in out
    assert run(["bench", "compare", "--json", sides[0][0], sides[0][1], "--", *sides[1]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [2, 3] and found["intervals_over"] == "runs" and found["files"] == [sides[0][:2], sides[1]]
    assert run(["bench", "compare", "--json", sides[0][0], "--", sides[1][0]]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [1, 1]


def test_a_comparison_as_json_is_repeatable(files, capsys):
    command = [
        "bench",
        "compare",
        str(files / "before.json"),
        str(files / "after.json"),
        "--json",
        "--resamples",
        "200",
    ]
    assert run(command) == 0
    first = capsys.readouterr().out
    assert run(command) == 0
    assert capsys.readouterr().out == first
    found = json.loads(first)
    assert found["format"] == "windlass-bench-comparison/2" and found["paired"] and found["seed"] == 0
    (line,) = [each for each in found["lines"] if (each["measure"], each["statistic"]) == ("itl", "mean")]
    assert (
        line["verdict"] == "one run cannot tell"
        and line["interval"][0] < line["second"] - line["first"] < line["interval"][1]
    )
    assert run([*command, "--seed", "1"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["lines"][-1]["first"] == found["lines"][-1]["first"] and other["lines"] != found["lines"]


def test_names_from_files_are_escaped(files, capsys):
    data = json.loads((files / "before.json").read_text(encoding="utf-8"))
    data["settings"]["[bold]x"] = "[red]y"
    (files / "[blink]z.json").write_text(json.dumps(data), encoding="utf-8")
    assert (
        run(["bench", "compare", str(files / "before.json"), str(files / "[blink]z.json"), "--resamples", "100"]) == 0
    )
    out = capsys.readouterr().out
    assert "[blink]z.json" in out.replace("\n", "") and "[bold]x: – → [red]y" in out


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "absent.json", "--html", "x.html"], "cannot read absent.json: No such file"),
        (["report", ".", "--html", "x.html"], "cannot read .: Is a directory"),
        (["report", "text.json", "--html", "x.html"], "text.json: not a JSON file"),
        (["report", "other.json", "--html", "x.html"], "other.json: not the JSON of a load test"),
        (["report", "before.json", "--html", "no/where.html"], "cannot write no/where.html: No such file"),
        (["report", "before.json"], "--html"),
        (["report", "--html", "x.html"], "JSON"),
        (["report", "before.json", "--html", "x.html", "--name", "a", "--name", "b"], "2 times for 1 files"),
        (["compare", "before.json"], "1 files are ambiguous"),
        (["compare"], "B.json"),
        (["compare", "before.json", "after.json", "after.json"], "a1.json a2.json a3.json -- b1.json"),
        (["compare", "--", "before.json", "after.json"], "-- between"),
        (["compare", "before.json", "--"], "-- between"),
        (["compare", "before.json", "after.json", "--", "after.json"], "repeat it, too"),
        (["compare", "before.json", "absent.json"], "cannot read absent.json"),
        (["compare", "before.json", "sweep.json"], "sweep of 2 runs"),
        (["compare", "before.json", "after.json", "--confidence", "95"], "--confidence"),
        (["compare", "before.json", "after.json", "--resamples", "3"], "--resamples"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(files, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(files)
    (files / "text.json").write_text("hello", encoding="utf-8")
    (files / "other.json").write_text('{"format": "x"}', encoding="utf-8")
    assert run(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not (files / "x.html").exists()


@pytest.mark.parametrize(
    "module", ["windlass.clients", "windlass.clients.loadtest.compare", "windlass.server.cli.main"]
)
def test_imports_load_neither_numpy_nor_jinja(module):
    code = f"import sys, {module}; sys.exit(bool({{'numpy', 'torch', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_two_runs_of_one_server_have_no_verdict(tmp_path, capsys):
    """A scripted server that is faster in its second run, as on another day."""
    with scripted_llm(*[stream(0.003, 0.003)] * 40, stream(0.002, 0.002)) as llm:
        for name in ("a", "b"):
            load = [
                "--url",
                llm.url,
                "--num-prompts",
                "40",
                "--vocab-size",
                "900",
                "--json",
                str(tmp_path / f"{name}.json"),
            ]
            assert run(["bench", "serve", *load]) == 0
    capsys.readouterr()
    assert run(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {line["verdict"] for line in found["lines"]} <= {"one run cannot tell", "too few requests"}
    (e2el,) = [line for line in found["lines"] if (line["measure"], line["statistic"]) == ("e2el", "p50")]
    assert e2el["change"] < 0 and e2el["interval"] is not None
