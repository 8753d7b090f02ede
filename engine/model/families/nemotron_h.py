"""Nemotron H, Nemotron Nano 2 and Nemotron 3 Nano.

Each layer has only one part: state-space (Mamba 2), attention, or a feed-forward. Feed-forwards may be MoE and have no
gates. Nemotron 3.5 has two more layers, which together form the MTP head.
"""

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
)
from windlass.engine.model.families.family import MLP_BIAS, Biases, Family
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert, read_count
from windlass.engine.model.families.mtp import nemotron_mtp
from windlass.engine.model.families.recurrent_layers import (
    check_layer_types,
    read_limits,
    read_shape,
    with_recurrent_layers,
)
from windlass.engine.model.feed_forward.mlp import PlainMLPNames
from windlass.engine.model.feed_forward.moe import MoENames, RouterSpec
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.mixers.state_space import StateSpaceNames, StateSpaceSpec
from windlass.engine.model.model_spec import LayerNorms, ModelSpec, OuterNames
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

STATE_SPACE, FEED_FORWARD, EXPERTS = "linear_attention", "mlp", "moe"
_BY_LETTER = {"M": STATE_SPACE, "*": FULL_ATTENTION, "-": FEED_FORWARD, "E": EXPERTS}
_KINDS = {"attention": FULL_ATTENTION, "mamba": STATE_SPACE}
_PATTERN = "hybrid_override_pattern"
_MAX_LAYERS = 10_000

# Second names of other keys, which take precedence.
_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}

# Fixed values, and keys of absent parts or of the initialization of weights. time_step_min does not limit steps: transformers
# 5.24 does that, but the published code and llama.cpp do not (transformers' pull request 48989).
_FIXED_VALUES: dict[str, tuple[object, ...] | None] = {
    "mamba_hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "sliding_window": (),
    **dict.fromkeys(
        "expand chunk_size mamba_chunk_size mamba_expand mamba_proj_bias mamba_ssm_cache_dtype mamba_ssm_dtype residual_in_fp32 "
        "rescale_prenorm_residual time_step_floor time_step_min time_step_max time_step_rank mamba_dt_min mamba_dt_max "
        "mamba_dt_init_floor num_logits_to_keep use_mamba_kernels attention_head_dim use_bias "
        "moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap "
        "mtp_layers_block_type mtp_hybrid_override_pattern n_group topk_group n_routed_experts n_shared_experts "
        "num_local_experts norm_topk_prob num_experts_per_tok routed_scaling_factor".split()
    ),
}

_READ = frozenset((*_ALIASES, *_ALIASES.values(), _PATTERN, "ssm_state_size", "mamba_num_heads", "mamba_head_dim")) | {
    "mlp_hidden_act",
    "layers_block_type",
}


def _rewrite(config: Config) -> dict[str, Any]:
    """Set `layer_types` to a list of kinds, and `num_hidden_layers` to its length. Raises LoadError."""
    result = dict(config)
    for alias, name in _ALIASES.items():
        if (given := result.pop(alias, None)) is not None:
            result[name] = given
    older, kinds, pattern = (result.pop(key, None) for key in ("layers_block_type", "layer_types", _PATTERN))
    kinds = older if kinds is None else kinds
    if kinds is None and isinstance(pattern, str):
        kinds = [_BY_LETTER.get(letter, letter) for letter in pattern[: _MAX_LAYERS + 1]]
    if not isinstance(kinds, list) or not kinds:
        raise LoadError(
            f"config.json: layers_block_type must be a list with one name per layer, or {_PATTERN} a string "
            "with one letter per layer"
        )
    result["layer_types"] = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if EXPERTS in result["layer_types"] and config.get("moe_latent_size") is not None:
        raise LoadError(
            f"config.json: moe_latent_size is {format_value(config['moe_latent_size'])}: experts that see less than the "
            "model's width (Nemotron 3 Super and Ultra) are not supported"
        )
    count = config.get("num_hidden_layers")
    if count is not None and count != len(kinds):
        raise LoadError(
            f"config.json: num_hidden_layers is {format_value(count)}, but kinds are given for {len(kinds)} layers: keep one"
        )
    result["num_hidden_layers"] = len(kinds)
    if "attention_head_dim" in config and result.get("head_dim") is None:
        result["head_dim"] = config["attention_head_dim"]
    return result


def _layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[None]]:
    """Attention layers attend to everything, and none rotates."""
    kinds = check_layer_types(facts.given or [], f"{STATE_SPACE}, {FEED_FORWARD} and {EXPERTS}")
    return [FULL_ATTENTION for _ in kinds], [None] * facts.count


def _optional_experts(family: Family, config: Config) -> Family:
    return family if EXPERTS in config["layer_types"] else replace(family, experts=None)


def _has_no_experts(config: Config, index: int) -> bool:
    return bool(config["layer_types"][index] != EXPERTS)


def _one_part_each(spec: ModelSpec, config: Config) -> ModelSpec:
    """Remove the part that a layer of this kind does not have."""
    kinds = config["layer_types"]
    result = with_recurrent_layers(spec, kinds, _state_space(config), STATE_SPACE)
    layers = [
        replace(layer, mixer=None) if kind in (FEED_FORWARD, EXPERTS) else replace(layer, feed_forward=None)
        for kind, layer in zip(kinds, result.layers, strict=True)
    ]
    result = replace(result, layers=tuple(layers))
    return replace(result, mtp=_mtp(result, config))


def _mtp(spec: ModelSpec, config: Config) -> ModelSpec | None:
    """The MTP layers; None if config.json declares none, or others than the published ones."""
    kinds, letters = config.get("mtp_layers_block_type"), config.get("mtp_hybrid_override_pattern")
    if kinds is None and isinstance(letters, str):
        kinds = [_BY_LETTER.get(letter) for letter in letters]
    others = kinds is not None and kinds not in (["attention", EXPERTS], [FULL_ATTENTION, EXPERTS])
    # vLLM and SGLang assume 1 if config.json has no number.
    return None if others or not read_count(config, "num_nextn_predict_layers", 1) else nemotron_mtp(spec)


def _state_space(config: Config) -> StateSpaceSpec:
    shape = read_shape(
        config, {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    )
    return StateSpaceSpec(
        *shape,
        read_number(config, "layer_norm_epsilon") or NEMOTRON_H.rules.rms_norm_eps,
        read_limits(config),
        read_flag(config, "use_bias"),
        read_flag(config, "use_conv_bias", default=True),
        StateSpaceNames(
            *(f"mixer.{name}" for name in ("in_proj", "conv1d", "A_log", "dt_bias", "D", "norm", "out_proj"))
        ),
    )


_EXPERTS = MoERules(
    experts=8,
    top_k=2,
    counts=("n_routed_experts", "num_local_experts"),
    width=7688,
    router=RouterSpec(scores="sigmoid", least_sum=1e-20),
    normalized_key="norm_topk_prob",
    scale_key="routed_scaling_factor",
    grouped=True,
    shared=SharedExpert(width_key="moe_shared_expert_intermediate_size", default=7688),
    dense=_has_no_experts,
    names=MoENames(
        router="mixer.gate",
        experts="mixer.experts",
        expert=PlainMLPNames("up_proj", "down_proj"),
        choice_bias="mixer.gate.e_score_correction_bias",
        shared=PlainMLPNames("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    ),
)

NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    title="Nemotron H, Nano 2 and 3",
    model_type="nemotron_h",
    positions="states",
    rules=ConfigRules(
        layer_pattern=_layer_pattern,
        sizes=Sizes(context=4096, layers=4, kv_heads=8, head_dim=128),
        rms_norm_eps=1e-5,
        eos_token_id=(2,),
        other_layers=(STATE_SPACE, FEED_FORWARD, EXPERTS),
        rewrite=_rewrite,
    ),
    biases=Biases(feed_forward=MLP_BIAS),
    activation="relu2",
    activation_key="mlp_hidden_act",
    attention_names=AttentionNames(q="mixer.q_proj", k="mixer.k_proj", v="mixer.v_proj", out="mixer.o_proj"),
    feed_forward_names=PlainMLPNames(up="mixer.up_proj", down="mixer.down_proj"),
    norms=LayerNorms(mixer="norm", feed_forward=None),
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("backbone.embeddings", "backbone.layers", "backbone.norm_f"),
    fixed_values=_FIXED_VALUES,
    variant=_optional_experts,
    refine=_one_part_each,
    extra_keys=_READ,
    unused_tensors=("mtp.",),
    experts=_EXPERTS,
)
