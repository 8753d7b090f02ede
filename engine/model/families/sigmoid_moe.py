"""MoE families with sigmoid scores and a selection bias: dots.llm1, MiniMax-M2, AFMoE (Trinity)."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    every_nth_full,
    read_flag,
    read_size,
)
from windlass.engine.model.families.deepseek import DEEPSEEK_EXPERTS, DEEPSEEK_SHARED, SIGMOID_ROUTER
from windlass.engine.model.families.family import ATTENTION_BIASES, Family
from windlass.engine.model.families.mistral import MIXTRAL_NAMES
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert, first_layers_dense
from windlass.engine.model.feed_forward.moe import MoENames, RouterSpec
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION


def _windows_above(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Layers from `max_window_layers` on have a window, or those that `layer_types` lists."""
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
        sizes=Sizes(context=2048, hidden=4608, layers=62, kv_heads=32),
        sliding_window=4096,
    ),
    biases=ATTENTION_BIASES,
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
        sizes=Sizes(context=196_608, hidden=3072, layers=62, heads=48, kv_heads=8, head_dim=128),
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


def _windows_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """Every `global_attn_every_n_layers`-th layer is global and does not rotate; the others have a window and rotate."""
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
        sizes=Sizes(context=16_384, hidden=2048, heads=16, head_dim=128),
        rms_norm_eps=1e-5,
        sliding_window=1024,
    ),
    biases=ATTENTION_BIASES,
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
