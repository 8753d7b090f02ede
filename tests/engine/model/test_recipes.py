"""What `compute.quantization` makes of which weight, and what that takes beside llama.cpp's mixture of the same name."""

from __future__ import annotations

import pytest

from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.weight_storage import plan_bytes, plan_storage

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


def test_a_narrow_model_gets_five_bits_where_four_would_cost_much() -> None:
    spec = read_spec(LLAMA | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3})
    assert storages(spec, "layers.3.qkv") == ["q5_k", "q6_k"]
    assert storages(spec, "layers.3.gate_up") == ["q4_k", "q5_k"]
    assert storages(spec, "layers.3.down") == ["q5_k"]
    assert storages(spec, "embedding") == ["q8_0"]


def test_a_wide_model_gets_four_bits_but_for_values_the_head_and_half_of_down() -> None:
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
def test_it_takes_no_more_bytes_than_a_file_of_that_name(sizes: dict[str, int], q4_k_m: int) -> None:
    spec = read_spec(LLAMA | sizes)
    assert plan_bytes(spec, plan_storage(spec, "float32", "int4")) <= q4_k_m


def test_a_table_that_is_only_gathered_from_stays_and_the_head_does_not() -> None:
    spec = read_spec(LLAMA | {"tie_word_embeddings": False})
    for quantization in ("int8", "int4"):
        assert storages(spec, "embedding", quantization) == ["float32"]
    assert storages(spec, "head") == ["q6_k"]
    assert storages(spec, "head", "int8") == ["q8_0"]


def test_fused_tensors_are_rounded_as_one() -> None:
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


def test_a_table_for_every_layer_is_rounded() -> None:
    """It takes more than all else of such a model."""
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
