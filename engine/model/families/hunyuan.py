"""HunYuan, dense and MoE: query and key norms after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, Sizes
from windlass.engine.model.families.family import ATTENTION_BIASES, Family
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import MoENames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.rotary.scaling_fields import format_value

HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    title="HunYuan V1 (dense)",
    model_type="hunyuan_v1_dense",
    rules=ConfigRules(Sizes(context=2048), rms_norm_eps=1e-5),
    biases=ATTENTION_BIASES,
    qk_norm="after",
    attention_names=AttentionNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
)


def _uniform_values(config: Config) -> dict[str, Any]:
    """Replace lists with a value per layer by that value. Raises LoadError if layers differ."""
    result = dict(config)
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        value = config.get(key)
        if not isinstance(value, list):
            continue
        if not value or any(one != value[0] for one in value):
            raise LoadError(
                f"config.json: {key} {format_value(value)} differs from layer to layer, which is not supported"
            )
        result[key] = value[0]
    return result


HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    title="HunYuan V1 MoE",
    model_type="hunyuan_v1_moe",
    rules=replace(HUNYUAN.rules, rewrite=_uniform_values),
    experts=MoERules(
        experts=1,
        top_k=1,
        counts=("num_experts",),
        top_k_keys=("moe_topk", "num_experts_per_tok"),
        width_keys=("moe_intermediate_size", "intermediate_size"),
        shared=SharedExpert(count_key="num_shared_expert"),
        names=MoENames(router="mlp.gate.wg", shared=GatedMLPNames.under("mlp.shared_mlp")),
        more_keys=frozenset({"use_mixed_mlp_moe"}),
    ),
)
