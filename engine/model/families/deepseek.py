"""DeepSeek V2 and V3, and other families with latent attention: Youtu, MiniCPM3.

DeepSeek V3 has an MTP layer after its last layer.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, ConfigRules, Sizes
from windlass.engine.model.families.family import (
    ATTENTION_BIASES,
    LLAMA_BIASES,
    ConfigFlag,
    ConfigNumber,
    Family,
    LatentSizes,
    Multipliers,
)
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert, first_layers_dense
from windlass.engine.model.families.mtp import with_appended_mtp_layer
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import MoENames, RouterSpec

DEEPSEEK_SHARED = GatedMLPNames.under("mlp.shared_experts")

# Names of DeepSeek V3, which many models follow.
DEEPSEEK_NAMES = MoENames(choice_bias="mlp.gate.e_score_correction_bias", shared=DEEPSEEK_SHARED)

_RULES = ConfigRules(Sizes(context=2048, head_dim=64), head_dim_key="qk_rope_head_dim", scales_scores=True)
_SIZES = LatentSizes(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128)

DEEPSEEK_LAYER_KEYS = frozenset(
    {"first_k_dense_replace", "mlp_layer_types", "moe_layer_freq", "scoring_func", "topk_method"}
)


def _checked_router(family: Family, config: Config) -> Family:
    """DeepSeek V2 may choose groups of experts first; its weights are never divided by their sum. Raises LoadError."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        raise LoadError(
            "config.json: topk_method must be greedy or group_limited_greedy and norm_topk_prob false: other routers of "
            "DeepSeek V2 are not supported"
        )
    if family.experts is None or method == "group_limited_greedy":
        return family
    return replace(family, experts=replace(family.experts, grouped=False))


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek V2",
    model_type="deepseek_v2",
    rules=_RULES,
    biases=LLAMA_BIASES,
    interleaved=True,
    variant=_checked_router,
    extra_keys=frozenset({"n_group", "topk_group", "norm_topk_prob"}),
    experts=MoERules(
        experts=64,
        top_k=6,
        width=1407,
        router=RouterSpec(normalized=False, group_score="largest"),
        scale_key="routed_scaling_factor",
        grouped=True,
        shared=SharedExpert(count_key="n_shared_experts", default=2),
        dense=first_layers_dense("first_k_dense_replace", 0),
        names=MoENames(shared=DEEPSEEK_SHARED),
        more_keys=DEEPSEEK_LAYER_KEYS,
    ),
    latent=_SIZES,
)

DEEPSEEK_V3_EXPERTS = MoERules(
    experts=256,
    top_k=8,
    width=2048,
    router=RouterSpec(scores="sigmoid", scale=2.5, least_sum=1e-20, groups=8, top_groups=4),
    normalized_key="norm_topk_prob",
    scale_key="routed_scaling_factor",
    grouped=True,
    shared=SharedExpert(count_key="n_shared_experts"),
    dense=first_layers_dense("first_k_dense_replace", 3),
    names=DEEPSEEK_NAMES,
    more_keys=DEEPSEEK_LAYER_KEYS,
)

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek V3, R1; Kimi K2",
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    rules=replace(
        _RULES,
        sizes=Sizes(context=4096, hidden=7168, layers=61, heads=128, kv_heads=128, head_dim=64),
    ),
    biases=ATTENTION_BIASES,
    interleaved=ConfigFlag("rope_interleave", default=True),
    refine=with_appended_mtp_layer,
    experts=DEEPSEEK_V3_EXPERTS,
    latent=_SIZES,
)

YOUTU = replace(
    DEEPSEEK_V3,
    architecture="YoutuForCausalLM",
    title="Youtu-LLM",
    model_type="youtu",
    rules=replace(
        _RULES,
        sizes=Sizes(context=131_072, hidden=2048, heads=16, kv_heads=16, head_dim=64),
        tie_word_embeddings=True,
    ),
    other_model_types=(),
    refine=None,
    experts=None,
)

MINICPM3 = Family(
    architecture="MiniCPM3ForCausalLM",
    model_type="minicpm3",
    rules=replace(
        _RULES,
        sizes=Sizes(context=32_768, hidden=2560, layers=62, heads=40, kv_heads=40, head_dim=32),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    biases=LLAMA_BIASES,
    multipliers=Multipliers(
        embedding=ConfigNumber("scale_emb", 12.0),
        depth=ConfigNumber("scale_depth", 1.4),
        base_width=ConfigNumber("dim_model_base", 256.0),
    ),
    latent=LatentSizes(kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, v_head_dim=None),
)

# The original adds 1e-20 to the sum, which only prevents a division by zero.
SIGMOID_ROUTER = RouterSpec(scores="sigmoid", least_sum=1e-20)

DEEPSEEK_EXPERTS = replace(
    DEEPSEEK_V3_EXPERTS,
    experts=128,
    counts=("n_routed_experts", "num_local_experts", "num_experts"),
    width=None,
    router=SIGMOID_ROUTER,
    dense=first_layers_dense("first_k_dense_replace", 1),
    more_keys=frozenset({"first_k_dense_replace", "mlp_layer_types"}),
)
