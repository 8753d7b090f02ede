"""docs/memory.md and docs/choose-quantization.md: sizes as the engine counts them, figures as they were measured."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from helpers.doc_examples import ROOT, blocks_of

from windlass.engine.cache.kv_cache_budget import bytes_per_token
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.weight_storage import plan_bytes, plan_storage
from windlass.server.startup.display import summary

MEMORY = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
CHOOSE = (ROOT / "docs" / "choose-quantization.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def llama(vocabulary: int, width: int, layers: int, heads: int, kv: int, inner: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }


# The shapes of these models' config.json.
MODELS = {
    "SmolLM2 135M": llama(49152, 576, 30, 9, 3, 1536, True),
    "Qwen3 0.6B": llama(151936, 1024, 28, 16, 8, 3072, True)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6},
    "Llama 3.2 1B": llama(128256, 2048, 16, 32, 8, 8192, True),
    "Llama 2 7B": llama(32000, 4096, 32, 32, 32, 11008, False),
    "Llama 3.1 8B": llama(128256, 4096, 32, 32, 8, 14336, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_on_the_page_are_the_engine_s(name: str) -> None:
    spec = read_spec(MODELS[name])
    weights = [plan_bytes(spec, plan_storage(spec, "bfloat16", how)) / 2**30 for how in ("none", "int8", "int4")]
    token = [sum(bytes_per_token(group, dtype) for group in spec.kv_groups) / 2**10 for dtype in ("float16", "int8")]
    shown = [f"{weights[0]:.2f} GiB", *(f"{w:.2f}" for w in weights[1:]), f"{token[0]:.1f} KiB", f"{token[1]:.1f}"]
    assert f"| {name} | {' | '.join(shown)} |" in MEMORY


def test_every_row_is_checked() -> None:
    assert set(re.findall(r"^\| ([A-Z][\w.]+ [\w. ]+) \| [\d.]+ GiB", MEMORY, re.MULTILINE)) == set(MODELS)


def test_the_example_is_what_the_table_makes() -> None:
    cache = [4 * 16384 * kib / 2**20 for kib in (128, 66)]
    assert f"8.4 + {cache[0]:.0f} = {8.40 + cache[0]:.1f} GiB" in MEMORY
    assert f"it is {8.40 + cache[1]:.1f} GiB" in MEMORY


def test_lines_of_the_start_are_in_the_words_of_the_server() -> None:
    shown, _ = [block.source for block in blocks_of(ROOT / "docs" / "memory.md") if block.language == "text"]
    given = {
        "num_kv_blocks": (22719,),
        "block_size": 16,
        "max_model_len": 8192,
        "trained_len": 8192,
        "max_num_seqs": 64,
    }
    given |= {"weight_bytes": int(92.1 * 2**20), "kv_cache_bytes": int(7.8 * 2**30), "kv_cache_dtype": "float16"}
    given |= {
        "num_parameters": 135_000_000,
        "num_layers": 30,
        "load_seconds": 0.1,
        "quantization": None,
        "dtype": "float32",
    }
    given |= {"draft_model": None, "rotary_groups": (), "rotary_auto": False, "notices": (), "replicas": 1, "ranks": 1}
    info = object.__new__(ModelInfo)
    for field in fields(ModelInfo):
        object.__setattr__(info, field.name, given.get(field.name, ""))
    printed = summary(info, "smollm2", "http://127.0.0.1:8000/v1")
    for line in shown.splitlines():
        assert line in printed


def test_figures_of_quantizations_are_those_that_were_measured() -> None:
    rows = re.findall(
        r"^\| `--quantization (int\d)` \| ([\d.]+ MB) \| (\+[\d.]+ %) \| ([\d.]+ %) \|$", CHOOSE, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["int8", "int4"]
    for name, size, perplexity, same in rows:
        (measured,) = re.findall(rf"^\| Windlass `--quantization {name}` \|.*$", BENCHMARKS, re.MULTILINE)
        assert all(figure in measured for figure in (size, perplexity, same))
    (cache,) = re.findall(r"^\| Windlass `--kv-cache-dtype int8`.*$", BENCHMARKS, re.MULTILINE)
    assert "+0.06 %" in cache and "98.5 %" in cache and "+0.06 %" in MEMORY
    assert "| `--kv-cache-dtype int8` alone | 538 MB | +0.06 % | 98.5 % |" in CHOOSE
