"""Storage plans: sizes match what the kernels allocate, every weight is planned, and recipes choose formats by role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.configs import engine_config
from helpers.tiny_models import make_model

from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.loading.model_description import describe_model
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.weight_storage import (
    BLOCK_SIZES,
    StoredPart,
    allocate,
    block_formats,
    kernel_storage,
    plan_bytes,
    plan_storage,
)
from windlass.kernels import FORMS, BlockWeight, StackedWeight, select_backend

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return describe_model(engine_config(make_model("llama", tmp_path_factory.mktemp("llama")))).spec


@pytest.mark.parametrize("columns", [32, 33, 64, 255, 256, 576, 1536])
@pytest.mark.parametrize("name", [*FORMS, "q4_k:4", "q4_k:1"])
def test_row_size_equals_the_allocation_of_kernels(name: str, columns: int, spec: ModelSpec) -> None:
    head = replace(next(weight for weight in spec.weights() if weight.kind == "head"), shape=(16, columns))
    alone = replace(spec, vocab_size=16, hidden_size=columns, layers=())
    weight = BlockWeight.empty(16, columns, kernel_storage(name))  # type: ignore[arg-type]
    assert plan_bytes(alone, {head.name: (StoredPart(16, name),)}) == weight.nbytes


def test_every_form_has_a_size() -> None:
    assert set(BLOCK_SIZES) == set(FORMS)
    for name, size in BLOCK_SIZES.items():
        form = FORMS[name]
        assert (size.bits, size.group, size.super_groups, size.parts) == (
            form.bits, form.group, form.super_groups, form.parts
        )  # fmt: skip


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_every_row_of_a_matrix_is_planned(quantization: str, spec: ModelSpec) -> None:
    plan = plan_storage(spec, "bfloat16", quantization)
    planned = {weight.name: weight for weight in spec.weights() if len(weight.shape) > 1}
    assert plan.keys() == planned.keys()
    for name, parts in plan.items():
        assert sum(part.rows for part in parts) == planned[name].shape[0]
    assert plan["embedding"] == (StoredPart(128, "bfloat16"),)
    assert (block_formats(spec, plan) == []) == (quantization == "none")


def test_tied_embedding_is_quantized_as_a_head() -> None:
    demo = describe_model(engine_config(DEMO)).spec
    assert demo.tied_embeddings
    assert [part.storage for part in plan_storage(demo, "float32", "int8")["embedding"]] == ["q8_0"]


def test_adjacent_rows_of_one_storage_are_one_part(spec: ModelSpec) -> None:
    prefix = "model.layers.1.self_attn."
    kept = {f"{prefix}{name}_proj.weight": form for name, form in (("q", "q4_k"), ("k", "q4_k"), ("v", "q6_k"))}
    plan = plan_storage(spec, "float32", "none", kept)
    assert plan["layers.1.qkv"] == (StoredPart(96, "q4_k"), StoredPart(32, "q6_k"))
    assert plan["layers.0.qkv"] == (StoredPart(128, "float32"),)
    made = allocate(select_backend("cpu"), spec.weights(), plan)
    assert isinstance(made["layers.1.qkv"], StackedWeight) and made["layers.1.qkv"].shape == (128, 64)
    assert isinstance(made["layers.0.qkv"], torch.Tensor)
    assert list(made) == [weight.name for weight in spec.weights()]


def test_latent_heads_in_blocks_may_have_another_plain_dtype(tmp_path: Path) -> None:
    """All heads of a layer or none: they are one tensor."""
    latent = describe_model(engine_config(make_model("deepseek_v2", tmp_path))).spec
    stored = {weight.name: [one.name for one in weight.stored] for weight in latent.weights()}
    names = stored["layers.0.kv_up"] + stored["layers.0.out"]
    plan = plan_storage(latent, "float32", "none", dict.fromkeys(names, "q8_0"), "float16")
    assert [part.storage for part in plan["layers.0.kv_up"]] == ["float16"]
    assert [part.storage for part in plan["layers.0.out"]] == ["q8_0"]
    assert [part.storage for part in plan["layers.1.kv_up"]] == ["float32"]
    for heads, form in ((None, "q8_0"), ("float16", "float32")):
        plan = plan_storage(latent, "float32", "none", dict.fromkeys(names, form), heads)
        assert [part.storage for part in plan["layers.0.kv_up"]] == ["float32"]


# -- recipes --

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def storages(spec: ModelSpec, weight: str, quantization: str = "int4") -> list[str]:
    return [part.storage for part in plan_storage(spec, "float32", quantization)[weight]]


def test_narrow_model_has_five_bits_for_sensitive_weights() -> None:
    spec = read_spec(LLAMA | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3})
    assert storages(spec, "layers.3.qkv") == ["q5_k", "q6_k"]
    assert storages(spec, "layers.3.gate_up") == ["q4_k", "q5_k"]
    assert storages(spec, "layers.3.down") == ["q5_k"]
    assert storages(spec, "embedding") == ["q8_0"]


def test_wide_model_has_four_bits_except_for_sensitive_weights() -> None:
    spec = read_spec(LLAMA)
    assert storages(spec, "layers.3.qkv") == ["q4_k", "q6_k"]
    assert storages(spec, "layers.3.gate_up") == ["q4_k"]
    assert storages(spec, "embedding") == ["q6_k"]
    more = [i for i in range(16) if storages(spec, f"layers.{i}.down") == ["q5_k"]]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(
    ("sizes", "q4_k_m"),
    [
        # Bytes of the tensors that llama-quantize wrote for SmolLM2 135M; 576 columns make it fall back to wider types.
        ({"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
          "num_key_value_heads": 3}, 103_700_000),
        # 4.5 bits, 6.5625 for the embedding, the values and the down projections of half of the layers.
        ({}, 667_000_000),
    ],
    ids=["135M", "1B"],
)  # fmt: skip
def test_recipe_is_not_larger_than_the_llama_cpp_file(sizes: dict[str, int], q4_k_m: int) -> None:
    spec = read_spec(LLAMA | sizes)
    assert plan_bytes(spec, plan_storage(spec, "float32", "int4")) <= q4_k_m


def test_untied_embedding_is_not_quantized() -> None:
    spec = read_spec(LLAMA | {"tie_word_embeddings": False})
    for quantization in ("int8", "int4"):
        assert storages(spec, "embedding", quantization) == ["float32"]
    assert storages(spec, "head") == ["q6_k"]
    assert storages(spec, "head", "int8") == ["q8_0"]


def test_fused_tensors_have_one_form() -> None:
    phi = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32064,
    }
    spec = read_spec(phi)
    assert storages(spec, "layers.0.qkv") == ["q5_k"]
    assert storages(spec, "layers.0.gate_up") == ["q4_k"]


def test_per_layer_embedding_is_quantized() -> None:
    """It is larger than the rest of such a model."""
    gemma = LLAMA | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 256,
    }
    gemma |= {"vocab_size": 1024, "vocab_size_per_layer_input": 1024, "num_key_value_heads": 4, "head_dim": 64}
    spec = read_spec(gemma)
    assert storages(spec, "layer_inputs_table") == ["q6_k"]
    assert storages(spec, "layer_inputs_table", "int8") == ["q8_0"]
    assert storages(spec, "layer_inputs_table", "none") == ["float32"]
    assert storages(spec, "embedding") == ["q6_k"]  # the head, too
