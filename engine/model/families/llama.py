"""Llama 1 to 3.3, and the many models that say they are one."""

from __future__ import annotations

from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, MLP_BIAS, Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    title="Llama 1 to 3.3",
    model_type="llama",
    rules=ConfigRules(max_position_embeddings=2048),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    feed_forward_bias=MLP_BIAS,
)
