"""InternLM 2 (projections fused per key head) and InternLM 3 (Llama with other switches)."""

from __future__ import annotations

from windlass.engine.model.config_json.config_rules import ConfigRules, renamed
from windlass.engine.model.families.family import ATTENTION_BIAS, MLP_BIAS, ConfigFlag, Family
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames

_BIAS = ConfigFlag("bias", default=True)

# Its class is not in transformers but next to the weights; defaults are from its configuration there.
INTERNLM2 = Family(
    architecture="InternLM2ForCausalLM",
    title="InternLM 2 and 2.5",
    model_type="internlm2",
    rules=ConfigRules(max_position_embeddings=2048),
    qkv_bias=_BIAS,
    out_bias=_BIAS,
    attention_names=AttentionNames(qkv="attention.wqkv", qkv_order="groups", out="attention.wo"),
    feed_forward_names=GatedMLPNames(gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2"),
    norms=LayerNorms(mixer="attention_norm", feed_forward="ffn_norm"),
    outer_names=OuterNames(embedding="model.tok_embeddings", head="output"),
)

INTERNLM3 = Family(
    architecture="InternLM3ForCausalLM",
    title="InternLM 3",
    model_type="internlm3",
    rules=ConfigRules(
        max_position_embeddings=32_768,
        num_hidden_layers=48,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rewrite=renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=MLP_BIAS,
    feed_forward_bias=MLP_BIAS,
)
