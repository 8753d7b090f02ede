"""HunYuan (dense): query and key norms behind the rotation."""

from __future__ import annotations

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, Family
from windlass.engine.model.mixers.attention_spec import AttentionNames

HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    title="HunYuan V1 (dense)",
    model_type="hunyuan_v1_dense",
    rules=ConfigRules(max_position_embeddings=2048, rms_norm_eps=1e-5),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="after",
    attention_names=AttentionNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
)
