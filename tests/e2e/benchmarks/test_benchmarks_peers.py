"""The parts of benchmarks/peers.py and its neighbours that need no peer: reading outputs, statistics, bounds, pictures."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import statistics
import subprocess
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


def result(measure: str, contestant: str, samples: list[float], **more: Any) -> dict[str, Any]:
    return {
        "measure": measure,
        "contestant": contestant,
        "program": contestant.split()[0],
        "weights": "int8",
        "kv_dtype": "auto",
        "unit": "tokens/s",
        "samples": samples,
        "foreign": [0.01],
        "discarded": 0,
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        **more,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    rate = {"median": 20.0, "min": 19.0, "max": 21.0}
    run = {
        "date": "2026-11-21 20:00",
        "machine": {"cpu": "Test CPU"},
        "threads": 2,
        "rounds": 3,
        "rates": {"read_gb_s": rate, "copy_gb_s": rate, "fp32_gflop_s": rate},
        "load": {"before": 0.1, "after": 1.5},
        "versions": {},
        "results": [
            result("decode, 1 stream", "Windlass int8", [18.0, 17.0, 19.0], bound=20.0),
            result("decode, 1 stream", "OpenVINO int8", [16.0, 15.0, 17.0], bound=20.0),
            result("prefill 512", "Windlass int8", [200.0, 200.0, 200.0]),
            result("time to ready", "Windlass int8", [4.0, 3.0, 5.0]),
        ],
        "left_out": [{"contestant": "llama.cpp Q8_0", "reason": "not installed"}],
    }
    return {"schema": 1, "model": "1b", "runs": [run]}


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


def test_quality_stands_beside_speed(report_module: ModuleType, report: dict[str, Any]) -> None:
    run = report["runs"][0]
    run["quality"] = {"Windlass int8": {"perplexity": 22.85, "change": 0.0043}, "OpenVINO int8": {"change": 0.012}}
    run["ratios"] = report_module.ratios(run)
    text = report_module.table(run)
    assert "| decode, 1 stream | Windlass int8 | +0.43 % | 18 tokens/s" in text
    assert "Windlass int8 over OpenVINO int8 (perplexity +0.43 % against +1.2 %) | 1.12" in text
    assert report_module.quality_of(run["quality"], "Windlass int8, int8 KV") == "+0.43 %"
    assert report_module.quality_of(run["quality"], "vLLM bf16") == "–"
    assert report_module.quality_of(run["quality"], "Windlass int8, computed in bfloat16") == "–"
    run["results"][-1]["unit"] = "s"
    head, _, ours, *_ = report_module.by_contestant(run).splitlines()
    assert head == "| | perplexity | decode, 1 stream | prefill 512 |"  # seconds are no throughput
    assert ours == "| Windlass int8 | +0.43 % | 18 (17–19) | 200 (200–200) |"


def test_a_real_model_s_shape_is_counted(report_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = module("harness.shape", monkeypatch).SMOLLM2
    assert shape.weight_bytes("int8") == pytest.approx(134.5e6, rel=0.001)
    bound, _ = report_module.bound_of(shape, "decode", 1, 32, 143.0e6, "float16", 28.6)
    assert bound == pytest.approx(200)  # what a program says it holds counts, scales and all


def test_a_depth_is_one_command_for_all_repeats_with_a_quantized_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, measures = module("harness.llama_cpp", monkeypatch), module("harness.measures", monkeypatch)
    (depth,) = measures.measures_of("depth", (4096,))
    line = " ".join(llama.bench_command(Path("b"), Path("m"), depth, 2, 3))
    assert "-r 3 " in line and "-d 4096" in line and "-ctk q8_0 -ctv q8_0" in line and "-p 0 -n 8" in line
    short, long = measures.measures_of("prefill", ())
    assert "-p 512 -n 0" in " ".join(llama.bench_command(Path("b"), Path("m"), short, 2, 1))
    for dialect, cold in zip(llama.DIALECTS.values(), ("--no-warmup", "-w 0"), strict=True):
        lines = [" ".join(llama.bench_command(Path("b"), Path("m"), one, 2, 1, dialect)) for one in (short, long)]
        assert cold not in lines[0] and cold in lines[1]  # the others are warm; a long prompt twice would take minutes
    assert long.prompt == 4096


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


def test_attention_operations_are_those_of_the_causal_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = module("harness.shape", monkeypatch).SMALL
    brute = sum(2 * 2 * shape.head_dim * (i + 1) for i in range(33)) * shape.heads * shape.layers
    assert shape.attention_operations(33) == brute


def test_the_attention_rate_is_found_in_two_prefills(
    report_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = module("harness.shape", monkeypatch).ONE_B
    rate, per_token = 100e9, 0.004

    def prefill(tokens: int) -> dict[str, float]:
        return {"median": tokens / (per_token * tokens + shape.attention_operations(tokens) / rate)}

    found = report_module.attention_rate(prefill(512), prefill(4096), shape, (512, 4096))
    assert found == pytest.approx(100, rel=1e-6)
    assert math.isnan(report_module.attention_rate({"median": 10.0}, {"median": 90.0}, shape, (512, 4096)))


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


def test_the_bound_at_depth_is_that_of_the_cache_that_the_engine_has(
    report_module: ModuleType, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads at nine tenths of what there is, from the float16 cache that "auto" came to."""
    shape = module("harness.shape", monkeypatch).SMOLLM2
    read = 143e6 + 4096 * shape.kv_bytes_per_token("float16")
    found = result("decode at 4,096", "Windlass int8", [0.9 * 40e9 / read], kind="depth", streams=1, prompt=4096)
    found |= {"weight_bytes": 143e6, "kv_cache_dtype": "float16", "rates": {"read_gb_s": [[40.0, 40.0]]}}
    report_module.add_bound(found, shape)
    assert found["share"] == pytest.approx(0.9) and "float16 KV" in found["bound_reason"]
    run = report["runs"][0]
    run["results"] = [found]
    assert "impossible" not in report_module.table(run)
    wrong = found | {"kv_cache_dtype": "float32"}
    report_module.add_bound(wrong, shape)
    run["results"] = [wrong]
    assert wrong["share"] > 1.2 and "126% of 121 (impossible: the bound is wrong)" in report_module.table(run)


def test_no_published_share_is_impossible(report_module: ModuleType) -> None:
    for name in ("peers.json", "peers_135m.json", "peers_1b.json"):
        published = json.loads((BENCHMARKS.parent / "docs" / name).read_text(encoding="utf-8"))
        for run in published["runs"]:
            shares = {(r["measure"], r["contestant"]): report_module.share_of(r) or 0 for r in run["results"]}
            assert max(shares.values()) < 1, (name, run["date"], shares)


def test_published_bounds_follow_from_the_caches_that_are_named(
    report_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = module("harness.shape", monkeypatch).SHAPES
    published = json.loads((BENCHMARKS.parent / "docs" / "peers_135m.json").read_text(encoding="utf-8"))
    told = [r for run in published["runs"] for r in run["results"] if "kv_cache_dtype" in r]
    assert len(told) == 7
    for found in told:
        again = dict(found)
        report_module.add_bound(again, shapes["135m"])
        assert again == found


def beside(report_module: ModuleType, shape: Any, samples: list[float], pairs: list[list[float]]) -> dict[str, Any]:
    found = result("decode, 1 stream", "Windlass int8", samples, kind="decode", streams=1, prompt=32)
    found["rates"] = {"read_gb_s": pairs}
    report_module.add_bound(found, shape)
    return found


def test_a_share_is_that_of_each_sample_beside_its_own_rates(
    report_module: ModuleType, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that swings from 20 to 60 GB/s, and a program that always reads at nine tenths of what there is."""
    shape = module("harness.shape", monkeypatch).ONE_B
    pairs = [[20.0, 20.0], [50.0, 70.0], [35.0, 45.0], [21.0, 23.0]]
    samples = [0.9 * sum(pair) / 2 * 1e9 / shape.weight_bytes("int8") for pair in pairs]
    found = beside(report_module, shape, samples, pairs)
    assert found["share"] == pytest.approx(0.9) == report_module.share_of(found)
    assert found["bound"] == pytest.approx(31e9 / shape.weight_bytes("int8"))  # between 22 and 40 GB/s
    assert "beside each sample" in found["bound_reason"]
    report["runs"][0]["results"] = [found]
    report_module.check(report)
    assert "| 90% of 29.8 | 31 GB/s | 1% |" in report_module.table(report["runs"][0])
    (ratio,) = report_module.ratios(report["runs"][0])
    assert ratio["over"] == "bound" and ratio["ratio"] == found["share"]
    for broken in ({"share": 0.8}, {"rates": {"read_gb_s": pairs[:3]}}, {"rates": {"read_gb_s": [[20.0]] * 4}}):
        report["runs"][0]["results"] = [{**found, **broken}]
        with pytest.raises(ValueError, match="Windlass int8, decode, 1 stream"):
            report_module.check(report)


def test_a_prompt_has_a_rate_beside_it_but_no_bound(
    report_module: ModuleType, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_module.rate_of_kind("prefill") == "fp32_gflop_s"
    assert report_module.rate_of_kind("decode") == report_module.rate_of_kind("depth") == "read_gb_s"
    shape = module("harness.shape", monkeypatch).ONE_B
    prompt = result("prefill 512", "Windlass int8", [200.0], kind="prefill", streams=1, prompt=512)
    prompt["rates"] = {"fp32_gflop_s": [[120.0, 130.0]]}
    report_module.add_bound(prompt, shape)
    assert "bound" not in prompt and report_module.share_of(prompt) is None
    report["runs"][0]["results"] = [prompt]
    report_module.check(report)
    assert "| – | 125 Gflop/s | 1% |" in report_module.table(report["runs"][0])


def test_a_report_without_rates_beside_its_samples_is_still_read(report_module: ModuleType) -> None:
    older = json.loads((BENCHMARKS.parent / "docs" / "peers.json").read_text(encoding="utf-8"))
    report_module.check(older)
    bounded = [r for run in older["runs"] for r in run["results"] if r.get("bound") and "share" not in r]
    for found in bounded:
        assert report_module.share_of(found) == pytest.approx(found["median"] / found["bound"])


def test_rates_are_taken_right_before_and_right_after(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = module("harness.rates", monkeypatch)
    readable = rates.readable
    monkeypatch.setattr(rates, "readable", lambda nbytes: readable(min(nbytes, 1 << 22)))
    machine = rates.Rates(1)
    assert all(len(values) == 2 and min(values) > 0 for values in machine.samples(2).values())
    assert set(machine.samples(1)) == {"read_gb_s", "copy_gb_s", "fp32_gflop_s"}
    assert machine.now("read_gb_s", 0.001) > 0
    events: list[str] = []
    taken = iter([10.0, 20.0, 30.0])

    def now(name: str) -> float:
        events.append(name)
        return next(taken)

    def work(prepared: Any) -> str:
        for event in ("first attempt", "second attempt"):
            prepared()
            events.append(event)
        return "value"

    monkeypatch.setattr(machine, "now", now)
    assert machine.beside("read_gb_s", work) == ("value", (20.0, 30.0))
    assert events == ["read_gb_s", "first attempt", "read_gb_s", "second attempt", "read_gb_s"]
    with pytest.raises(ValueError, match="nobody said"):
        machine.beside("read_gb_s", lambda prepared: "unprepared")


def test_ratios_stay_in_a_run_and_meet_their_goal(report_module: ModuleType, report: dict[str, Any]) -> None:
    found = {(r["measure"], r["over"]): r for r in report_module.ratios(report["runs"][0])}
    assert set(found) == {("decode, 1 stream", "OpenVINO int8"), ("decode, 1 stream", "bound")}
    assert found["decode, 1 stream", "OpenVINO int8"]["ratio"] == pytest.approx(18 / 16)
    assert found["decode, 1 stream", "OpenVINO int8"]["reached"]
    assert found["decode, 1 stream", "bound"]["ratio"] == pytest.approx(0.9)


def test_a_report_is_checked(report_module: ModuleType, report: dict[str, Any]) -> None:
    report_module.check(report)
    broken = copy.deepcopy(report)
    broken["runs"][0]["results"][0]["median"] = 30.0
    with pytest.raises(ValueError, match="Windlass int8, decode, 1 stream"):
        report_module.check(broken)
    broken = copy.deepcopy(report)
    del broken["runs"][0]["load"]
    with pytest.raises(ValueError, match="run lacks load"):
        report_module.check(broken)
    with pytest.raises(ValueError, match="schema 2"):
        report_module.check({**report, "schema": 2})


def test_a_measure_comes_from_one_run_only(report_module: ModuleType, report: dict[str, Any]) -> None:
    later = copy.deepcopy(report["runs"][0])
    later["results"] = [result("decode, 1 stream", "Windlass int8", [30.0])]
    report["runs"].append(later)
    pairs = report_module.newest_results(report)
    decode = [(run, r) for run, r in pairs if r["measure"] == "decode, 1 stream"]
    assert [r["median"] for _, r in decode] == [30.0] and decode[0][0] is later
    assert {r["measure"] for _, r in pairs} == {"decode, 1 stream", "prefill 512", "time to ready"}


def test_the_table_says_what_was_measured_and_what_not(report_module: ModuleType, report: dict[str, Any]) -> None:
    run = report["runs"][0]
    run["ratios"] = report_module.ratios(run)
    text = report_module.table(run)
    assert "| decode, 1 stream | Windlass int8 | – | 18 tokens/s | 17–19 | 90% of 20 |" in text
    assert "Windlass int8 over OpenVINO int8 | 1.12 | 1.1 reached" in text
    assert "left out: llama.cpp Q8_0: not installed" in text
    assert "load 0.10 before and 1.50 after" in text


def test_percentiles_are_nearest_rank(report_module: ModuleType) -> None:
    values = [float(v) for v in range(1, 201)]
    assert report_module.percentile(values[::-1], 99) == 198.0
    assert report_module.percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError):
        report_module.percentile([], 50)


def test_the_slope_of_a_line_with_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    slope = module("context_cost", monkeypatch).slope
    depths = [256.0, 4096.0, 32768.0]
    assert slope(depths, [0.01 + 3e-6 * d for d in depths]) == pytest.approx(3e-6)


def test_a_slope_is_held_against_the_bandwidth_beside_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading at 60 % of a bandwidth that halves while the deeper half is measured."""
    context_cost = module("context_cost", monkeypatch)
    weights, per_token = 1e9, 2e4
    samples = {
        depth: [((weights + depth * per_token / 0.6) / (rate * 1e9), (rate - 1, rate + 1)) for _ in range(3)]
        for depth, rate in ((256, 40.0), (4096, 40.0), (16384, 20.0), (32768, 20.0))
    }
    found = context_cost.slopes_of(samples, per_token)
    assert found["share_of_read_bandwidth"] == pytest.approx(0.6)
    assert found["bound_nanoseconds_per_cached_token"] == pytest.approx(per_token / 30)
    points = context_cost.curve_of(samples, weights, per_token)
    deepest = points[-1]
    assert deepest["bound_milliseconds"] == pytest.approx((weights + 32768 * per_token) / 20e6)
    assert deepest["share"] == pytest.approx(deepest["bound_milliseconds"] / deepest["milliseconds"]["median"])
    assert deepest["read_gb_s"] == [[19.0, 21.0]] * 3
    flat = {depth: [(0.1, (20.0, 20.0))] for depth in (256, 4096)}
    assert context_cost.slopes_of(flat, per_token)["share_of_read_bandwidth"] is None


def test_bars_show_medians_and_bounds(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    charts = module("harness.charts", monkeypatch)
    figure = charts.draw_bars(report)
    axes = {a.get_title().split(", tokens")[0]: a for a in figure.axes}
    decode = next(a for title, a in axes.items() if title.startswith("decode, 1 stream"))
    assert [patch.get_width() for patch in decode.patches] == [18.0, 16.0]
    assert [tick.get_text() for tick in decode.get_yticklabels()] == ["Windlass int8", "OpenVINO int8"]
    assert figure.patch.get_alpha() == 0.0  # the page's own background, light or dark
    charts.save_bars(report, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_streams_are_drawn_as_a_curve_for_each_contestant(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    charts, measures = module("harness.charts", monkeypatch), module("harness.measures", monkeypatch)
    counts = (1, 8, 64)
    asked = measures.measures_of("decode", (), 1, counts)
    assert [(measure.name, measure.streams) for measure in asked] == [
        ("decode, 1 stream", 1),
        ("decode, 8 streams", 8),
        ("decode, 64 streams", 64),
    ]
    run = dict(report["runs"][0])
    one = next(result for result in run["results"] if result["measure"] == "decode, 1 stream")
    run["results"] = [
        one | {"kind": "decode", "streams": n, "median": 10.0 * n, "min": 9.0 * n, "max": 11.0 * n, "bound": 20.0 * n}
        for n in reversed(counts)
    ]
    (axes,) = charts.draw_streams(run).axes
    drawn = [line for line in axes.lines if len(line.get_xdata()) == 3 and line.get_linestyle() == "-"]
    assert [list(line.get_ydata()) for line in drawn] == [[10.0, 80.0, 640.0]]
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] == [[20.0, 160.0, 1280.0]]


def test_foreign_work_is_told_from_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = module("harness.machine", monkeypatch).CpuClock
    start = clock(now=100.0, busy=1000.0, own=50.0)
    assert clock(now=110.0, busy=1018.0, own=66.0).foreign_share(start, 2) == pytest.approx(0.1)
    assert clock(now=110.0, busy=1015.9, own=66.0).foreign_share(start, 2) == 0.0  # ticks may round below


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_the_clock_counts_children_as_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = module("harness.machine", monkeypatch)
    before = machine.cpu_clock()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        living = machine.cpu_clock()
        assert child.pid in machine.descendants(os.getpid())
        assert machine.peak_memory([child.pid]) > 1 << 20
        child.communicate(b"\n", timeout=20)
    reaped = machine.cpu_clock()
    assert living.own - before.own >= 0.29
    assert reaped.own >= living.own - 0.05  # it moved from one account to the other
    assert reaped.busy - before.busy >= 0.25


def test_disturbed_samples_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module("harness.machine", monkeypatch)
    quiet = module("harness.quiet", monkeypatch)
    clock = sys.modules["harness.machine"].CpuClock
    foreign = iter([0, 5, 0, 2, 0, 0])  # start and end of three attempts: half, a fifth and none of ten core seconds
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 1)
    ticks = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(quiet, "cpu_clock", lambda: clock(next(ticks), float(next(foreign)), 0.0))
    values = iter("abc")
    assert quiet.quiet(lambda: next(values), 0.05, 5, 0.0) == ("c", 0.0, 2)
    foreign, ticks, values = iter([0, 2, 0, 5]), iter([0.0, 10.0, 20.0, 30.0]), iter("ab")
    assert quiet.quiet(lambda: next(values), 0.05, 1, 0.0) == ("a", 0.2, 1)  # the quieter of two noisy ones


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


def test_the_tokenizer_of_the_checkpoint_round_trips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shape = module("harness.shape", monkeypatch).ModelShape(64, 1, 4, 2, 96, 400, 128)
    module("harness.checkpoint", monkeypatch).make_checkpoint(tmp_path, shape)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("Hello, wörld", add_special_tokens=False)
    assert max(ids) < 400 and tokenizer.decode(ids) == "Hello, wörld"
    assert len(tokenizer) == 400
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


FAKE_VLLM = """
import collections, types
__version__ = "0.0"
SamplingParams = types.SimpleNamespace
class LLM:
    def __init__(self, model, **options):
        assert not options["enable_prefix_caching"] and options["dtype"] == "bfloat16"
        self.most = options["max_num_seqs"]
        self.llm_engine = self
        self.left = {}
    def add_request(self, name, prompt, sampling):
        assert all(10 <= token < 50 for token in prompt["prompt_token_ids"])
        self.left[name] = [len(prompt["prompt_token_ids"]), sampling.max_tokens]
        return name + "-internal"
    def has_unfinished_requests(self):
        return bool(self.left)
    def abort_request(self, names):
        for name in names:
            del self.left[name]
    def step(self):
        assert self.left, "a step without requests waits forever"
        assert len(self.left) <= self.most, "streams that wait for others are not timed"
        outputs = []
        for name, entry in list(self.left.items())[:self.most]:
            if entry[0] > 0:
                entry[0] -= 64
                continue
            entry[1] -= 1
            part = types.SimpleNamespace(token_ids=[7])
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[part]))
            if not entry[1]:
                del self.left[name]
        return outputs
"""


def test_the_vllm_worker_counts_tokens_by_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (tmp_path / "vllm" / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    worker = module("harness.worker", monkeypatch)
    contestants, places = module("harness.contestants", monkeypatch), module("harness.places", monkeypatch)
    peer = contestants.VLLMContestant(places.Places(tmp_path), "bf16", 2, 50, eager=True)
    options = json.dumps(peer._options)
    script = str(BENCHMARKS / "harness" / "vllm_worker.py")
    near = worker.Worker(
        [sys.executable, script, "model", options], log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)}
    )
    try:
        assert near.info == {"version": "0.0"}
        for request in ({"kind": "prefill", "prompt": 512}, {"kind": "decode", "prompt": 32, "streams": 64}):
            events: list[str] = []
            (value,) = near.measure({"streams": 1, "steps": 12, **request}, lambda seen=events: seen.append("prepared"))
            assert value > 0 and events == ["prepared"]
        with pytest.raises(worker.WorkerError, match="not measured at depth"):
            near.measure({"kind": "depth", "prompt": 4096, "streams": 1, "steps": 8})
    finally:
        near.close()


FAKE_LLAMA_DEPTH = """#!/bin/sh
echo "started $*" >> started
echo '{"ready": true, "info": {"version": "build 1"}}'
while read request; do
    echo '{"prepared": true}'
    read go
    echo "{\\"values\\": [$3]}"
done
"""
FAKE_LLAMA_BENCH = """#!/bin/sh
echo '{"build_commit": "2", "samples_ts": [1.5, 2.5]}'
"""


def test_llama_cpp_at_depth_keeps_a_filled_cache_where_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contestants, places = module("harness.contestants", monkeypatch), module("harness.places", monkeypatch)
    (at_4096, at_8192) = module("harness.measures", monkeypatch).measures_of("depth", (4096, 8192))
    tools = tmp_path / "peers" / "llama.cpp-build" / "bin"
    tools.mkdir(parents=True)
    for name in ("llama-bench", "llama-batched-bench"):
        (tools / name).write_text(FAKE_LLAMA_BENCH)
        (tools / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    contestant = contestants.LlamaCppContestant(places.Places(tmp_path), "q8_0", 2)
    events: list[str] = []

    def measure(wanted: Any) -> list[float]:
        values: list[float] = contestant.measure(wanted, 2, lambda: events.append("prepared"))
        return values

    assert measure(at_4096) == [1.5, 2.5] and contestant.version() == "build 2"  # all repeats in one command
    (tools / "llama-depth").write_text(FAKE_LLAMA_DEPTH)
    (tools / "llama-depth").chmod(0o755)
    try:
        assert [measure(at_4096), measure(at_4096), measure(at_8192)] == [[4096.0], [4096.0], [8192.0]]
        assert contestant.version() == "build 1"
    finally:
        contestant.close()
    assert len(events) == 4
    started = (tmp_path / "started").read_text().splitlines()
    assert [line.split()[-3:] for line in started] == [["2", "4096", "8"], ["2", "8192", "8"]]


def test_every_sample_of_a_group_has_rates_beside_it(
    report_module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Contestant:
        program, name, weights, kv_dtype, slow = "Windlass", "Windlass int8", "int8", "auto", False

        def version(self) -> str:
            return "7"

        def weight_bytes(self) -> float | None:
            return None

        def cache(self) -> tuple[str, float] | None:
            return "float16", 2048.0

        def measure(self, measure: Any, repeats: int, prepared: Any) -> list[float]:
            prepared()
            return [20.0, 24.0] if measure.streams == 8 else [10.0]  # the one as a command that repeats by itself

    peers, measures = module("peers", monkeypatch), module("harness.measures", monkeypatch)
    run = peers.Run(peers.parse_arguments(["--work", str(tmp_path), "--rounds", "2", "--max-foreign", "1"]))
    machine = object.__new__(module("harness.rates", monkeypatch).Rates)
    rates = iter(float(value) for value in range(30, 50))
    monkeypatch.setattr(machine, "now", lambda name: next(rates))
    run.__dict__["_machine"] = machine
    for measure in measures.measures_of("decode", ()):
        run._measure(measure, [Contestant()])
    one, eight = run.results
    assert one["samples"] == [10.0, 10.0] and one["rates"] == {"read_gb_s": [(30.0, 31.0), (32.0, 33.0)]}
    assert eight["samples"] == [20.0, 24.0] and eight["rates"] == {"read_gb_s": [(34.0, 35.0), (34.0, 35.0)]}
    assert (one["kv_dtype"], one["kv_cache_dtype"], one["kv_bytes_per_token"]) == ("auto", "float16", 2048.0)
    assert one["share"] > 0 and one["bound"] == pytest.approx(31.5e9 / run.shape.weight_bytes("int8"))
    report_module._check_rates(json.loads(json.dumps(one)))


def test_slow_contestants_take_part_when_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module("harness.machine", monkeypatch)
    peers = module("peers", monkeypatch)
    run = peers.Run(peers.parse_arguments(["--work", str(tmp_path), "--contestants", "vllm"]))
    run._group("startup")
    assert {entry["contestant"] for entry in run.left_out} == {"vLLM bf16", "vLLM bf16, eager", "vLLM fp32"}
    assert all("not installed" in entry["reason"] for entry in run.left_out)
    everybody = peers.contestants_for("decode", run.places, 2, 1024, 1.0, [])
    assert [c.name for c in everybody if c.slow] == ["vLLM bf16", "vLLM bf16, eager", "vLLM fp32"]
    monkeypatch.setattr(peers, "contestants_for", lambda *_: [c for c in everybody if c.slow])
    run = peers.Run(peers.parse_arguments(["--work", str(tmp_path)]))
    run._group("decode")
    assert len(run.left_out) == 3 and all("--contestants" in entry["reason"] for entry in run.left_out)
