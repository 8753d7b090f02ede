"""`windlass bench serve`: options, files, exit codes, error lines and signals."""

from __future__ import annotations

import asyncio
import csv
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest
from helpers.scripted_http import Generation, ScriptedLLM, answer, full_stream, scripted_llm, stream

from windlass.clients.loadtest.results import RunResult, read_json
from windlass.server.cli import main as cli

pytestmark = pytest.mark.usefixtures("clean_environment")

SUMMARY = ("ttft_ms", "ttft_actual_ms", "tpot_ms", "itl_ms", "e2el_ms")


def bench(url: str, *arguments: object) -> int:
    return cli.run(["bench", "serve", "--url", url, *map(str, arguments)])


def error_of(capsys, url: str, *arguments: object) -> str:
    """The line that a failing run writes."""
    assert bench(url, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured
    return captured.err.removeprefix("error: ").rstrip("\n")


def test_closed_loop_writes_every_figure(tmp_path, capsys):
    with scripted_llm(full_stream) as llm:
        code = bench(
            llm.url, "--input-len", 8192, "--output-len", 64, "--concurrency", 4, "--num-prompts", 16, "--vocab-size",
            32000, "--json", tmp_path / "run.json",
        )  # fmt: skip
    assert code == 0
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["completed"], data["failed"], data["errors"]) == (16, 0, {})
    assert data["input_tokens"] == 16 * 8192 and data["output_tokens"] == 16 * 64
    assert data["duration_s"] > 0
    assert data["output_tokens_per_second"] == pytest.approx(16 * 64 / data["duration_s"])
    assert data["request_rate"] == pytest.approx(16 / data["duration_s"])
    for name in SUMMARY:
        assert list(data[name]) == ["mean", "p50", "p90", "p95", "p99"]
        assert all(isinstance(value, float) and value >= 0 for value in data[name].values())
    assert data["server"]["model"] == "scripted" and data["interrupted"] is False
    assert data["settings"]["input_len"] == "8192" and data["settings"]["concurrency"] == 4
    assert llm.max_running <= 4 and len(llm.bodies) == 16
    assert all(len(body["prompt"]) == 8192 and body["max_tokens"] == 64 for body in llm.bodies)
    out = capsys.readouterr().out
    assert "16 completed, 0 failed" in out and "time to first token" in out


def test_request_rate_makes_an_open_loop(tmp_path):
    with scripted_llm(full_stream) as llm:
        assert bench(llm.url, "--num-prompts", 5, "--request-rate", 50, "--json", tmp_path / "run.json") == 0
    result = read_json(tmp_path / "run.json")
    assert result.offered_rate == 50 and len(result.completed) == 5
    gaps = [b.intended - a.intended for a, b in zip(result.records, result.records[1:], strict=False)]
    assert len(set(gaps)) == 4  # Poisson


def test_failed_requests_do_not_fail_the_command(tmp_path, capsys):
    async def refuses(generation: Generation) -> None:
        await answer({"error": {"message": "full house"}}, "429 Too Many Requests")(generation)

    with scripted_llm(refuses) as llm:
        assert bench(llm.url, "--num-prompts", 3, "--json", tmp_path / "run.json") == 0
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["completed"], data["failed"], data["errors"]) == (0, 3, {"http_429": 3})
    assert data["ttft_ms"]["p50"] is None
    assert "warning: the first http_429: full house" in capsys.readouterr().out


def offsets(result: RunResult) -> list[float]:
    return [record.intended for record in result.records]


LOADS: dict[str, Callable[[RunResult, list[dict]], bool] | None] = {
    "--trace TRACE --trace-speed 2": lambda result, bodies: (
        [body["max_tokens"] for body in bodies] == [2, 3] and offsets(result) == pytest.approx([0, 0.05])
    ),
    "--request-rate 100 --arrival constant --num-prompts 2": lambda result, bodies: offsets(result) == [0, 0.01],
    "--request-rate 100 --burstiness 0.5 --num-prompts 2": None,
    "--request-rate 50 --ramp-to 200 --num-prompts 2 --concurrency 1": None,
    "--request-rate inf --num-prompts 2": lambda result, bodies: offsets(result) == [0, 0],
    "--duration 0.05 --concurrency 2 --endpoint chat": lambda result, bodies: "messages" in bodies[0],
    "--ladder --num-prompts 3": lambda result, bodies: [len(b["prompt"]) for b in bodies] == [1024, 2048, 2936],
    """--rope-scaling '{"rope_type": "linear", "factor": 2}' --num-prompts 1 --ignore-eos""": lambda result, bodies: (
        bodies[0]["rope_scaling"] == {"rope_type": "linear", "factor": 2} and bodies[0]["ignore_eos"]
    ),
    "--prefix-groups 1 --prefix-len 4 --documents 1 --document-len 6 --num-prompts 1": None,
    "--documents 3 --document-len uniform:4:9 --documents-per-prompt uniform:2:3 --num-prompts 2": None,
    "--turns 2 --num-prompts 1 --warmup 1": None,
    """--extra-body '{"top_k": 3}' --header 'X-A: b' --temperature 0.5 --no-usage --num-prompts 1""": (
        lambda result, bodies: (
            bodies[0]["top_k"] == 3 and bodies[0]["temperature"] == 0.5 and "stream_options" not in bodies[0]
        )
    ),
}


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("options", LOADS)
def test_load_options(options, tmp_path):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "run.json"
    trace.write_text(
        '{"timestamp": 5, "input_len": 9, "max_tokens": 2}\n{"timestamp": 5.1, "prompt": "x", "max_tokens": 3}\n'
    )
    arguments = [*shlex.split(options.replace("TRACE", str(trace))), "--json", path]
    with scripted_llm(full_stream, model={"max_model_len": 3000}) as llm:
        vocabulary = ["--vocab-size", 1000]
        if "chat" in arguments:
            assert bench(llm.url, *vocabulary, *arguments) == 2  # chats do not accept token ids
            vocabulary = []
        assert bench(llm.url, *vocabulary, *arguments) == 0
    result = read_json(path)
    assert result.completed and not result.errors
    check = LOADS[options]
    assert check is None or check(result, llm.bodies)


def test_csv_and_saved_texts(tmp_path):
    with scripted_llm(stream(0, 0)) as llm:
        arguments = ["--duration", 600, "--num-prompts", 2, "--save-text"]
        arguments += ["--csv", tmp_path / "run.csv", "--json", tmp_path / "run.json"]
        assert bench(llm.url, *arguments) == 0
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == ["completed"] * 2 and float(rows[0]["ttft_ms"]) > 0
    result = read_json(tmp_path / "run.json")
    assert [record.text for record in result.records] == [" w1 w2"] * 2
    assert result.settings["concurrency"] == 1 and result.settings["num_prompts"] == 2


@pytest.mark.slow
def test_sweep_options(tmp_path, capsys):
    with scripted_llm(full_stream) as llm:
        arguments = ["--sweep", "--slo", "e2el:60000", "--request-rate", 20, "--sweep-runs", 2, "--sweep-seconds", 0.5]
        arguments += ["--num-prompts", 2]
        assert bench(llm.url, *arguments, "--json", tmp_path / "sweep.json", "--csv", tmp_path / "sweep.csv") == 0
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data["format"] == "windlass-bench-sweep/2" and len(data["runs"]) == len(data["rates"]) == 2
    captured = capsys.readouterr()
    for rate in data["rates"]:  # verdicts depend on the load of the machine
        assert f"{rate['offered']:g} requests per second: {rate['achieved']:,.4g} achieved, " in captured.err
    met = [rate["offered"] for rate in data["rates"] if rate["verdict"] == "met"]
    assert data["highest_rate"] == max(met, default=None)
    assert f"{max(met):g} requests per second is the highest" in captured.out if met else "no rate met" in captured.out
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + sum(
        len(run["requests"]) for run in data["runs"]
    )
    assert len(data["runs"][0]["requests"]) == 10  # more than --num-prompts, which is the minimum


@pytest.mark.slow
def test_page_is_written_by_the_report_module(tmp_path, monkeypatch):
    written = []
    report = types.ModuleType("report")
    report.write_html = lambda result, path: written.append((type(result).__name__, path))
    monkeypatch.setitem(sys.modules, "windlass.clients.loadtest.report", report)
    page = tmp_path / "run.html"
    with scripted_llm(full_stream) as llm:
        assert bench(llm.url, "--num-prompts", 1, "--html", page) == 0
        sweep = ["--sweep", "--slo", "ttft:60000", "--sweep-runs", 1, "--request-rate", 50, "--sweep-seconds", 0.2]
        assert bench(llm.url, *sweep, "--html", page) == 0
    assert written == [("RunResult", page), ("SweepResult", page)]


def test_unavailable_report_is_refused_before_any_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "windlass.clients.loadtest.report", None)
    with scripted_llm(full_stream) as llm:
        assert "--html" in error_of(capsys, llm.url, "--html", tmp_path / "run.html")
    assert not llm.generations


def test_absent_server(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, without a listener
        error = error_of(capsys, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert error.startswith("cannot reach http://127.0.0.1:") and "is the server running" in error


@pytest.mark.parametrize(("key", "what"), [([], "requires an API key"), (["--api-key", "no"], "refuses the API key")])
def test_a_wrong_key(capsys, key, what):
    denied = answer({"error": {"message": "no"}}, "401 Unauthorized")
    with scripted_llm(full_stream, others={"/v1/models": denied}) as llm:
        error = error_of(capsys, llm.url, *key)
    assert what in error and "--api-key" in error


@pytest.mark.parametrize("variable", ["WINDLASS_API_KEY", "OPENAI_API_KEY"])
def test_key_from_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "from-outside")
    with scripted_llm(full_stream) as llm:
        assert bench(llm.url, "--num-prompts", 1) == 0
    assert {request.headers["authorization"] for request in llm.requests} == {"Bearer from-outside"}


def test_unknown_model(capsys):
    with scripted_llm(full_stream) as llm:
        assert "has no model 'other': it serves scripted" in error_of(capsys, llm.url, "--model", "other")


def test_server_without_a_list_of_models(capsys):
    nothing = answer(b"hello", content_type="text/plain")
    with scripted_llm(full_stream, others={"/v1/models": nothing}) as llm:
        assert "--model" in error_of(capsys, llm.url)
        assert bench(llm.url, "--model", "mine", "--num-prompts", 1) == 0
    assert llm.bodies[0]["model"] == "mine"


@pytest.mark.parametrize("told", [{"max_model_len": 512}, {"meta": {"n_ctx": 512}}])
def test_length_above_the_limit(capsys, told):
    with scripted_llm(full_stream, model=told) as llm:
        error = error_of(capsys, llm.url, "--input-len", 8192, "--output-len", 64)
    assert "8,256 tokens" in error and "512 tokens" in error and "--max-model-len" in error
    assert not llm.generations


def test_trace_with_an_invalid_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_len": 5, "max_tokens": 1}\n{"input_len": 5}\n')
    with scripted_llm(full_stream) as llm:
        error = error_of(capsys, llm.url, "--trace", trace)
    assert error == f"{trace}, line 2: has no max_tokens"


@pytest.mark.quick_cases(19)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--input-len", "many"], "--input-len"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--duration", "-1"], "duration"),
        (["--timeout", "0"], "timeout"),
        (["--request-rate", "-2"], "rate"),
        (["--request-rate", "nan"], "rate"),
        (["--request-rate", "inf", "--duration", "1"], "--num-prompts"),
        (["--arrival", "weekly", "--request-rate", "1"], "--arrival"),
        (["--arrival", "gamma", "--request-rate", "1"], "--burstiness"),
        (["--arrival", "constant", "--burstiness", "2", "--request-rate", "1"], "--burstiness"),
        (["--burstiness", "2"], "--request-rate"),
        (["--ramp-to", "2"], "--request-rate"),
        (["--endpoint", "embeddings"], "--endpoint"),
        (["--header", "no-colon"], "--header"),
        (["--header", "a b: c"], "header"),
        (["--api-key", "schlüssel"], "API key"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--extra-body", "{"], "--extra-body"),
        (["--rope-scaling", "{"], "--rope-scaling"),
        (["--slo", "ttft"], "--slo"),
        (["--slo", "speed:5"], "speed"),
        (["--sweep"], "--slo"),
        (["--sweep", "--slo", "ttft:5", "--ramp-to", "2"], "--ramp-to"),
        (["--prefix-groups", "2"], "prefixes"),
        (["--disconnect-share", "2"], "share"),
        (["--ladder"], "--input-len"),  # the server does not report its limit
        (["--json", "/nowhere/run.json"], "--json"),
        (["--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
        (["--url", "nonsense"], "http://127.0.0.1:8000"),
        (["--url", "http://me:secret@127.0.0.1:1"], "--header"),
        (["--header", "Content-Length: 3"], "content-length"),
    ],
)
def test_invalid_options_are_one_line(capsys, arguments, named):
    with scripted_llm(full_stream) as llm:
        assert named in error_of(capsys, llm.url, *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "inf"], "the temperature must be a number, got inf"),
        (["--extra-body", '{"top_p": NaN}'], "--extra-body"),
        (["--extra-body", '{"logit_bias": {"5": [-1e999]}}'], "--extra-body"),
        (["--rope-scaling", '{"rope_type": "linear", "factor": Infinity}'], "--rope-scaling"),
        (["--slo", "ttft:inf"], "ttft must be a number of ms above 0, got inf"),
        (["--slo", "ttft:nan"], "ttft must be a number of ms above 0, got nan"),
        (["--trace-speed", "nan"], "--trace-speed must be a number, got nan"),  # without effect here
        (["--trace", "TRACE"], "line 1: rope_scaling should be a JSON object"),
    ],
)
def test_nan_and_infinity_are_refused_before_any_request(tmp_path, capsys, arguments, named):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_len": 5, "max_tokens": 1, "rope_scaling": {"factor": NaN}}\n')
    arguments = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    with scripted_llm(full_stream) as llm:
        assert named in error_of(capsys, llm.url, "--num-prompts", 1, "--json", tmp_path / "run.json", *arguments)
    assert not llm.requests


def test_url_is_required(capsys):
    assert cli.run(["bench", "serve"]) == 2
    assert "--url" in capsys.readouterr().err


def interrupt(llm: ScriptedLLM, number: signal.Signals, ready: Callable[[], bool], *arguments: object) -> str:
    """Run the command in a process, signal it once it is `ready`, check its exit code, and return its output."""
    command = [sys.executable, "-m", "windlass.server.cli.main", "bench", "serve", "--url", llm.url]
    process = subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in err
    return out


@pytest.mark.slow
def test_signal_during_warm_up(tmp_path):
    """The result has no requests and is marked as interrupted."""

    async def hangs(generation: Generation) -> None:
        await generation.wait_disconnect()

    path = tmp_path / "run.json"
    with scripted_llm(hangs) as llm:
        files = ["--json", path, "--csv", tmp_path / "run.csv"]
        interrupt(llm, signal.SIGINT, lambda: bool(llm.generations), "--warmup", 1, *files)
    data = json.loads(path.read_text())
    assert (data["completed"], data["failed"], data["interrupted"], data["requests"]) == (0, 0, True, [])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("number", "sweep"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_signal_ends_the_run_with_its_report(tmp_path, number, sweep):
    async def completes_three(generation: Generation) -> None:
        if len(llm.generations) <= 3:
            await full_stream(generation)
            return
        await generation.head()
        await generation.token()
        await generation.wait_disconnect()

    path = tmp_path / "run.json"
    arguments = ["--sweep", "--slo", "ttft:60000", "--request-rate", 1000] if sweep else []
    with scripted_llm(completes_three) as llm:
        arguments += ["--num-prompts", 9, "--concurrency", 2, "--json", path]
        out = interrupt(llm, number, lambda: sum(bool(each.sent) for each in llm.generations) >= 5, *arguments)
    data = json.loads(path.read_text())
    run = data["runs"][-1] if sweep else data
    assert run["interrupted"] is True
    assert (run["completed"], run["failed"], run["abandoned"]) == (3, 0, {"interrupted": 2})
    assert run["ttft_ms"]["p50"] > 0
    assert "interrupted" in out


def test_progress_lines_without_a_terminal(capsys):
    with scripted_llm(full_stream) as llm:
        assert bench(llm.url, "--num-prompts", 1) == 0
    err = capsys.readouterr().err
    assert err and "\x1b" not in err and all("ended" in line or "..." in line for line in err.splitlines())


def test_progress_bar_on_a_terminal(capsys):
    from windlass.clients.loadtest.display import ProgressDisplay
    from windlass.clients.loadtest.runner import RunProgress

    display = ProgressDisplay(terminal=True)
    display(RunProgress(phase="running", total=10, ended=3, running=2, failed=1, chunks=50))
    display.stop()
    display.stop()
    assert "3/10 ended, 2 running, 1 failed" in capsys.readouterr().err


def test_load_tester_imports_neither_torch_nor_the_server():
    code = (
        "import sys, windlass.clients.loadtest.runner, windlass.clients.loadtest.display, windlass.clients.loadtest.commands;"
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(('windlass.server', 'windlass.engine'))];"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
def test_waits_for_a_loading_server():
    calls = []

    async def models(exchange) -> None:
        calls.append(1)
        entry = {"id": "w", "owned_by": "windlass", "max_model_len": None if len(calls) < 3 else 512}
        await answer({"data": [entry]})(exchange)

    async def never(exchange) -> None:
        await answer({"data": [{"id": "w", "owned_by": "windlass"}]})(exchange)

    from windlass.clients.loadtest.target import ControlClient, LoadTestError, Target

    async def discover(url: str, seconds: float):
        async with ControlClient(Target(url=url)) as control:
            return await control.discover(seconds)

    with scripted_llm(full_stream, others={"/v1/models": models}) as llm:
        assert asyncio.run(discover(llm.url, 30.0)).max_model_len == 512
    assert len(calls) == 3
    with (
        scripted_llm(full_stream, others={"/v1/models": never}) as llm,
        pytest.raises(LoadTestError, match="still loading"),
    ):
        asyncio.run(discover(llm.url, 0.1))
