"""Mistral and Mixtral (optional window), Ministral (window in some layers), Ministral 3 (queries scaled by their position)."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import (
    ConfigRules,
    Sizes,
    layer_types_pattern,
    sliding_window_layers,
)
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.moe_rules import MoERules
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import MoENames

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        sizes=Sizes(context=131_072, kv_heads=8),
        sliding_window=4096,
    ),
)

MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    rules=replace(MISTRAL.rules, layer_pattern=layer_types_pattern),
)

MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    title="Ministral 3",
    model_type="ministral3",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        sizes=Sizes(context=262_144, layers=34, kv_heads=8, head_dim=128),
        rms_norm_eps=1e-5,
        query_temperature=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
)

MIXTRAL_NAMES = MoENames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert=GatedMLPNames("w1", "w3", down="w2")
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rules=replace(MISTRAL.rules, sliding_window=None, rms_norm_eps=1e-5, rope_theta=1_000_000.0),
    experts=MoERules(experts=8, top_k=2, width_keys=("intermediate_size",), names=MIXTRAL_NAMES),
)
