"""Phi 3, 4 and Phi 3.5 MoE. Phi 1 and 2 are in `layer_norm_families`."""

from __future__ import annotations

from windlass.engine.model.config_json.config_rules import ConfigRules, Sizes, sliding_window_layers
from windlass.engine.model.families.family import ATTENTION_BIASES, ConfigFlag, Family
from windlass.engine.model.families.mistral import MIXTRAL, MIXTRAL_NAMES
from windlass.engine.model.families.moe_rules import MoERules
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import RouterSpec
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.model.norm import LAYER_NORM

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    title="Phi 3, 3.5 and 4",
    model_type="phi3",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        sizes=Sizes(context=4096, hidden=3072),
        rms_norm_eps=1e-5,
        original_max_position_embeddings=4096,
        longrope_names=("su", "yarn"),
    ),
    attention_names=AttentionNames(qkv="self_attn.qkv_proj"),
    feed_forward_names=GatedMLPNames(gate_up="mlp.gate_up_proj"),
)

PHI_MOE = Family(
    architecture="PhimoeForCausalLM",
    other_names=("PhiMoEForCausalLM",),
    title="Phi 3.5 MoE",
    model_type="phimoe",
    rules=MIXTRAL.rules,
    biases=ATTENTION_BIASES,
    head_bias=ConfigFlag("lm_head_bias"),
    norms=LayerNorms(form=LAYER_NORM),
    extra_keys=frozenset({"lm_head_bias"}),
    experts=MoERules(
        experts=16,
        top_k=2,
        width_keys=("intermediate_size",),
        router=RouterSpec(2, "sparsemixer", normalized=False, jitter=0.01),
        jitter_key="router_jitter_noise",
        names=MIXTRAL_NAMES,
    ),
)
