"""The study of long contexts with runs of a simulated server: forecasts, bounds, interruptions, its files and figures."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers.load_results import simulated_run

from windlass.clients.loadtest.results import RunResult, write_json
from windlass.engine.rotary.rope_scaling import RopeScaling

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("long_context_study")


@pytest.fixture
def pieces(script: ModuleType) -> ModuleType:
    return importlib.import_module("harness.long_context")


@contextlib.contextmanager
def no_server(path: Path, options: list[str]) -> Iterator[str]:
    yield f"http://{path.name}"


def bench(url: str, length: int, prompts: int) -> RunResult:
    return simulated_run(count=prompts, input_tokens=(length,), rate=0.1, closed_loop=True, seed=length)


def options_for(script, tmp_path, *more):
    return script.parse_arguments(
        [
            "--models",
            "bundled",
            "--lengths",
            "1024",
            "2048",
            "4096",
            "--num-prompts",
            "6",
            "--work",
            str(tmp_path),
            *more,
        ]
    )


def test_a_study_leaves_its_runs_a_page_and_a_picture(script, pieces, tmp_path, capsys):
    study = script.make_study(options_for(script, tmp_path), no_server, bench)
    saved = json.loads((tmp_path / "long_context.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(study)) and saved["format"] == pieces.FORMAT
    assert [entry["length"] for entry in saved["models"]["bundled"]["lengths"]] == [1024, 2048, 4096]
    # The simulated server: 12 ms a token and 4 ms more per 1,000 tokens, times a factor of mean e^0.02.
    fit = saved["fits"]["bundled"]
    assert fit["slope"] * 1000 == pytest.approx(4 * math.exp(0.02), rel=0.1)
    assert fit["intercept"] == pytest.approx(12 * math.exp(0.02), rel=0.1)
    page = (tmp_path / "long_context.html").read_text(encoding="utf-8")
    assert "bundled, 4,096 tokens" in page
    assert (tmp_path / "long_context.png").read_bytes().startswith(b"\x89PNG")
    assert "bundled: 6 x 1,024, 2,048, 4,096 tokens, about" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part*"))


def test_rows_are_the_medians_of_their_runs(script, pieces, tmp_path):
    study = script.make_study(options_for(script, tmp_path), no_server, bench)
    rows = pieces.rows_of(study)
    for row, length in zip(rows, (1024, 2048, 4096), strict=True):
        summary = bench("", length, 6).summary()
        assert row["ttft_ms"] == summary["ttft_actual_ms"]["p50"] and row["itl_p95_ms"] == summary["itl_ms"]["p95"]
        assert row["prompt_tokens_per_second"] == pytest.approx(length * 1000 / row["ttft_ms"])
        assert f"| bundled | {length:,} |" in pieces.text_table(study)


def test_an_interruption_keeps_what_was_measured_and_a_second_go_finishes(script, tmp_path):
    asked = []

    def interrupted(url: str, length: int, prompts: int) -> RunResult:
        asked.append(length)
        if length == 4096:
            raise KeyboardInterrupt
        return bench(url, length, prompts)

    with pytest.raises(KeyboardInterrupt):
        script.make_study(options_for(script, tmp_path), no_server, interrupted)
    saved = json.loads((tmp_path / "long_context.json").read_text(encoding="utf-8"))
    assert [entry["length"] for entry in saved["models"]["bundled"]["lengths"]] == [1024, 2048]
    asked.clear()
    again = script.make_study(
        options_for(script, tmp_path, "--resume"), no_server, lambda *a: asked.append(a[1]) or bench(*a)
    )
    assert asked == [1024, 4096]  # the first warms the new server up
    assert len(again["models"]["bundled"]["lengths"]) == 3
    assert again["models"]["bundled"]["lengths"][0] == saved["models"]["bundled"]["lengths"][0]
    # With nothing left to do, no server is started.
    done = script.make_study(options_for(script, tmp_path, "--resume"), None, None)
    assert done == json.loads(json.dumps(again))


def all_failed() -> RunResult:
    run = simulated_run(count=4, failing=4, input_tokens=(5,))
    return RunResult(records=tuple(r for r in run.records if not r.completed), duration_s=1.0)


def test_a_length_whose_requests_all_failed_is_told_and_measured_again(script, pieces, tmp_path, capsys):
    def failing(url: str, length: int, prompts: int) -> RunResult:
        return all_failed() if length == 2048 else bench(url, length, prompts)

    study = script.make_study(options_for(script, tmp_path), no_server, failing)
    assert "| bundled | 2,048 | – | – | – | – | 0 |" in pieces.text_table(study)
    assert "failed: " in capsys.readouterr().out
    again = script.make_study(options_for(script, tmp_path, "--resume"), no_server, bench)
    assert [row["length"] for row in pieces.rows_of(again)] == [1024, 2048, 4096]
    assert [row["completed"] for row in pieces.rows_of(again)] == [6, 6, 6]
    assert "–" not in pieces.text_table(again)


def test_a_bound_on_minutes_stops_before_the_length_that_breaks_it(script, tmp_path, monkeypatch, capsys):
    """The simulated requests say how long they took; the clock stands still."""
    monkeypatch.setattr(script.time, "monotonic", lambda: 0.0)
    # 2,048 tokens may take four times as long as 1,024, and 16,384 far longer.
    minutes = 6 * script.seconds_per_request(bench("", 1024, 6)) * 4.2 / 60
    options = options_for(script, tmp_path, "--max-minutes", str(minutes), "--lengths", "16384", "1024", "2048")
    study = script.make_study(options, no_server, bench)
    assert [entry["length"] for entry in study["models"]["bundled"]["lengths"]] == [1024, 2048]
    assert "stopped before 16,384 tokens" in capsys.readouterr().out


def test_forecasts_hold_costs_between_linear_and_quadratic(pieces):
    first = pieces.forecast({1000: 2.0}, 3000, 4)
    assert (first.low, first.high) == (24.0, 72.0)
    same = pieces.forecast({1000: 2.0}, 1000, 4)
    assert same.low == same.high == 8.0
    for power in (1.0, 1.5, 2.0):
        measured = {length: (length / 1000) ** power for length in (1000, 2000)}
        found = pieces.forecast(measured, 8000, 1)
        assert found.low < 8**power < found.high < 2 * 8**power
    with pytest.raises(ValueError, match="nothing was measured"):
        pieces.forecast({}, 5, 1)
    assert str(pieces.Forecast(30.0, 600.0)) == "30 s to 10 min" and str(pieces.Forecast(5.0, 5.1)) == "5 s"


def test_servers_get_the_context_a_scaling_and_the_memory_they_need(script):
    options = script.server_options("bundled", 512, 16432, "none")
    assert options[options.index("--max-model-len") + 1] == "16432" and "--no-prefix-caching" in options
    scaling = json.loads(options[options.index("--rope-scaling") + 1])
    assert RopeScaling.from_dict(scaling).rope_type == "yarn" and scaling["factor"] * 512 >= 16432
    large = script.server_options("1b", 40960, 16432, "int8")
    assert "--rope-scaling" not in large and large[large.index("--quantization") + 1] == "int8"
    # 16 layers, keys and values, 8 heads of 64 numbers of 4 bytes.
    assert int(large[large.index("--kv-cache-memory") + 1].removesuffix("MiB")) * 2**20 >= 16432 * 16 * 2 * 8 * 64 * 4


def test_the_load_test_is_asked_as_its_command_wants(script, tmp_path, monkeypatch):
    """A stand-in for `windlass bench serve` that notes its arguments and writes a run."""
    noted = tmp_path / "arguments.json"
    source = tmp_path / "run.json"
    write_json(bench("", 512, 3), source)
    stand_in = (
        f"import json, shutil, sys; json.dump(sys.argv[1:], open({str(noted)!r}, 'w')); "
        f"shutil.copy({str(source)!r}, sys.argv[sys.argv.index('--json') + 1])"
    )
    monkeypatch.setattr(script, "SERVE", stand_in)
    assert script.run_bench("http://x", 512, 3, 32, 60.0) == bench("", 512, 3)
    arguments = json.loads(noted.read_text(encoding="utf-8"))
    assert arguments[:12] == [
        *["bench", "serve", "--url", "http://x", "--input-len", "512", "--output-len", "32"],
        *["--concurrency", "1", "--num-prompts", "3"],
    ]
    monkeypatch.setattr(script, "SERVE", "import sys; print('error: no such server', file=sys.stderr); sys.exit(2)")
    with pytest.raises(script.WorkerError, match="with 2: error: no such server"):
        script.run_bench("http://x", 512, 3, 32, 60.0)


def test_other_files_and_runs_without_answers_are_refused(script, pieces, tmp_path):
    (tmp_path / "long_context.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no study"):
        script.make_study(options_for(script, tmp_path, "--resume"), no_server, bench)
    with pytest.raises(ValueError, match="no request completed: http_429: the queue is full"):
        pieces.seconds_per_request(all_failed())


@pytest.mark.parametrize("wrong", [["--lengths", "0"], ["--num-prompts", "0"], ["--out", "x.html"]])
def test_impossible_options_are_refused(script, wrong, capsys):
    with pytest.raises(SystemExit):
        script.parse_arguments(wrong)
    assert "error" in capsys.readouterr().err
