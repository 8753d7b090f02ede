"""Specs, rotation and tensors of GGUF files compared with the converted models, and refused files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers.gguf_checkpoints import ARCHITECTURES as FURTHER
from helpers.gguf_conversion import ARCHITECTURES, convert, write
from helpers.tiny_models import FAMILIES, make_model
from safetensors.torch import load_file

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.architectures import ARCHITECTURES as READ
from windlass.engine.model.gguf.gguf_description import GGUFDescription, describe_gguf
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.rope_scaling import RotaryGroup, resolve

# Settings that GGUF cannot store: windows that llama.cpp does not use, another scale of Gemma's scores.
_NOT_WRITTEN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False, "num_hidden_layers": 5},
}
_LONG_FACTORS = {"long_factor": [1.5 + 0.5 * i for i in range(6)], "short_factor": [1.0 + 0.25 * i for i in range(6)]}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, _NOT_WRITTEN.get(name, {})) for name in FAMILIES if name not in ("helium", "proportional", "phi3")},
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0}}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 24.0,
                "attention_factor": 1.25,
            }
        },
    ),
    "qwen3, yarn": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1_000_000.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama 3": (
        "llama",
        {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "gemma3, linear": (
        "gemma3",
        {
            **_NOT_WRITTEN["gemma3"],
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": (
        "phi3",
        {
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                **_LONG_FACTORS,
            },
        },
    ),
    "phi3, short": ("phi3", {"original_max_position_embeddings": 256, "rope_parameters": {"rope_type": "default"}}),
    "ernie4_5, no biases": ("ernie4_5", {"use_bias": False}),
    "glm, no biases": ("glm", {"attention_bias": False}),
}


@pytest.fixture(scope="module", params=_CASES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GGUFDescription]:
    family, settings = _CASES[request.param]
    directory = tmp_path_factory.mktemp("model")
    source = make_model(family, directory / "hf", **settings)
    return source, describe_gguf([convert(source, directory / "tiny.gguf")])


def specs(source: Path, described: GGUFDescription) -> tuple[ModelSpec, ModelSpec]:
    config = json.loads((source / "config.json").read_text())
    return read_spec(config), read_spec(described.config, described.generation)


def frequencies(groups: tuple[RotaryGroup, ...], length: int) -> list[tuple[np.ndarray, float]]:
    found = [resolve(group.scaling, group.base, length) for group in groups]
    return [(np.array(one.inv_freq), one.rotary_scale) for one in found]


@pytest.mark.quick_cases(6)
def test_spec_equals_the_original(converted: tuple[Path, GGUFDescription]) -> None:
    wanted, spec = specs(*converted)
    if spec.architecture == "HunYuanDenseV1ForCausalLM":  # the file has a base that includes alpha
        spec = replace(spec, rotary_groups=wanted.rotary_groups)
    if spec.architecture == "LlamaForCausalLM":  # llama.cpp calls Mistral a Llama
        spec = replace(spec, architecture=wanted.architecture)
    assert spec == wanted
    assert spec.notices == wanted.notices


def test_rotation_equals_the_original(converted: tuple[Path, GGUFDescription]) -> None:
    wanted, spec = specs(*converted)
    for length in (1, 200, 100_000):
        pairs = zip(frequencies(spec.rotary_groups, length), frequencies(wanted.rotary_groups, length), strict=True)
        for (ours, our_scale), (theirs, their_scale) in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-7)
            assert our_scale == pytest.approx(their_scale, rel=1e-7)


def test_tensors_equal_the_original(converted: tuple[Path, GGUFDescription]) -> None:
    """Names and shapes are equal. Bytes are equal once the changes listed in the index are undone."""
    source, described = converted
    index = described.index
    spec = read_spec(described.config)
    original = load_file(source / "model.safetensors")
    assert index["tensors"].keys() == original.keys() - ({"lm_head.weight"} if spec.tied_embeddings else set())
    data = Path(index["files"][0]["path"]).read_bytes()
    family_interleaves = spec.architecture in ("Ernie4_5ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM")
    for name, entry in index["tensors"].items():
        found = np.frombuffer(data[entry["begin"] : entry["end"]], np.float32).reshape(entry["shape"])
        tensor = torch.from_numpy(found.copy())
        if index["norms_with_offset"] and name.endswith("norm.weight"):
            tensor = tensor - 1.0
        if index["interleaved"] and not family_interleaves and ("q_proj" in name or "k_proj" in name):
            width = spec.layers[0].mixer.head_dim
            tensor = tensor.view(-1, width // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        torch.testing.assert_close(tensor, original[name].float(), rtol=1e-6, atol=1e-6)
    assert index["interleaved"] or not family_interleaves


def test_every_architecture_has_a_converter() -> None:
    assert READ.keys() == {*ARCHITECTURES.values(), *FURTHER.values()}


def rope_of(metadata: dict[str, Any], tensors: dict[str, np.ndarray], file: Path) -> RotaryGroup:
    write(file, metadata, tensors)
    return read_spec(describe_gguf([file]).config).rotary_groups[0]


@pytest.fixture
def llama(tmp_path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Path]:
    from helpers.gguf_conversion import metadata_of, tensors_of

    source = make_model("llama", tmp_path / "hf", num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text())
    return metadata_of(config), dict(tensors_of(source, config)), tmp_path / "tiny.gguf"


Parts = tuple[dict[str, Any], dict[str, np.ndarray], Path]


def test_other_rope_factors_divide_the_frequencies_exactly(llama: Parts) -> None:
    metadata, tensors, file = llama
    factors = np.array([1.0, 1.1, 1.3, 2.0, 2.7, 3.0, 3.3, 17.0], dtype=np.float32)
    group = rope_of(metadata, {**tensors, "rope_freqs.weight": factors}, file)
    for length in (1, 100_000):
        spec = resolve(group.scaling, group.base, length)
        wanted = [10_000.0 ** (-j / 8) / float(factor) for j, factor in enumerate(factors)]
        assert spec.inv_freq == pytest.approx(wanted, rel=1e-15) and spec.rotary_scale == 1.0


def test_attention_factor_of_the_file_is_used(llama: Parts) -> None:
    metadata, tensors, file = llama
    metadata |= {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    group = rope_of(metadata, tensors, file)
    assert resolve(group.scaling, group.base, 1).rotary_scale == pytest.approx(0.5 * (0.1 * np.log(4) + 1))


def test_old_name_of_linear_scaling_is_read(llama: Parts) -> None:
    metadata, tensors, file = llama
    group = rope_of({**metadata, "llama.rope.scale_linear": 2.0}, tensors, file)
    assert group.scaling.to_dict() == {"rope_type": "linear", "factor": 2.0}


def test_window_makes_a_mistral(llama: Parts) -> None:
    metadata, tensors, file = llama
    write(file, {**metadata, "llama.attention.sliding_window": 8}, tensors)
    spec = read_spec(describe_gguf([file]).config)
    assert spec.architecture == "MistralForCausalLM" and {layer.mixer.window for layer in spec.layers} == {8}


def test_fused_rows_are_split(llama: Parts) -> None:
    metadata, tensors, file = llama
    parts = [tensors.pop(f"blk.0.attn_{one}.weight") for one in "qkv"]
    write(file, metadata, {**tensors, "blk.0.attn_qkv.weight": np.concatenate(parts)})
    index, data = describe_gguf([file]).index, file.read_bytes()
    for one, part in zip("qkv", parts, strict=True):
        entry = index["tensors"][f"model.layers.0.self_attn.{one}_proj.weight"]
        assert entry["shape"] == list(part.shape) and data[entry["begin"] : entry["end"]] == part.tobytes()


def test_end_tokens_are_read(llama: Parts) -> None:
    metadata, tensors, file = llama
    ends = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
    }
    write(file, {**metadata, **ends}, tensors)
    described = describe_gguf([file])
    assert described.generation == {"eos_token_id": [2, 5]} and "pad_token_id" not in described.config
    assert read_spec(described.config, described.generation).eos_token_ids == (2, 5)


def test_end_tokens_are_found_by_text(llama: Parts) -> None:
    """Only if they are not ordinary text. A SentencePiece vocabulary has its own end token."""
    metadata, tensors, file = llama
    tokens = {
        "tokenizer.ggml.tokens": ["a", "<|end|>", "</s>", "<|im_end|>", "<|eot_id|>", "b", "<|end|>x"],
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 4, 1, 3],
    }
    write(file, {**metadata, **tokens}, tensors)
    assert describe_gguf([file]).generation == {"eos_token_id": [2, 3, 4]}
    write(file, {**metadata, **tokens, "tokenizer.ggml.eos_token_id": None}, tensors)
    assert describe_gguf([file]).generation == {"eos_token_id": [3, 4]}
    write(file, {**metadata, "tokenizer.ggml.model": "llama", "tokenizer.ggml.eos_token_id": None}, tensors)
    assert describe_gguf([file]).generation == {"eos_token_id": [2]}


def test_unknown_keys_give_a_notice(llama: Parts) -> None:
    metadata, tensors, file = llama
    write(file, {**metadata, "llama.mood": "cheerful", "llama.attention.max_alibi_bias": 0.0}, tensors)
    assert read_spec(describe_gguf([file]).config).notices == (
        "config.json has unknown keys, which are ignored: llama.mood",
    )


_REFUSED_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, "tensor model.layers.0.mlp.gate_proj|tensor 'blk.0.ffn_gate.weight'|block_sparse_moe"),
    "encoder": ({"llama.attention.causal": False}, "llama.attention.causal=false.*an encoder"),
    "a head of its own": ({"llama.pooling_type": 4}, "a reranker with its own head"),
    "granite": ({"llama.logit_scale": 8.0}, "llama.logit_scale=8.0"),
    "unknown": ({"llama.attention.sink": 1}, "llama.attention.sink=1.*not supported"),
    "adapter": ({"general.type": "adapter"}, "an adapter .LoRA."),
    "pictures": ({"general.architecture": "clip"}, "mmproj"),
    "matrix": ({"general.type": "imatrix"}, "importance matrix"),
    "architecture": ({"general.architecture": "mamba"}, "'mamba'.*supported are llama, .*original Hugging Face model"),
    "moe": ({"general.architecture": "dbrxmoe"}, "'dbrxmoe', a mixture of experts"),
    "layers differ": ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs from layer to layer"),
    "widths": ({"llama.attention.value_length": 8}, "different widths"),
    "missing": ({"llama.block_count": None}, "llama.block_count is missing"),
    "a text": ({"llama.block_count": "four"}, "llama.block_count must be a positive integer, got 'four'"),
    "a float": ({"llama.context_length": 2.5}, "llama.context_length must be a positive integer"),
    "a huge one": ({"llama.block_count": 2**32 - 1}, "llama.block_count"),
    "more layers": ({"llama.block_count": 2}, r"tensor model\.layers\.1\.input_layernorm\.weight .* is missing"),
    "not finite": ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base must be a positive number, got NaN"),
    "a wrong token": ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id must be a token id"),
    "scaling": ({"llama.rope.scaling.type": "spiral"}, "'spiral' is not known"),
    "longrope alone": ({"llama.rope.scaling.type": "longrope"}, "rope_factors_long.weight is missing"),
    "odd": ({"llama.rope.dimension_count": 7}, "rope.dimension_count must be an even number"),
    "hidden": ({"llama.embedding_length": 60}, r"token_embd.weight has the shape \[128, 64\]"),
    "heads": ({"llama.attention.head_count": 2}, "q_proj.weight has the shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED_METADATA)
def test_other_metadata_is_refused(case: str, llama: Parts) -> None:
    metadata, tensors, file = llama
    changes, says = _REFUSED_METADATA[case]
    write(file, {**metadata, **changes}, tensors)
    with pytest.raises(LoadError, match=f"^{file}: .*{says}") as caught:
        describe_gguf([file])
    assert "\n" not in str(caught.value)


_REFUSED_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"blk.0.ffn_down.weight": None}, "down_proj.weight .* is missing"),
    "no embedding": ({"token_embd.weight": None}, "no tensor token_embd.weight"),
    "experts": (
        {"blk.0.ffn_gate_inp.weight": np.zeros((8, 64), np.float32)},
        "blk.0.ffn_gate_inp.weight does not belong",
    ),
    "a half bias": ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "k_proj.bias .* is missing"),
    "turned": ({"blk.0.ffn_down.weight": np.zeros((96, 64), np.float32)}, r"shape \[96, 64\], \[64, 96\] is expected"),
    "factors": ({"rope_freqs.weight": np.ones(5, np.float32)}, "rope_freqs.weight must hold 8 positive numbers"),
    "zero": ({"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight must hold 8 positive numbers"),
    "one list": ({"rope_factors_long.weight": np.ones(8, np.float32)}, "belong together"),
    "head": ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "attn_q_norm.weight does not belong"),
}


@pytest.mark.parametrize("case", _REFUSED_TENSORS)
def test_other_tensors_are_refused(case: str, llama: Parts) -> None:
    metadata, tensors, file = llama
    changes, says = _REFUSED_TENSORS[case]
    write(file, metadata, {name: data for name, data in {**tensors, **changes}.items() if data is not None})
    with pytest.raises(LoadError, match=says):
        describe_gguf([file])


def test_vocabulary_without_weights_is_refused(llama: Parts) -> None:
    metadata, _, file = llama
    write(file, metadata, {})
    with pytest.raises(LoadError, match="a vocabulary and no weights"):
        describe_gguf([file])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("noise", [0.0, 0.1, None])
def test_a_second_copy_of_the_embedding_is_no_parameter(tmp_path: Path, kind: str, noise: float | None) -> None:
    """noise: relative difference of the head, as of a matrix that is rounded in another way; None: another matrix."""
    source = make_model("qwen2", tmp_path / "hf", tie_word_embeddings=True, **_NOT_WRITTEN["qwen2"])
    stored = load_file(source / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"].float()
    other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * embedding.std()
    head = other if noise is None else embedding + noise * other
    file = convert(source, tmp_path / "tiny.gguf", kind=kind, more={"output.weight": head.numpy()})
    described = describe_gguf([file])
    spec = read_spec(described.config, described.generation)
    assert not spec.tied_embeddings  # both matrices are loaded
    distinct = sum(tensor.numel() for name, tensor in stored.items() if name != "lm_head.weight")
    assert spec.num_parameters() == distinct + (embedding.numel() if noise is None else 0)
