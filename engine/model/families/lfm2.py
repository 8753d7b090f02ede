"""LFM2, dense and MoE: gated short convolutions in most layers, attention with normed heads in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    read_flag,
    read_number,
    read_size,
)
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.moe_rules import MoERules, first_layers_dense
from windlass.engine.model.families.recurrent_layers import (
    check_convolution_width,
    check_layer_types,
    with_recurrent_layers,
)
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames, RouterSpec
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.mixers.short_convolution import ShortConvolutionSpec
from windlass.engine.model.model_spec import LayerNorms, ModelSpec, OuterNames
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

CONVOLUTION = "conv"

# Fixed values, and keys of the initialization of weights.
_FIXED_VALUES: dict[str, tuple[object, ...] | None] = {
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys("block_use_xavier_init block_mlp_init_scale block_out_init_scale conv_use_xavier_init".split()),
}

# Second names of other keys, which must agree.
_ALIASES = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
    "theta": "rope_theta",
}

_READ = frozenset({*_ALIASES, "conv_bias", "conv_L_cache", "full_attn_idxs"})


def _rewrite_lfm2_moe(config: Config) -> dict[str, Any]:
    """Use the key names of other families. The older of two names takes precedence, as in transformers."""
    result = dict(config)
    for older, name in {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}.items():
        given = result.pop(older, None)
        result[name] = result.get(name) if given is None else given
    return result


def _rewrite_lfm2(config: Config) -> dict[str, Any]:
    """The same with the actual width of feed-forwards: two thirds of the given one, times a factor, rounded up to a multiple."""
    result = _rewrite_lfm2_moe(config)
    adjusts = read_flag(result, "block_auto_adjust_ff_dim", default=True)
    step = read_size(result, "block_multiple_of", 256)
    factor = read_number(result, "block_ffn_dim_multiplier")
    is_null = "block_ffn_dim_multiplier" in result and factor is None
    for key in ("block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"):
        result.pop(key, None)
    if adjusts and result["intermediate_size"] is not None:
        width = int(2 * read_size(result, "intermediate_size") / 3)
        if not is_null:
            width = step * ((int((factor or 1.0) * width) + step - 1) // step)
        result["intermediate_size"] = width
    return result


def _kinds(config: Config, count: int, given: list[str] | None) -> list[str]:
    """Kinds from `layer_types`, or attention in the layers of `full_attn_idxs`, or attention in all layers."""
    attending = config.get("full_attn_idxs")
    if attending is None:
        return given or [FULL_ATTENTION] * count
    if not isinstance(attending, list) or any(
        isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count for index in attending
    ):
        raise LoadError(f"config.json: full_attn_idxs must be a list of the numbers of layers, 0 to {count - 1}")
    kinds = [FULL_ATTENTION if index in attending else CONVOLUTION for index in range(count)]
    if given not in (None, kinds):
        raise LoadError("config.json: layer_types and full_attn_idxs name different layers: keep one")
    return kinds


def _layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Attention layers attend to everything and rotate alike."""
    return check_layer_types(_kinds(config, facts.count, facts.given), CONVOLUTION), [FULL_ATTENTION] * facts.count


def _check_aliases(family: Family, config: Config) -> Family:
    """Raise LoadError if a key and its second name differ."""
    for alias, name in _ALIASES.items():
        if None not in (values := (config.get(alias), config.get(name))) and values[0] != values[1]:
            raise LoadError(
                f"config.json: {name} is {format_value(values[1])} and {alias} is {format_value(values[0])}: keep one"
            )
    return family


def _with_convolutions(spec: ModelSpec, config: Config) -> ModelSpec:
    width = read_size(config, "conv_L_cache", 3)
    check_convolution_width("conv_L_cache", width)
    mixer = ShortConvolutionSpec(spec.hidden_size, width, read_flag(config, "conv_bias"))
    return with_recurrent_layers(spec, _kinds(config, len(spec.layers), config.get("layer_types")), mixer)


LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    title="LFM2",
    model_type="lfm2",
    rules=ConfigRules(
        layer_pattern=_layer_pattern,
        sizes=Sizes(context=128_000, hidden=2560, kv_heads=8),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=1_000_000.0,
        other_layers=(CONVOLUTION,),
        rewrite=_rewrite_lfm2,
    ),
    qk_norm="before",
    norm_eps_key="norm_eps",
    attention_names=AttentionNames(
        out="self_attn.out_proj", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"
    ),
    feed_forward_names=GatedMLPNames("feed_forward.w1", "feed_forward.w3", down="feed_forward.w2"),
    norms=LayerNorms(mixer="operator_norm", feed_forward="ffn_norm"),
    outer_names=OuterNames(final_norm="model.embedding_norm"),
    fixed_values=_FIXED_VALUES,
    variant=_check_aliases,
    refine=_with_convolutions,
    extra_keys=_READ,
)


def _optional_selection_bias(family: Family, config: Config) -> Family:
    """Without the selection bias, if config.json disables it."""
    family = _check_aliases(family, config)
    if read_flag(config, "use_expert_bias", default=True) or family.experts is None:
        return family
    return replace(family, experts=replace(family.experts, names=replace(family.experts.names, choice_bias=None)))


LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    title="LFM2 MoE",
    model_type="lfm2_moe",
    rules=replace(LFM2.rules, sizes=Sizes(context=128_000, hidden=2048, kv_heads=8), rewrite=_rewrite_lfm2_moe),
    variant=_optional_selection_bias,
    experts=MoERules(
        experts=32,
        top_k=4,
        width=1792,
        router=RouterSpec(scores="sigmoid", sum_eps=1e-6),
        normalized_key="norm_topk_prob",
        scale_key="routed_scaling_factor",
        dense=first_layers_dense("num_dense_layers", 2),
        names=MoENames(
            router="feed_forward.gate",
            experts="feed_forward.experts",
            expert=GatedMLPNames("w1", "w3", down="w2"),
            choice_bias="feed_forward.expert_bias",
            stacks=ExpertStacks("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        ),
        more_keys=frozenset({"num_dense_layers", "use_expert_bias"}),
    ),
)
