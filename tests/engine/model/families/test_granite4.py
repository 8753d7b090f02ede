"""Granite 4 as published files describe it: attention alone, without experts or with them."""

from __future__ import annotations

from typing import Any

from windlass.engine.model.families.reading import read_spec
from windlass.engine.model.feed_forward.experts_spec import ExpertsSpec
from windlass.engine.model.feed_forward.gated_spec import GatedSpec

PUBLISHED: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "shared_intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
    "rope_theta": 10_000_000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 10,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "normalization_function": "rmsnorm",
    "init_method": "mup",
}


def test_one_without_experts_is_dense() -> None:
    spec = read_spec(PUBLISHED)
    for layer in spec.layers:
        assert isinstance(layer.feed_forward, GatedSpec) and layer.feed_forward.intermediate_size == 192
    assert not spec.notices and spec.rotary_groups[0].base.rope_theta == 1e7
    names = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    assert "model.layers.1.shared_mlp.input_linear.weight" in names
    assert read_spec({**PUBLISHED, "layers_block_type": PUBLISHED["layer_types"], "layer_types": None}) == spec


def test_one_with_experts_has_a_shared_one_beside() -> None:
    spec = read_spec({**PUBLISHED, "num_local_experts": 8, "num_experts_per_tok": 2})
    for layer in spec.layers:
        part = layer.feed_forward
        assert isinstance(part, ExpertsSpec) and (part.intermediate_size, part.shared_size) == (128, 192)
