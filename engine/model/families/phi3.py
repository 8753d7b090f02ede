"""Phi 3 and 4 (mini): fused projections, and a longrope that older files call yarn."""

from __future__ import annotations

from windlass.engine.model.config_json.patterns import sliding_window_layers
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import Family
from windlass.engine.model.feed_forward.gated_spec import GatedMLPNames
from windlass.engine.model.mixers.attention_spec import AttentionNames

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    title="Phi 3, 3.5 and 4",
    model_type="phi3",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        max_position_embeddings=4096,
        hidden_size=3072,
        rms_norm_eps=1e-5,
        original_max_position_embeddings=4096,
        longrope_names=("su", "yarn"),
    ),
    attention_names=AttentionNames(qkv="self_attn.qkv_proj"),
    feed_forward_names=GatedMLPNames(gate_up="mlp.gate_up_proj"),
)
