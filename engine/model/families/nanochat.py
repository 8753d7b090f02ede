"""NanoChat: norms without weights, also of the embedding and after the rotation, which has the opposite sign."""

from __future__ import annotations

from windlass.engine.model.config_json.config_rules import ConfigRules
from windlass.engine.model.families.family import ATTENTION_BIAS, Family, SoftCaps
from windlass.engine.model.feed_forward.mlp import PlainMLPNames
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.model.norm import NormSpec

_FORM = NormSpec(weight=False)

NANOCHAT = Family(
    architecture="NanoChatForCausalLM",
    title="NanoChat",
    model_type="nanochat",
    rules=ConfigRules(
        max_position_embeddings=2048,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=6,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="after",
    qk_norm_form=_FORM,
    embedding_norm=_FORM,
    swapped=True,
    activation="relu2",
    soft_caps=SoftCaps(logits=15.0),
    feed_forward_names=PlainMLPNames(up="mlp.fc1", down="mlp.fc2"),
    norms=LayerNorms(form=_FORM),
)
