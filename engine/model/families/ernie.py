"""ERNIE 4.5, dense and MoE: interleaved pairs, one switch for all biases.

Experts are chosen by a bias added to softmax scores. The MoE models have an MTP layer.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import Config, ConfigRules, Sizes, read_size
from windlass.engine.model.families.deepseek import DEEPSEEK_NAMES
from windlass.engine.model.families.family import Biases, ConfigFlag, Family
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert, read_count
from windlass.engine.model.families.mtp import with_dense_mtp_layer
from windlass.engine.model.feed_forward.moe import RouterSpec

_BIAS = ConfigFlag("use_bias")

ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    other_names=("Ernie4_5_ForCausalLM",),
    title="ERNIE 4.5 (dense)",
    model_type="ernie4_5",
    rules=ConfigRules(
        sizes=Sizes(context=131_072, hidden=1024, layers=18, heads=16, kv_heads=2, head_dim=128),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=500_000.0,
    ),
    biases=Biases.everywhere(_BIAS),
    interleaved=True,
)


def _is_dense_ernie(config: Config, index: int) -> bool:
    """Of the layers from `moe_layer_start_index` to `moe_layer_end_index`, those at multiples of `moe_layer_interval`
    have experts."""
    last = config.get("moe_layer_end_index")
    ends = index if last in (None, -1) else read_count(config, "moe_layer_end_index", 0)
    begins = read_count(config, "moe_layer_start_index", 1)
    return not (begins <= index <= ends and (index + 1) % read_size(config, "moe_layer_interval", 1) == 0)


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    architecture="Ernie4_5_MoeForCausalLM",
    title="ERNIE 4.5 MoE",
    model_type="ernie4_5_moe",
    rules=replace(
        ERNIE4_5.rules,
        sizes=Sizes(context=131_072, hidden=2560, layers=28, heads=20, kv_heads=4),
    ),
    head_bias=_BIAS,
    unused_tensors=("model.mtp_",),
    refine=with_dense_mtp_layer,
    experts=MoERules(
        experts=64,
        top_k=6,
        counts=("moe_num_experts",),
        top_k_keys=("moe_k",),
        width=1536,
        router=RouterSpec(least_sum=1e-12),
        least_sum_key="moe_norm_min",
        shared=SharedExpert(count_key="moe_num_shared_experts", default=2),
        dense=_is_dense_ernie,
        names=replace(DEEPSEEK_NAMES, choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_is_row=True),
        more_keys=frozenset({"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"}),
    ),
)
