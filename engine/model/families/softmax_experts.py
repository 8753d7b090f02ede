"""Families of experts whose routers are a softmax: Mixtral."""

from __future__ import annotations

from windlass.engine.model.config_json.patterns import windowed_layers
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.experts_rules import ExpertsRules
from windlass.engine.model.families.family import Family
from windlass.engine.model.feed_forward.experts_spec import ExpertsNames
from windlass.engine.model.feed_forward.gated_spec import GatedNames

_MIXTRAL_NAMES = ExpertsNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert=GatedNames("w1", "w3", down="w2")
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rules=ConfigRules(
        layer_pattern=windowed_layers,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    experts=ExpertsRules(experts=8, top_k=2, width_keys=("intermediate_size",), names=_MIXTRAL_NAMES),
)
