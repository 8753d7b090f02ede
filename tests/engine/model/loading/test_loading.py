"""Accepted and refused checkpoints: every refusal is a LoadError of one line with a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.engine_benchmark import run_engine_benchmark
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.config import parse_size
from windlass.engine.model.config_json.classifier_head import ClassifierTokens, has_classifier_tokens
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.model.loading.safetensors_header import read_header
from windlass.engine.model.loading.sentence_transformers_files import read_reranker_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def refused(model: Path, match: str, **options: Any) -> None:
    with pytest.raises(LoadError, match=match) as error:
        make_core(model, **options)
    assert "\n" not in str(error.value)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist.*model directory")


def test_broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")
    refused(model, "not valid JSON")
    (model / "config.json").write_text("[]")
    refused(model, "JSON object")


def test_missing_surplus_and_misshapen_tensors(model: Path) -> None:
    edit_weights(model, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    refused(model, r"unexpected tensor 'model.layers.0.self_attn.q_norm.weight'")
    edit_weights(model, lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"))
    make_core(model)
    edit_weights(model, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    refused(model, r"'model.norm.weight' has shape \[63\].*\[64\]")
    edit_weights(model, lambda t: t.pop("model.norm.weight"))
    refused(model, "tensor 'model.norm.weight' is missing")


def test_truncated_file_and_no_file(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(model, "cannot read .*model.safetensors")
    path.unlink()
    refused(model, "no model.safetensors.*dummy")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    refused(model, "only safetensors")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*not supported.*LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1, "rope_theta": 1e4}}, "factor"),
        ({"hidden_act": "relu"}, "relu.*silu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
    ],
)
def test_unsupported_configs_are_refused(model: Path, changes: dict[str, Any], match: str) -> None:
    edit_config(model, **changes)
    refused(model, match)


def test_gemma_without_a_window_is_refused(tmp_path: Path) -> None:
    gemma = make_model("gemma3", tmp_path / "gemma")
    edit_config(gemma, sliding_window=None)
    refused(gemma, "sliding_window is null")


def test_unknown_keys_are_named(model: Path) -> None:
    edit_config(model, attention_swirl=3)
    assert any("attention_swirl" in notice for notice in make_core(model).info.notices)


def test_unsuitable_options_are_refused(model: Path) -> None:
    refused(model, "100000 tokens does not fit.*`cache.memory`", max_model_len=100_000)
    refused(model, "unknown dtype 'int3'.*float32", dtype="int3")
    refused(model, "device", device="cuda:77")
    for field, options in (
        ("scheduling.max_num_batched_tokens", {"max_num_batched_tokens": 0}),
        ("scheduling.max_num_seqs", {"max_num_seqs": -1}),
        ("cache.block_size", {"block_size": 24}),
        ("cache.memory", {"kv_cache_memory": 0}),
    ):
        refused(model, f"`{field}", **options)


def test_context_defaults_to_the_cache_size(model: Path) -> None:
    per_block = make_core(model).info.kv_bytes_per_token * 16
    info = make_core(model, kv_cache_memory=5 * per_block).info
    assert info.max_model_len == 80
    assert any("80 tokens" in notice for notice in info.notices)
    assert make_core(model, max_model_len=1000).info.max_model_len == 1000  # beyond the trained length is allowed


def test_sharded_checkpoint_gives_the_same_bits(model: Path, tmp_path: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    request = greedy("a", range(3, 40), 8)
    whole, sharded = (run(make_core(d), [request])["a", 0] for d in (model, tmp_path / "sharded"))
    assert torch.equal(torch.stack(whole.logits), torch.stack(sharded.logits))
    next((tmp_path / "sharded").glob("model-*.safetensors")).unlink()
    refused(tmp_path / "sharded", "shards are missing")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(model: Path, dtype: str) -> None:
    request = greedy("a", range(3, 40), 1)
    full = run(make_core(model), [request])["a", 0].logits[0]
    core = make_core(model, dtype=dtype)
    half = run(core, [request])["a", 0].logits[0]
    assert core.info.dtype == core.info.kv_cache_dtype == dtype
    error = (half - full).norm() / full.norm()
    assert 0 < error < (0.05 if dtype == "bfloat16" else 0.01)


def test_dummy_weights_need_only_a_config(model: Path) -> None:
    (model / "model.safetensors").unlink()
    config = engine_config(model, load_format="dummy", device="cpu", kv_cache_memory=8 << 20)
    report = run_engine_benchmark(config, batch_size=3, input_len=20, output_len=5)
    assert report["prefill_tokens_per_second"] > 0 and report["decode_tokens_per_second"] > 0
    assert report["prefix_cache_hits"] == 0
    assert report["settings"]["batch_size"] == 3
    assert run_engine_benchmark(config, batch_size=1, input_len=8, output_len=1)["decode_tokens_per_second"] is None
    with pytest.raises(LoadError, match="exceed the context"):
        run_engine_benchmark(config, batch_size=1, input_len=400, output_len=5)
    chosen = run_engine_benchmark(config, batch_size=1, input_len=None, output_len=5)["settings"]["input_len"]
    assert 0 < chosen < 400  # what the context leaves


def test_invalid_requests_are_refused(model: Path) -> None:
    core = make_core(model)
    length = core.info.max_model_len
    cases = [
        (greedy("a", []), "prompt"),
        (greedy("a", [5] * length), "prompt"),
        (greedy("a", [128]), "prompt"),
        (greedy("a", [-1]), "prompt"),
        (greedy("a", [5], temperature=float("nan")), "temperature"),
        (greedy("a", [5], logit_bias={500: 1.0}), "logit_bias"),
        (greedy("a", [5], stop_token_ids=(128,)), "stop_token_ids"),
        (greedy("a", [5], allowed_token_ids=()), "allowed_token_ids"),
        (greedy("a", [5], n=65), "n"),
        (greedy("a", [5], rope_update="sideways"), "rope_update"),
    ]
    for request, param in cases:
        with pytest.raises(RequestError) as error:
            core.add(request)
        assert error.value.param == param
    assert not core.has_work()


def test_max_tokens_beyond_the_context_ends_with_length(model: Path) -> None:
    core = EngineCore(engine_config(model, max_model_len=32, device="cpu", kv_cache_memory=8 << 20))
    result = run(core, [greedy("a", range(3, 23), 1000)], every_logit=False)["a", 0]
    assert len(result.token_ids) == 12 and result.finish_reason == "length"


def test_sizes() -> None:
    assert parse_size("4GiB") == 4 << 30 and parse_size("1.5g") == 1_500_000_000 and parse_size("77") == 77
    for bad in ("", "GiB", "-1", "4 parsecs", "0"):
        with pytest.raises(LoadError, match="4GiB"):
            parse_size(bad)


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str
)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_non_finite_numbers_are_refused_by_name(model: Path, stored: str, options: dict[str, Any]) -> None:
    """In a matrix read directly or in parts, a part of a fused one, the embedding, and a norm."""
    names = ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    tensors = {name: t.to(getattr(torch, stored)) for name, t in load_file(model / "model.safetensors").items()}
    for name, place, value in zip(
        [*names, "model.embed_tokens.weight"], (0, 77, -1, -1), (*NOT_FINITE, NOT_FINITE[0]), strict=True
    ):
        damaged = tensors[name].clone()
        damaged.view(-1)[place] = value
        save_file({**tensors, name: damaged}, model / "model.safetensors", metadata={"format": "pt"})
        refused(
            model, rf"tensor '{name}' contains numbers that are NaN or infinite.*download or copy it again", **options
        )
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    make_core(model, **options)


def test_non_finite_tied_head_is_named(tmp_path: Path) -> None:
    tied = make_model("llama_bias", tmp_path / "tied")
    edit_weights(
        tied, lambda t: t.update({"lm_head.weight": torch.full_like(t["model.embed_tokens.weight"], torch.inf)})
    )
    refused(tied, r"tensor 'lm_head\.weight' contains numbers that are NaN or infinite")


def test_tied_head_with_another_name(tmp_path: Path) -> None:
    """Files of GPT-NeoX contain it in addition to the embedding."""
    tied = make_model("gpt_neox", tmp_path / "tied", tie_word_embeddings=True)
    wanted = run(make_core(tied), [greedy("a", [5, 6, 7])])["a", 0]
    edit_weights(tied, lambda t: t.update({"embed_out.weight": t["gpt_neox.embed_in.weight"].clone()}))
    assert run(make_core(tied), [greedy("a", [5, 6, 7])])["a", 0].token_ids == wanted.token_ids
    edit_weights(tied, lambda t: t.update({"embed_out.weight": t["gpt_neox.embed_in.weight"] + 1}))
    refused(tied, r"embed_out\.weight differs from the embedding although the model ties them")


def test_tied_head_with_a_bias(tmp_path: Path) -> None:
    tied = make_model("phi", tmp_path / "tied", tie_word_embeddings=True)
    plain = run(make_core(tied), [greedy("a", [5, 6, 7], 1)])["a", 0].logits[0]
    edit_weights(tied, lambda t: t.update({"lm_head.bias": t["lm_head.bias"] + torch.arange(128.0)}))
    added = run(make_core(tied), [greedy("a", [5, 6, 7], 1)])["a", 0].logits[0] - plain
    torch.testing.assert_close(added, torch.arange(128.0), rtol=1e-5, atol=1e-4)


def test_unused_buffers_may_hold_any_numbers(model: Path) -> None:
    edit_weights(model, lambda t: t.update({"model.rotary_emb.inv_freq": torch.full((8,), torch.nan)}))
    make_core(model)


def test_large_finite_numbers_are_accepted(model: Path) -> None:
    """Their sum is infinite, but each of them is finite."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
        edit_weights(model, lambda t, w=largest: t.update({"model.norm.weight": w}))
        make_core(model)
        edit_weights(model, lambda t, w=largest: t.update({"model.norm.weight": -w}))
        make_core(model)


def test_numbers_beyond_the_target_dtype_are_refused(model: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 3] = -70_000.0

    edit_weights(model, enlarge)
    refused(
        model, rf"tensor '{name}' holds numbers beyond 6\.55e\+04.*float16.*`compute.dtype=bfloat16`", dtype="float16"
    )
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {}):
        make_core(model, **options)


# -- files of sentence-transformers ------------------------------------------------------------------------------------

LOGIT_SCORE = [
    {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
]


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "declared"),
    [
        ({}, None),
        ({"config.json": {"architectures": ["Qwen3ForCausalLM"], "_name_or_path": "Qwen3-Reranker"}}, None),
        (
            {"config.json": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}},
            ClassifierTokens(("yes", "no"), is_qwen3_reranker=True),
        ),
        (
            {"config.json": {"classifier_from_token": ["0", "1"], "method": "from_2_way_softmax"}},
            ClassifierTokens(("1", "0")),
        ),
        (
            {"config.json": {"classifier_from_token": ["Yes"], "method": "no_post_processing"}},
            ClassifierTokens(("Yes",)),
        ),
        (
            {"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 4}},
            ClassifierTokens((9, 4)),
        ),
        (
            {
                "modules.json": LOGIT_SCORE,
                "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": None},
                "config_sentence_transformers.json": {"prompts": {"a": "be strict"}, "default_prompt_name": "a"},
            },
            ClassifierTokens((9,), instruction="be strict"),
        ),
        ({"modules.json": LOGIT_SCORE[:1]}, None),
    ],
)
def test_declared_scoring_is_read(files: dict[str, Any], declared: ClassifierTokens | None, tmp_path: Path) -> None:
    assert read_reranker_config(write(tmp_path, files)) == declared
    assert has_classifier_tokens(files.get("config.json", {})) == ("classifier_from_token" in str(files))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": {"classifier_from_token": "yes"}}, "must be a list of tokens"),
        ({"config.json": {"classifier_from_token": ["no", "yes"]}}, "with method from_2_way_softmax"),
        ({"config.json": {"classifier_from_token": ["yes"], "is_original_qwen3_reranker": True}}, "name two tokens"),
        ({"config.json": {"classifier_from_token": ["a", "b"], "method": "magic"}}, "method .*magic.* is not known"),
        ({"config.json": {"classifier_from_token": []}}, "gives no score"),
        ({"config.json": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": 1}}, "true or false"),
        ({"modules.json": LOGIT_SCORE}, "missing"),
        ({"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": "yes"}}, "must be token ids"),
        ({"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": -1}}, "must be token ids"),
        ({"modules.json": "[", "config.json": "{}"}, "cannot read"),
    ],
)
def test_unsupported_declaration_is_reported(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=says) as caught:
        read_reranker_config(write(tmp_path, files))
    assert "\n" not in str(caught.value)


# -- tensor headers ----------------------------------------------------------------------------------------------------

Q, NORM, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
Change = Callable[[dict[str, Tensor]], object]


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def remove(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


LAYER = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
CASES = {
    "missing": (remove(NORM), f"tensor '{NORM}' is missing: the checkpoint is incomplete"),
    "several missing": (remove(*LAYER, NORM), "tensors '.*', '.*', '.*' and 1 more are missing"),
    "surplus": (put("model.layers.0.swirl.weight", torch.ones(1)), r"unexpected tensor 'model\.layers\.0\.swirl\.weight'"),
    "several surplus": (
        lambda tensors: [put(f"model.x{i}", torch.ones(1))(tensors) for i in range(5)],
        r"unexpected tensors 'model\.x0', 'model\.x1', 'model\.x2' and 2 more: this architecture has no place for them",
    ),
    "shape": (put(NORM, torch.ones(63)), rf"'{NORM}' has shape \[63\] where config\.json asks for \[64\]"),
    "transposed": (
        lambda tensors: put(LAYER[2], tensors[LAYER[2]].t().contiguous())(tensors),
        rf"'{LAYER[2]}' has shape \[\d+, 64\] where config\.json asks for \[64, \d+\]",
    ),
    "flat": (put(Q, torch.ones(64 * 64)), r"has shape \[4096\]"),
    "single number": (put(NORM, torch.tensor(1.0)), r"has shape \[\]"),
    "integers": (put(NORM, torch.ones(64, dtype=torch.int32)), f"'{NORM}' is I32, which is not a type of weights"),
    "truths": (put(NORM, torch.ones(64, dtype=torch.bool)), f"'{NORM}' is BOOL, which is not a type of weights"),
    "complex": (put(NORM, torch.ones(64, dtype=torch.complex64)), f"'{NORM}' is C64, which is not a type of weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_inconsistent_headers_are_refused(case: str, model: Path) -> None:
    change, says = CASES[case]
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(LoadError, match=says) as caught:
        check_start(engine_config(model, device="cpu"))
    assert "\n" not in str(caught.value) and str(model) in str(caught.value)


def test_tensor_in_two_shards_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first = {name: tensor for name, tensor in tensors.items() if "layers" in name}
    save_file(first, model / names[0])
    save_file({name: tensor for name, tensor in tensors.items() if name not in first or name == Q}, model / names[1])
    owners = {name: names[0] if name in first else names[1] for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    with pytest.raises(LoadError, match=f"tensor '{re.escape(Q)}' appears in more than one file"):
        check_start(engine_config(model, device="cpu"))


def test_unused_buffers_and_integers_are_accepted(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    extra = {
        "lm_head.weight": tensors[EMBEDDING].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    }
    save_file(tensors | extra, model / "model.safetensors")
    check_start(engine_config(model, device="cpu"))


def written(file: Path, data: int, **tensors: tuple[str, list[int], int, int]) -> Path:
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, (dtype, shape, begin, end) in tensors.items()
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": ("F32", [2], 0, 8), "b": ("F32", [2], 0, 8)},
        {"a": ("F32", [2], 0, 8), "b": ("F32", [1], 4, 8)},
        {"a": ("F32", [1], 0, 4), "b": ("F16", [1], 6, 8)},
        {"a": ("F32", [3], 0, 8)},
        {"a": ("BF16", [2, 3], 0, 8)},
        {"a": ("F8_E4M3", [-2, -4], 0, 8)},
        {"a": ("F32", [2], 8, 0), "b": ("F32", [2], 0, 8)},
    ],
)
def test_invalid_tensor_ranges_are_refused(tensors: dict[str, tuple[str, list[int], int, int]], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"its header is damaged at tensor '[ab]': download or copy the file again"):
        read_header(written(tmp_path / "x.safetensors", 8, **tensors))


def test_empty_tensors_and_unknown_dtypes_are_ignored(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", 8, e=("F32", [0, 3], 0, 0), a=("F4", [16], 0, 8), z=("I8", [0], 8, 8))
    assert set(read_header(file).tensors) == {"a", "e", "z"}
