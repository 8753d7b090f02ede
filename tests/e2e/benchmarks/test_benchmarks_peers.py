"""The parts of benchmarks/peers.py and its neighbours that need no peer: reading outputs, statistics, bounds, pictures."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

# Recorded from the tools themselves, shortened to the fields that matter.
LLAMA_BENCH = """\
{"build_commit": "0c1e570", "build_number": 0, "cpu_info": "AMD EPYC", "model_type": "llama 1B Q8_0", "n_threads": 2, \
"type_k": "f16", "n_prompt": 0, "n_gen": 24, "n_depth": 0, "avg_ts": 11.5, "stddev_ts": 0.5, "samples_ns": [2, 3], \
"samples_ts": [ 12, 11.25 ]}
"""
BATCHED_BENCH = """\

main: n_kv_max = 512, n_batch = 2048, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0, n_threads = 2

{"n_kv_max": 512, "pp": 32, "tg": 12, "pl": 8, "t_pp": 1.5, "speed_pp": 170.6, "t_tg": 2.4, "speed_tg": 40.0}
"""


# ik_llama.cpp's, whose llama-bench prints one array and whose llama-batched-bench a table.
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


def test_what_llama_cpp_prints_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = module("harness.llama_cpp", monkeypatch)
    assert llama.parse_bench(LLAMA_BENCH) == [12.0, 11.25]
    assert llama.parse_version(LLAMA_BENCH) == "build 0c1e570"
    assert llama.parse_batched_bench(BATCHED_BENCH) == [40.0]
    for broken in ("", "error: failed to load model", LLAMA_BENCH.replace("[ 12, 11.25 ]", "[0]")):
        with pytest.raises(ValueError, match="no tokens per second"):
            llama.parse_bench(broken)


def test_what_its_fork_prints_is_read_and_asked_for_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_perplexity_is_read_alone_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = module("harness.llama_cpp", monkeypatch)
    assert llama.parse_perplexity(PERPLEXITY) == {"perplexity": 22.7508}
    found = llama.parse_perplexity(DIVERGENCE)
    assert found == pytest.approx({"perplexity": 22.858121, "divergence": 0.003654, "same_first": 0.95527})
    with pytest.raises(ValueError, match="no perplexity"):
        llama.parse_perplexity("error: unable to load model")
    command = llama.perplexity_command(Path("p"), Path("m"), Path("t"), 768, Path("base"), compare=True)
    assert command[-1] == "--kl-divergence" and command[command.index("-c") + 1] == "768"


def test_the_shape_counts_what_transformers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
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
    told, _ = report_module.bound_of(shape, "depth", 1, 8192, "int8", "float16", 20.0, 1e4)
    assert 1 / told == pytest.approx((shape.weight_bytes("int8") + 8192 * 1e4) / 20e9)
    assert report_module.bound_of(shape, "prefill", 1, 512, "int8", "auto", 20.0) is None
    with pytest.raises(KeyError):  # what the engine chose has to be known
        report_module.bound_of(shape, "depth", 1, 8192, "int8", "auto", 20.0)


FAR_END = """
import sys
from harness.worker import serve
class Handler:
    info = {"version": "7"}
    def measure(self, request, prepared):
        print("noise that must not mix with answers")
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


def test_a_worker_answers_refuses_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = module("harness.worker", monkeypatch)
    options = {"log": tmp_path / "log", "environment": {"PYTHONPATH": str(BENCHMARKS)}}
    command = [sys.executable, "-c", FAR_END]
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
    assert "noise" in (tmp_path / "log").read_text()
    with pytest.raises(worker.WorkerError, match="no such option"):
        worker.Worker([*command, "refuse"], **options)


def test_the_windlass_worker_measures_and_fills_the_cache_without_computing(
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
    assert [handler.core.runner.positions_computed - at for at in prepared] == [
        6
    ]  # three untimed steps, and the timed ones
    assert handler.core.runner.positions_computed - computed < 10  # the steps, not the prompt
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
