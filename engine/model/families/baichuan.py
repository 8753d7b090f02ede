"""Baichuan 1 and 2: Llama with one fused tensor for queries, keys and values.

Baichuan 2 has a head of unit rows; the 13B models have ALiBi instead of rotation. The class is not in transformers but
next to the weights; defaults are from its configuration there.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import Config, ConfigRules, nope_layers, read_size
from windlass.engine.model.families.family import Family
from windlass.engine.model.mixers.attention import AttentionNames

_ALIBI_HEADS = 40  # of the 13B models, which differ by nothing else
_SECOND_VOCAB = 125_696


def _variant(family: Family, config: Config) -> Family:
    if read_size(config, "num_attention_heads", family.rules.num_attention_heads) == _ALIBI_HEADS:
        family = replace(family, positions="alibi", rules=replace(family.rules, layer_pattern=nope_layers))
    second = config.get("vocab_size") == _SECOND_VOCAB or "z_loss_weight" in config
    return replace(family, unit_head=second)


BAICHUAN = Family(
    architecture="BaichuanForCausalLM",
    other_names=("BaiChuanForCausalLM",),
    title="Baichuan 1 and 2",
    model_type="baichuan",
    rules=ConfigRules(max_position_embeddings=4096),
    attention_names=AttentionNames(qkv="self_attn.W_pack"),
    variant=_variant,
    extra_keys=frozenset({"z_loss_weight", "model_max_length"}),
)
