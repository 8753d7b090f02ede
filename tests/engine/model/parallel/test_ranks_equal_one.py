"""Ranks give the logits of one process, for several families, weight storages and features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers.thread_ranks import ranked
from helpers.device import ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run
from helpers.gguf_models import make_gguf
from helpers.tiny_models import make_model

from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import backend_selector
from windlass.kernels.torch.torch_backend import TorchBackend

pytestmark = ON_A_CPU

# Families with grouped key heads, biases, head norms, caps, norm offsets, parallel layers, fused and interleaved heads,
# experts with a shared one, norms after the rotation, tied heads, learned sinks; and their numbers of ranks.
SPLIT = {
    "llama": 2,
    "llama_bias": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma2": 2,
    "gemma3": 2,
    "gpt_neox": 4,
    "gptj": 3,
    "codegen": 2,
    "falcon": 2,
    "cohere_normed": 2,
    "phi3": 2,
    "glm": 2,
    "hunyuan": 2,
    "apertus": 2,
    "granite": 2,
    "qwen2_moe": 2,
    "gpt_oss": 2,
    "gemma4_e2b": 2,
    "gemma4_26b": 2,
}
LONG = {"rope_type": "yarn", "factor": 4.0}


def requests(**fields: Any) -> list[EngineRequest]:
    return [greedy("a", range(5, 45), 10, **fields), greedy("b", range(20, 33), 6), greedy("c", [7, 9, 11], 6)]


# Nothing is rounded to 8 or 16 bits, where the last bit of a sum can decide the rounding.
UNROUNDED = {"activations": "float32", "kv_cache_dtype": "float32"}


def assert_equal(found: dict[Any, Finished], expected: dict[Any, Finished], bound: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert found[key].token_ids == one.token_ids, key
        for ours, theirs in zip(found[key].logits, one.logits, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound, key


# One for each way to split; the others are slow.
QUICK = ("llama_bias", "gemma3", "gpt_neox", "hunyuan", "gpt_oss")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in SPLIT]
)
def test_family_equals_one_rank(tmp_path: Path, family: str) -> None:
    directory = make_model(family, tmp_path / "model")
    expected = run(make_core(directory, threads=1), requests())
    with ranked(directory, SPLIT[family]) as core:
        assert_equal(run(core, requests()), expected)


def test_query_gates_are_split_with_their_heads(tmp_path: Path) -> None:
    directory = make_model("qwen3_5", tmp_path / "model", layer_types=["full_attention"] * 5)
    expected = run(make_core(directory, threads=1), requests())
    with ranked(directory, 2) as core:
        assert_equal(run(core, requests()), expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 200}
    return make_model("llama", tmp_path_factory.mktemp("llama"), head_dim=32, intermediate_size=160, **wide)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "deterministic": True},
        {"kv_cache_dtype": "int8"},
        {"speculative_ngram": 4, "prefix_caching": False},
        {"quantization": "int8", **UNROUNDED},
        {"dtype": "float32", "max_num_seqs": 2},
    ],
    ids=["cut prompts, deterministic", "int8 cache", "proposals", "int8 weights", "queue"],
)
def test_feature_equals_one_rank(llama: Path, options: dict[str, Any]) -> None:
    """Three key heads over two ranks, one on the first."""
    asked = [*requests(rope_scaling=RopeScaling.from_dict(LONG)), greedy("d", [5, 6, 7] * 12, 12)]
    bound = 1e-2 if options.get("kv_cache_dtype") == "int8" else 1e-5  # one step of a cached number in a hundred
    expected = run(make_core(llama, threads=1, **options), asked)
    with ranked(llama, 2, **options) as core:
        assert any("3 key heads cannot be divided evenly" in notice for notice in core.info.notices)
        assert_equal(run(core, asked), expected, bound)
        assert_equal(run(core, asked), expected, bound)  # from cached prefixes, by recorded steps
        assert core.runner.replay.num_replayed > 0 and core.runner.replay.obstacle is None


def test_draft_model_of_one_rank_proposes_to_all(llama: Path) -> None:
    asked = [greedy("a", range(5, 45), 24), greedy("b", range(20, 33), 24)]
    expected = run(make_core(llama, threads=1), asked)
    with ranked(llama, 2, speculative_model=str(llama), speculative_adaptive=False) as core:
        found = run(core, asked)
        assert core.stats().spec_decode_model_num_accepted_tokens > 10
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}


def test_quantized_shards_are_cached(llama: Path, tmp_path: Path) -> None:
    options = {"quantization": "int8", "weight_cache": str(tmp_path / "kept"), **UNROUNDED}
    expected = run(make_core(llama, threads=1, quantization="int8", **UNROUNDED), requests())
    for _ in range(2):
        with ranked(llama, 2, **options) as core:
            assert_equal(run(core, requests()), expected)
        kept = sorted((tmp_path / "kept").iterdir())
        assert len(kept) == 2  # one file per rank


def test_preempted_sequences_equal_one_rank(llama: Path) -> None:
    asked = [greedy(str(i), range(3 + i, 43 + i), 40) for i in range(5)]
    small = {"kv_cache_memory": 20 * 16 * 4 * 3 * 2 * 32 * 4, "max_model_len": 128}
    expected = run(make_core(llama, threads=1, **small), asked)
    with ranked(llama, 2, **small) as core:
        assert_equal(run(core, asked), expected)
        assert core.stats().num_preemptions > 0


def test_prompt_results_equal_one_rank(llama: Path) -> None:
    asked = [greedy("a", range(5, 150), 2, prompt_logprobs=2), greedy("b", [8], 4, logprobs=3)]
    expected = run(make_core(llama, threads=1), asked)
    with ranked(llama, 3) as core:
        found = run(core, asked)
    theirs, ours = (one["a", 0].outputs[0].prompt_logprobs for one in (expected, found))
    assert theirs is not None and ours is not None and len(ours) == 145
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one is not None and other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert found["b", 0].token_ids == expected["b", 0].token_ids


def test_blocks_of_a_gguf_file_are_split(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source", intermediate_size=160, head_dim=32)
    directory = make_gguf(source, tmp_path / "gguf", lambda name: "Q8_0", interleaved=True).derived
    expected = run(make_core(directory, threads=1, **UNROUNDED), requests())
    with ranked(directory, 2, **UNROUNDED) as core:
        assert_equal(run(core, requests()), expected)
        assert core.info.quantization == "GGUF Q8_0"


def test_each_rank_holds_its_shard(llama: Path) -> None:
    whole = make_core(llama, threads=1)
    with ranked(llama, 3) as core:
        own = core.runner.decoder.spec
        assert [(one.mixer.num_heads, one.mixer.num_kv_heads) for one in own.layers] == [(2, 1)] * 4  # type: ignore[union-attr]
        assert own.kv_groups[0].num_kv_heads == 1 and own.vocabulary == (0, 64)
        assert core.info.kv_bytes_per_token == whole.info.kv_bytes_per_token
        assert core.info.num_parameters == whole.info.num_parameters and core.info.ranks == 3
        assert core.runner.decoder.weight_bytes() < whole.info.weight_bytes / 2


# -- torch.distributed -------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU as a device without its own kernels."""
    monkeypatch.setattr(
        backend_selector,
        "_NATIVE_BACKENDS",
        {"cpu": backend_selector._NativeBackend(lambda options: "played", TorchBackend, False)},
    )


@pytest.mark.quick_cases(2)
@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama_bias", {}), ("gpt_oss", {}), ("llama_bias", {"deterministic": True, "max_num_batched_tokens": 16})],
    ids=["dense", "experts and windows", "deterministic"],
)
def test_logits_equal_one_process(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = make_model(family, tmp_path / "model")
    asked = [greedy("a", range(5, 45), 10, prompt_logprobs=1), greedy("b", range(20, 33), 6), greedy("c", [7, 9], 6)]
    expected = run(make_core(model, threads=1, **options), asked)
    with ranked(model, 2, **options) as core:
        found = run(core, asked)
        assert core.runner.graphs is None
    for key, one in expected.items():
        assert found[key].token_ids == one.token_ids
        for ours, theirs in zip(found[key].logits, one.logits, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
