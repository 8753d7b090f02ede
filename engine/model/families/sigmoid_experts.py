"""Families of experts that are chosen by a bias beside their scores: GLM-4 MoE, dots.llm1, MiniMax-M2, AFMoE (Trinity), whose
scores are sigmoids, and ERNIE 4.5 MoE, whose scores are a softmax.

GLM-4 MoE and ERNIE 4.5 MoE have a layer that predicts a token further.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.patterns import LayerFacts, every_nth_full
from windlass.engine.model.config_json.rules import ConfigRules
from windlass.engine.model.config_json.values import Config, read_flag, read_size
from windlass.engine.model.families.ernie4_5 import ERNIE4_5
from windlass.engine.model.families.experts_rules import (
    MoERules,
    SharedExpert,
    first_layers_dense,
    read_count,
)
from windlass.engine.model.families.family import ATTENTION_BIAS, ConfigFlag, Family
from windlass.engine.model.families.latent_attention import DEEPSEEK_NAMES, DEEPSEEK_SHARED
from windlass.engine.model.families.prediction import with_appended_mtp_layer, with_dense_mtp_layer
from windlass.engine.model.families.softmax_experts import MIXTRAL_NAMES
from windlass.engine.model.feed_forward.experts_spec import MoENames, RouterSpec
from windlass.engine.model.mixers.attention_spec import AttentionNames
from windlass.engine.model.spec import LayerNorms
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION

_TINY = 1e-20  # what is added to the sum in the original; it only keeps zero from dividing
SIGMOID_ROUTER = RouterSpec(scores="sigmoid", least_sum=_TINY)
DEEPSEEK_EXPERTS = MoERules(
    experts=128,
    top_k=8,
    counts=("n_routed_experts", "num_local_experts", "num_experts"),
    router=SIGMOID_ROUTER,
    normalized_key="norm_topk_prob",
    scale_key="routed_scaling_factor",
    grouped=True,
    shared=SharedExpert(count_key="n_shared_experts"),
    dense=first_layers_dense("first_k_dense_replace", 1),
    names=DEEPSEEK_NAMES,
    more_keys=frozenset({"first_k_dense_replace", "mlp_layer_types"}),
)


def _optional_qk_norm(family: Family, config: Config) -> Family:
    return replace(family, qk_norm="before" if read_flag(config, "use_qk_norm") else None)


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    title="GLM-4.5 and 4.6",
    model_type="glm4_moe",
    other_model_types=("glm4v_moe_text",),
    rules=ConfigRules(
        max_position_embeddings=131_072,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    qkv_bias=ATTENTION_BIAS,
    variant=_optional_qk_norm,
    refine=with_appended_mtp_layer,
    extra_keys=frozenset({"use_qk_norm"}),
    experts=replace(DEEPSEEK_EXPERTS, width=1408),
)


def _windows_above(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Layers from `max_window_layers` on see a window; `layer_types` says it layer by layer."""
    first = 0 if config.get("max_window_layers") == 0 else read_size(config, "max_window_layers", 62)
    full = [FULL_ATTENTION] * facts.count
    own = [SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(facts.count)]
    return (facts.given or own) if facts.windowed else full, full


DOTS1 = Family(
    architecture="Dots1ForCausalLM",
    title="dots.llm1",
    model_type="dots1",
    rules=ConfigRules(
        layer_pattern=_windows_above,
        max_position_embeddings=2048,
        hidden_size=4608,
        num_hidden_layers=62,
        num_key_value_heads=32,
        sliding_window=4096,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="before",
    experts=replace(
        DEEPSEEK_EXPERTS,
        width=1408,
        router=replace(SIGMOID_ROUTER, normalized=False),
        dense=first_layers_dense("first_k_dense_replace", 0),
    ),
)

MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    title="MiniMax-M2",
    model_type="minimax_m2",
    rules=ConfigRules(
        max_position_embeddings=196_608,
        hidden_size=3072,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        eos_token_id=(200_020,),
        rope_theta=5_000_000.0,
    ),
    qk_norm="all heads",
    extra_keys=frozenset({"use_qk_norm"}),
    experts=MoERules(
        experts=256,
        top_k=8,
        counts=("num_local_experts", "num_experts"),
        width_keys=("intermediate_size",),
        router=RouterSpec(scores="sigmoid"),
        names=replace(MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias"),
    ),
)


def _is_dense_ernie(config: Config, index: int) -> bool:
    """Layers from `moe_layer_start_index` to `moe_layer_end_index` have experts, every `moe_layer_interval`-th of all."""
    last = config.get("moe_layer_end_index")
    ends = index if last in (None, -1) else read_count(config, "moe_layer_end_index", 0)
    begins = read_count(config, "moe_layer_start_index", 1)
    return not (begins <= index <= ends and (index + 1) % read_size(config, "moe_layer_interval", 1) == 0)


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    architecture="Ernie4_5_MoeForCausalLM",
    title="ERNIE 4.5 MoE",
    model_type="ernie4_5_moe",
    rules=ConfigRules(
        max_position_embeddings=131_072,
        hidden_size=2560,
        num_hidden_layers=28,
        num_attention_heads=20,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=500_000.0,
    ),
    head_bias=ConfigFlag("use_bias"),
    unused=("model.mtp_",),
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


def _windows_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """Every `global_attn_every_n_layers`-th layer sees everything and does not rotate; the others see a window and do."""
    interval = read_size(config, "global_attn_every_n_layers", 4)
    kinds, _ = every_nth_full(interval)(config, facts)
    layer_types = facts.given or [
        FULL_ATTENTION if i % interval == interval - 1 else SLIDING_ATTENTION for i in range(facts.count)
    ]
    return list(kinds), [FULL_ATTENTION if kind == SLIDING_ATTENTION else None for kind in layer_types]


def _optional_embedding_scale(family: Family, config: Config) -> Family:
    return replace(family, scaled_embeddings=read_flag(config, "mup_enabled"))


AFMOE = Family(
    architecture="AfmoeForCausalLM",
    title="AFMoE (Trinity)",
    model_type="afmoe",
    rules=ConfigRules(
        layer_pattern=_windows_rotate,
        max_position_embeddings=16_384,
        hidden_size=2048,
        num_attention_heads=16,
        head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=1024,
    ),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm="before",
    variant=_optional_embedding_scale,
    attention_names=AttentionNames(gate="self_attn.gate_proj"),
    norms=LayerNorms(
        mixer_output="post_attention_layernorm",
        feed_forward="pre_mlp_layernorm",
        feed_forward_output="post_mlp_layernorm",
    ),
    extra_keys=frozenset({"mup_enabled", "global_attn_every_n_layers"}),
    experts=MoERules(
        experts=64,
        top_k=6,
        width=1408,
        router=SIGMOID_ROUTER,
        scale_key="route_scale",
        shared=SharedExpert(count_key="num_shared_experts", default=2),
        dense=first_layers_dense("num_dense_layers", 1),
        names=MoENames(router="mlp.router.gate", choice_bias="mlp.expert_bias", shared=DEEPSEEK_SHARED),
        more_keys=frozenset({"num_dense_layers"}),
    ),
)
