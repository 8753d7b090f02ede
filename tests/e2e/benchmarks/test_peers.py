"""benchmarks/peers.py: output of llama.cpp, ratios, workers, programs that are missing or fail, and runs on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.gguf_conversion import byte_vocabulary, convert
from helpers.tiny_models import make_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

# Recorded output of the tools, shortened.
LLAMA_BENCH = """\
[
  {
    "build_commit": "0c1e570",
    "cpu_info": "AMD EPYC",
    "model_type": "llama 1B Q8_0",
    "n_depth": 32,
    "avg_ts": 11.5,
    "samples_ns": [ 2 ],
    "samples_ts": [ 11.25 ]
  }
]
"""
BATCHED_BENCH = """\
main: n_kv_max = 512, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = -1, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    32 |     12 |    8 |    352 |    0.401 |   638.40 |    0.305 |   314.75 |    0.706 |   498.58 |
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("peers", monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 261}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    source = make_model("llama", folder / "hf", **sizes, **heads, max_position_embeddings=1024)
    return convert(source, folder / "tiny.gguf", kind="Q8_0", tokenizer=byte_vocabulary())


def test_output_of_llama_bench_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = module("harness.contestants", monkeypatch)
    error = module("harness.worker", monkeypatch).WorkerError
    assert contestants.parse_bench(LLAMA_BENCH) == (11.25, "build 0c1e570")
    assert contestants.parse_batched_bench(BATCHED_BENCH) == 314.75
    for broken in ("", "[]", "error: failed to load model", LLAMA_BENCH.replace("[ 11.25 ]", "[ 0 ]")):
        with pytest.raises(error, match="no tokens per second"):
            contestants.parse_bench(broken)
    with pytest.raises(error, match="no tokens per second"):
        contestants.parse_batched_bench(BATCHED_BENCH.replace("|    32 |", "|    -- |"))


def test_commands_of_llama_cpp_and_its_fork(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    contestants = module("harness.contestants", monkeypatch)
    model = module("harness.gguf_model", monkeypatch).GGUFModel(tiny)
    rows = contestants.ROWS
    llama, fork = (kind(model, 2, tmp_path) for kind in (contestants.LlamaCpp, contestants.IkLlamaCpp))
    assert " ".join(llama.command(rows["decode-1"])).endswith("-o json -r 1 -p 0 -n 64 -d 32")
    assert " ".join(fork.command(rows["decode-1"])).endswith("-rtr 1 -p 0 -n 0 -gp 32,64")
    assert " ".join(fork.command(rows["depth-16384"])).endswith("-ctk q8_0 -ctv q8_0 -fa 1 -p 0 -n 0 -gp 16384,16")
    assert " ".join(llama.command(rows["prompt-512"])).endswith("-p 512 -n 0")
    assert " ".join(fork.command(rows["decode-8"])).endswith("-c 2048 -npp 32 -ntg 32 -npl 8 -rtr")


# Of the model `tiny`: blocks of 32 weights take 34 bytes, norms are float32.
LAYERS = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
WEIGHT_BYTES = (LAYERS + 261 * 64) * 34 / 32 + 4 * 5 * 64
CACHED_VALUES = 2 * 2 * 2 * 16  # keys and values, layers, heads, size of a head


def test_ratios_are_those_of_a_calculation_by_hand(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    model = module("harness.gguf_model", monkeypatch).GGUFModel(tiny)
    assert model.weight_bytes == WEIGHT_BYTES and model.layer_parameters == LAYERS
    assert sorted(model.layer_shapes) == [(32, 64), (32, 64), (64, 64), (64, 64), (64, 96), (96, 64), (96, 64)]

    def result(row: str, program: str, samples: list[float], **rates: list[float]) -> dict[str, Any]:
        return {"row": row, "program": program, "samples": samples, "median": sum(samples) / len(samples), **rates}

    results = [
        result("decode-1", "Windlass", [100.0, 110.0], read_gb_s=[10.0, 20.0]),
        result("decode-1", "llama.cpp", [84.0], read_gb_s=[10.0]),
        result("decode-1", "ik_llama.cpp", [50.0], read_gb_s=[10.0]),
        result("decode-8", "Windlass", [420.0], read_gb_s=[10.0]),
        result("depth-16384", "llama.cpp", [5.0], read_gb_s=[10.0]),
        result("prompt-512", "Windlass", [300.0], linear_gflop_s=[600.0]),
    ]
    found = {(one["name"], one["program"]): one for one in peers.speed_ratios(results, model)}
    read = "decode, 1 stream: bytes read / read bandwidth"
    step = WEIGHT_BYTES + (32 + 32) * CACHED_VALUES * 2
    assert found[read, "Windlass"]["value"] == pytest.approx(step * (100 / 10e9 + 110 / 20e9) / 2)
    deep = found["decode after 16,384, 8-bit cache: bytes read / read bandwidth", "llama.cpp"]["value"]
    assert deep == pytest.approx((WEIGHT_BYTES + (16384 + 8) * CACHED_VALUES * 34 / 32) * 5 / 10e9)
    flop = 2 * LAYERS * 512 + 4 * 2 * 64 * 512 * 513 / 2
    assert found["prompt of 512: operations / bfloat16 linear", "Windlass"]["value"] == pytest.approx(
        300 / 512 * flop / 600e9
    )
    assert found["8 streams / 1", "Windlass"]["value"] == 4.0
    best = found["decode, 1 stream: over the best other", "Windlass"]
    assert best["value"] == 1.25 and best["over"] == "llama.cpp"
    assert sum("best other" in name for name, _ in found) == 1


WORKER = """
import sys
from harness.worker import serve
class Handler:
    info = {"version": "7"}
    def measure(self, request, prepared):
        print("output that must not mix with answers")
        if request["kind"] == "fail":
            raise ValueError("cannot")
        if request["kind"] == "die":
            raise SystemExit(3)
        if request["kind"] == "prepare":
            prepared()
        return float(request["steps"])
def make():
    if "refuse" in sys.argv:
        raise ValueError("no such option")
    return Handler()
serve(make)
"""


def test_worker_answers_reports_errors_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    options = {"log": tmp_path / "log", "environment": {"PYTHONPATH": str(BENCHMARKS)}}
    command = [sys.executable, "-c", WORKER]
    near = worker.Worker(command, **options)
    try:
        assert near.info == {"version": "7"}
        assert near.measure({"kind": "decode", "steps": 5}) == 5.0
        events: list[str] = []
        assert near.measure({"kind": "prepare", "steps": 7}, lambda: events.append("prepared")) == 7.0
        assert events == ["prepared"]
        assert near.measure({"kind": "prepare", "steps": 8}) == 8.0
        with pytest.raises(worker.WorkerError, match="ValueError: cannot"):
            near.measure({"kind": "fail"})
        assert near.measure({"kind": "decode", "steps": 6}) == 6.0
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": "die"})
    finally:
        near.close()
    assert "must not mix" in (tmp_path / "log").read_text()
    with pytest.raises(worker.WorkerError, match="no such option"):
        worker.Worker([*command, "refuse"], **options)
    with pytest.raises(worker.WorkerError, match="cannot be started"):
        worker.Worker([str(tmp_path / "python")], log=tmp_path / "log")


MINIMAL_WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True, "info": {"version": "7"}}), flush=True)
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    if kind == "die":
        os._exit(9)
    if kind == "hang":
        time.sleep(30)
    print(json.dumps({"value": {"hang": 32768.0}.get(kind, 4096.0)}), flush=True)
"""


def test_dead_worker_is_closed_without_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    near = worker.Worker([sys.executable, "-c", MINIMAL_WORKER], log=tmp_path / "log")
    for kind in ("die", "decode"):
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": kind})
        near.process.wait()
    near.close()


def test_late_answer_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    near = worker.Worker([sys.executable, "-c", MINIMAL_WORKER], log=tmp_path / "log")
    try:
        assert near.measure({"kind": "decode"}) == 4096.0
        with pytest.raises(worker.WorkerError, match="no answer within 0 s"):
            near.measure({"kind": "hang"}, timeout=0.0)
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": "decode"})
    finally:
        near.close()


def test_worker_of_windlass_fills_long_contexts_without_computing_them(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    model = module("harness.gguf_model", monkeypatch).GGUFModel(tiny)
    worker = module("harness.windlass_worker", monkeypatch)
    options = {"threads": 1, "kv_cache_memory": 1 << 22, "max_num_seqs": 8, "burst_seconds": 0.0}
    handler = worker.WindlassHandler(str(model.directory), options)
    computed = handler.core.runner.positions_computed
    start = time.perf_counter()
    prepared: list[int] = []
    request: dict[str, Any] = {"kind": "decode", "tokens": 900, "streams": 1, "steps": 3}
    value = handler.measure(request, lambda: prepared.append(handler.core.runner.positions_computed))
    assert 3 / (time.perf_counter() - start) < value
    steps = [handler.core.runner.positions_computed - at for at in prepared]
    assert steps == [6]  # three untimed and three timed ones
    assert handler.core.runner.positions_computed - computed < 10
    for request in ({"kind": "decode", "tokens": 8, "streams": 2}, {"kind": "prompt", "tokens": 40, "streams": 1}):
        assert handler.measure({"steps": 2, **request}, lambda: prepared.append(0)) > 0
    assert len(prepared) == 3
    assert not handler.core.has_work()
    with pytest.raises(ValueError, match="no wishful_option"):
        worker.WindlassHandler(str(model.directory), {"wishful_option": 1})


class SteadyRates:
    """Rates of a machine that always has the same."""

    def __init__(self, threads: int) -> None:
        self.linear: list[str] = []

    def add_linear(self, name: str, shapes: list[tuple[int, int]], rows: int) -> None:
        self.linear.append(name)

    def now(self, name: str) -> float:
        return 600.0 if name in self.linear else 40.0


@pytest.fixture
def run(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs a command of peers.py on the tiny model and returns its report."""
    monkeypatch.setattr(peers, "Rates", SteadyRates)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))

    def run(command: str, *words: str) -> dict[str, Any]:
        arguments = f"--model {tiny} --threads 1 --max-foreign 1 --work {tmp_path} --out {tmp_path / 'out.json'}"
        monkeypatch.setattr(sys, "argv", [f"peers.py {command}", *arguments.split(), *words])
        getattr(peers, command)()
        report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return report

    return run


def test_speed_of_installed_programs_is_measured_and_others_are_left_out(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "peers" / "llama.cpp-build" / "bin"
    tools.mkdir(parents=True)
    for name, output in (("llama-bench", LLAMA_BENCH), ("llama-batched-bench", BATCHED_BENCH)):
        (tools / name).write_text(f"#!{sys.executable}\nprint('''{output}''')\n")
        (tools / name).chmod(0o755)
    report = run("speed", "--only", "decode-1", "decode-8", "prompt-512", "--rounds", "2")
    found = {(one["row"], one["program"]): one for one in report["results"]}
    rows = ("decode-1", "decode-8", "prompt-512")
    assert set(found) == {(row, program) for row in rows for program in ("Windlass", "llama.cpp")}
    ours, theirs = (found["decode-1", program] for program in ("Windlass", "llama.cpp"))
    assert ours["min"] <= ours["median"] <= ours["max"] and len(ours["samples"]) == 2
    assert theirs["samples"] == [11.25, 11.25] and theirs["read_gb_s"] == [40.0, 40.0] and len(theirs["foreign"]) == 2
    assert found["prompt-512", "Windlass"]["linear_gflop_s"] == [600.0, 600.0]
    assert "llama-bench -m" in theirs["command"] and report["versions"]["llama.cpp"] == "build 0c1e570"
    ratios = {(one["name"], one["program"]): one["value"] for one in report["ratios"]}
    assert ratios["8 streams / 1", "llama.cpp"] == pytest.approx(314.75 / 11.25)
    assert ratios["decode, 1 stream: over the best other", "Windlass"] == pytest.approx(ours["median"] / 11.25)
    missing = {one["name"]: one["reason"] for one in report["left_out"]}
    assert set(missing) == {"ik_llama.cpp", "OpenVINO GenAI"}
    assert "git clone" in missing["ik_llama.cpp"] and "pip install openvino-genai" in missing["OpenVINO GenAI"]
    assert (tmp_path / "out.png").stat().st_size > 0
    assert "| decode, 1 stream | llama.cpp | 11.2 tokens/s | 11.2 to 11.2 |" in capsys.readouterr().out


def test_interrupted_run_keeps_complete_rows_and_what_failed(
    run: Callable[..., dict[str, Any]], peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fake(peers.Contestant):
        """Raises `error` after `left` samples."""

        install = ""
        left: int
        error: type[BaseException]

        def start(self, cache: str) -> None:
            self.version = "7"

        def command(self, row: Any) -> list[str]:
            return ["run"]

        def measure(self, row: Any, prepared: Callable[[], None]) -> float:
            self.left -= 1
            if self.left < 0:
                raise self.error("the process has ended")
            prepared()
            return 20.0

    class Dies(Fake):
        program, left, error = "llama.cpp", 1, peers.WorkerError

    class Interrupted(Fake):
        program, left, error = "Windlass", 4, KeyboardInterrupt  # in its third row

    monkeypatch.setattr(peers, "CONTESTANTS", (Dies, Interrupted))
    with pytest.raises(KeyboardInterrupt):
        run("speed", "--only", "decode-1", "decode-8", "decode-32", "--rounds", "2")
    report = json.loads((tmp_path / "out.json").read_text())
    found = [(one["row"], one["program"], len(one["samples"])) for one in report["results"]]
    assert found == [("decode-1", "llama.cpp", 1), ("decode-1", "Windlass", 2), ("decode-8", "Windlass", 2)]
    titles = [one["reason"].partition(":")[0] for one in report["left_out"]]
    assert titles == ["decode, 1 stream", "decode, 8 streams", "decode, 32 streams"]


def test_start_chat_and_lookup_of_a_server_are_measured(run: Callable[..., dict[str, Any]]) -> None:
    report = run("server", "--only", "start", "chat", "lookup", "draft", "--rounds", "1")
    value = {one["row"]: one["median"] for one in report["results"]}
    beyond = value["start: time to ready"] - value["start: import torch"]
    assert value["start: beyond import torch"] == pytest.approx(beyond)
    parts = ("mapped weights", "used cache", "import torch", "the rest")
    assert sum(value[f"memory: {part}"] for part in parts) == pytest.approx(value["memory: all processes"])
    assert value["memory: import torch"] > 50 and value["memory: used cache"] > 0.1
    assert value["lookup: same answers"] == 1
    quotient = value["chat: first token"] / value["chat: decode step"]
    ratios = {one["name"]: one["value"] for one in report["ratios"]}
    assert ratios["chat: first token over a decode step"] == pytest.approx(quotient)
    assert [one["name"] for one in report["left_out"]] == ["draft"]


def test_memory_of_a_mapped_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mmap
    import os

    machine = module("harness.machine", monkeypatch)
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    assert machine.proportional_memory_of_file([os.getpid()], file) == 0
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert machine.proportional_memory_of_file([os.getpid()], file) == 1 << 20
    assert machine.proportional_memory([os.getpid()]) > 1 << 20
