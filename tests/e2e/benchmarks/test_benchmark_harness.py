"""benchmarks/harness: output of llama.cpp, shapes, bounds, workers, and runs in which a program fails."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

# Recorded output of the tools, shortened.
LLAMA_BENCH = """\
{"build_commit": "0c1e570", "build_number": 0, "cpu_info": "AMD EPYC", "model_type": "llama 1B Q8_0", "n_threads": 2, \
"type_k": "f16", "n_prompt": 0, "n_gen": 24, "n_depth": 0, "avg_ts": 11.5, "stddev_ts": 0.5, "samples_ns": [2, 3], \
"samples_ts": [ 12, 11.25 ]}
"""
BATCHED_BENCH = """\

main: n_kv_max = 512, n_batch = 2048, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0, n_threads = 2

{"n_kv_max": 512, "pp": 32, "tg": 12, "pl": 8, "t_pp": 1.5, "speed_pp": 170.6, "t_tg": 2.4, "speed_tg": 40.0}
"""


# ik_llama.cpp prints an array (llama-bench) and a table (llama-batched-bench).
IK_BENCH = """\
[
  {
    "build_commit": "8337e4c",
    "test": "tg8@pp32",
    "samples_ts": [ 47.3606, 52.8892 ]
  }
]
"""
IK_BATCHED_BENCH = """\
main: n_kv_max = 512, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = -1, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    32 |     12 |    8 |    352 |    0.401 |   638.40 |    0.305 |   314.75 |    0.706 |   498.58 |
"""
PERPLEXITY = """\
[15]22.7508,
llama_print_timings:       total time =   37413.33 ms / 11521 tokens

Final estimate: PPL over 15 chunks for n_ctx=768 = 22.7508 +/- 0.86777
"""
DIVERGENCE = """\
====== Perplexity statistics ======
Mean PPL(Q)                   :  22.858121 ±   0.871860
Mean PPL(base)                :  22.750802 ±   0.867768
====== KL divergence statistics ======
Mean    KLD:   0.003654 ±   0.000079
====== Token probability statistics ======
Same top p: 95.527 ± 0.272 %
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def report_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("harness.report", monkeypatch)


def test_output_of_llama_cpp_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = module("harness.llama_cpp", monkeypatch)
    assert llama.parse_bench(LLAMA_BENCH) == [12.0, 11.25]
    assert llama.parse_version(LLAMA_BENCH) == "build 0c1e570"
    assert llama.parse_batched_bench(BATCHED_BENCH) == [40.0]
    for broken in ("", "error: failed to load model", LLAMA_BENCH.replace("[ 12, 11.25 ]", "[0]")):
        with pytest.raises(ValueError, match="no tokens per second"):
            llama.parse_bench(broken)


def test_commands_and_the_output_of_its_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, measures = module("harness.llama_cpp", monkeypatch), module("harness.measures", monkeypatch)
    assert llama.parse_bench(IK_BENCH) == [47.3606, 52.8892]
    assert llama.parse_version(IK_BENCH) == "build 8337e4c"
    assert llama.parse_batched_bench(IK_BATCHED_BENCH) == [314.75]
    with pytest.raises(ValueError, match="no tokens per second"):
        llama.parse_batched_bench(IK_BATCHED_BENCH.replace("|    32 |", "|    -- |"))
    dialect = llama.DIALECTS["ik_llama.cpp"]
    one, eight = measures.measures_of("decode", (), 6)
    line = " ".join(llama.bench_command(Path("b"), Path("m"), one, 2, 1, dialect))
    assert "-o json " in line and "-rtr 1" in line and line.endswith("-p 0 -n 144")
    (depth,) = measures.measures_of("depth", (512,), 6)
    line = " ".join(llama.bench_command(Path("b"), Path("m"), depth, 2, 3, dialect))
    assert "-gp 512,48" in line and "-ctk q8_0" in line and " -d " not in line
    line = llama.batched_bench_command(Path("b"), Path("m"), eight, 2, dialect)
    assert line[-1] == "-rtr" and "1" not in line


def test_output_of_llama_perplexity_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = module("harness.llama_cpp", monkeypatch)
    assert llama.parse_perplexity(PERPLEXITY) == {"perplexity": 22.7508}
    found = llama.parse_perplexity(DIVERGENCE)
    assert found == pytest.approx({"perplexity": 22.858121, "divergence": 0.003654, "same_first": 0.95527})
    with pytest.raises(ValueError, match="no perplexity"):
        llama.parse_perplexity("error: unable to load model")
    command = llama.perplexity_command(Path("p"), Path("m"), Path("t"), 768, Path("base"), compare=True)
    assert command[-1] == "--kl-divergence" and command[command.index("-c") + 1] == "768"


def test_shape_has_the_parameters_of_transformers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    shape = module("harness.shape", monkeypatch).ONE_B
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert shape.matrix_parameters == sum(parameter.numel() for parameter in matrices)
    assert shape.weight_bytes("int8") == pytest.approx(1.04e9, rel=0.01)
    assert shape.weight_bytes("q4_0") == pytest.approx(0.585e9, rel=0.01)
    assert shape.kv_bytes_per_token("float32") == 2 * 16 * 8 * 64 * 4
    assert shape.kv_bytes_per_token("int8") == 2 * 16 * 8 * (64 + 4)


def test_bounds_are_bytes_over_bandwidth(report_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = module("harness.shape", monkeypatch).ONE_B
    bound, _ = report_module.bound_of(shape, "decode", 8, 32, "int8", "float16", 20.0)
    assert bound == pytest.approx(8 * 20e9 / shape.weight_bytes("int8"))
    deep, reason = report_module.bound_of(shape, "depth", 1, 8192, "int8", "int8", 20.0)
    assert 1 / deep == pytest.approx(1 / (bound / 8) + 8192 * shape.kv_bytes_per_token("int8") / 20e9)
    assert "int8 KV" in reason
    wide, reason = report_module.bound_of(shape, "depth", 1, 8192, "int8", "float16", 20.0)
    assert wide < deep and "float16 KV" in reason
    reported, _ = report_module.bound_of(shape, "depth", 1, 8192, "int8", "float16", 20.0, 1e4)
    assert 1 / reported == pytest.approx((shape.weight_bytes("int8") + 8192 * 1e4) / 20e9)
    assert report_module.bound_of(shape, "prefill", 1, 512, "int8", "auto", 20.0) is None
    with pytest.raises(KeyError):  # the dtype that the engine chose must be known
        report_module.bound_of(shape, "depth", 1, 8192, "int8", "auto", 20.0)


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
        if request["kind"] == "depth":
            prepared()
        return [float(request["steps"])]
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
        assert near.info == {"version": "7"} and near.ready_seconds > 0
        assert near.measure({"kind": "decode", "steps": 5}) == [5.0]
        events: list[str] = []
        assert near.measure({"kind": "depth", "steps": 7}, lambda: events.append("prepared")) == [7.0]
        assert events == ["prepared"]
        assert near.measure({"kind": "depth", "steps": 8}) == [8.0]
        with pytest.raises(worker.WorkerError, match="ValueError: cannot"):
            near.measure({"kind": "fail"})
        assert near.measure({"kind": "decode", "steps": 6}) == [6.0]
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": "die"})
    finally:
        near.close()
    assert "must not mix" in (tmp_path / "log").read_text()
    with pytest.raises(worker.WorkerError, match="no such option"):
        worker.Worker([*command, "refuse"], **options)


def test_worker_of_windlass_fills_the_cache_without_computing_the_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape_module = module("harness.shape", monkeypatch)
    shape = shape_module.ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=300, context=4096)
    module("harness.checkpoint", monkeypatch).make_checkpoint(tmp_path, shape)
    handler = module("harness.windlass_worker", monkeypatch).WindlassHandler(
        str(tmp_path), {"threads": 1, "kv_cache_memory": 1 << 23, "max_num_seqs": 8, "burst_seconds": 0.0}
    )
    computed = handler.core.runner.positions_computed
    start = time.perf_counter()
    prepared: list[int] = []
    request: dict[str, Any] = {"kind": "depth", "prompt": 2000, "streams": 1, "steps": 3}
    (value,) = handler.measure(request, lambda: prepared.append(handler.core.runner.positions_computed))
    assert 3 / (time.perf_counter() - start) < value
    steps = [handler.core.runner.positions_computed - at for at in prepared]
    assert steps == [6]  # three untimed and three timed ones
    assert handler.core.runner.positions_computed - computed < 10
    pages = handler.core.runner.cache.pages(1)
    assert pages.key[:100].std() == pytest.approx(1.0, rel=0.1)
    for request in ({"kind": "decode", "prompt": 8, "streams": 2, "steps": 2}, {"kind": "prefill", "prompt": 40}):
        (value,) = handler.measure({"streams": 1, "steps": 1, **request}, lambda: prepared.append(0))
        assert value > 0
    assert len(prepared) == 3
    assert not handler.core.has_work()
    module_ = sys.modules["harness.windlass_worker"]
    with pytest.raises(ValueError, match="no wishful_option"):
        module_.WindlassHandler(str(tmp_path), {"wishful_option": 1})


MINIMAL_WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True, "info": {"version": "7"}}), flush=True)
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    if kind == "die":
        os._exit(9)
    if kind == "hang":
        time.sleep(30)
    print(json.dumps({"values": [{"hang": 32768.0}.get(kind, 4096.0)]}), flush=True)
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
        assert near.measure({"kind": "decode"}) == [4096.0]
        with pytest.raises(worker.WorkerError, match="no answer within 0 s"):
            near.measure({"kind": "hang"}, timeout=0.0)
        with pytest.raises(worker.WorkerError, match="ended"):
            near.measure({"kind": "decode"})
    finally:
        near.close()


def test_missing_program_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    with pytest.raises(worker.WorkerError, match="cannot be started"):
        worker.Worker([str(tmp_path / "python")], log=tmp_path / "log")


class Steady:
    """Rates of a machine that always reads 40 GB/s."""

    def samples(self) -> dict[str, list[float]]:
        return {name: [40.0] for name in ("read_gb_s", "copy_gb_s", "fp32_gflop_s")}

    def around(self, name: str, work: Any) -> tuple[Any, tuple[float, float]]:
        return work(lambda: None), (40.0, 40.0)


class Contestant:
    """Raises `error` after `most` measures."""

    program, weights, kv_dtype, slow = "Windlass", "int8", "auto", False

    def __init__(self, name: str, most: int, error: type[Exception]) -> None:
        self.name, self._left, self._error = name, most, error

    def start(self) -> None:
        pass

    close = start

    def version(self) -> str:
        return "7"

    def weight_bytes(self) -> float:
        return 1e9

    def info(self) -> dict[str, Any]:
        return {"weight_bytes": 1e9, "kv_bytes_per_token": 1e4, "kv_cache_dtype": "float16"}

    def cache(self) -> tuple[str, float]:
        return "float16", 1e4

    def measure(self, measure: Any, repeats: int, prepared: Any) -> list[float]:
        self._left -= 1
        if self._left < 0:
            raise self._error("the process has ended")
        prepared()
        return [20.0]


def test_report_is_saved_after_every_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = module("peers", monkeypatch)
    dies = Contestant("Windlass int4", 1, peers.WorkerError)
    interrupted = Contestant("Windlass int8", 4, KeyboardInterrupt)  # interrupted in its third measure
    monkeypatch.setattr(peers, "contestants_for", lambda *given: [dies, interrupted])
    monkeypatch.setattr(peers, "prepare_windlass", lambda *given: None)
    monkeypatch.setattr(peers, "Rates", lambda threads: Steady())
    earlier = {"schema": 1, "model": "1b", "runs": []}
    (tmp_path / "peers.json").write_text(json.dumps(earlier))
    words = ["--only", "decode", "--streams", "1", "2", "3", "--rounds", "2", "--max-foreign", "1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *words, "--work", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        peers.main()
    (run,) = json.loads((tmp_path / "peers.json").read_text())["runs"]
    found = [(one["measure"], one["contestant"], len(one["samples"])) for one in run["results"]]
    assert found == [
        ("decode, 1 stream", "Windlass int4", 1),
        ("decode, 1 stream", "Windlass int8", 2),
        ("decode, 2 streams", "Windlass int8", 2),
    ]
    assert [one["contestant"] for one in run["left_out"]] == ["Windlass int4"] * 2
