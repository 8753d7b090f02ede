"""Granite: dense, MoE, and Granite 4.

Granite 4 has attention in every layer (Micro, 1B, 350M), or state-space layers (Mamba 2) with a few attention layers in
between (sizes with an H). Its feed-forward is named like a shared expert. A softmax over the chosen experts equals the
softmax over all, divided by the sum of the chosen.
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
    read_size,
)
from windlass.engine.model.families.family import (
    ATTENTION_BIASES,
    LLAMA_BIASES,
    ConfigNumber,
    Family,
    Multipliers,
    reject_unsupported_values,
)
from windlass.engine.model.families.moe_rules import MoERules, SharedExpert, read_count
from windlass.engine.model.families.recurrent_layers import (
    MAMBA_KEYS,
    MAX_SIZE,
    check_layer_types,
    read_limits,
    read_mamba_shape,
    with_recurrent_layers,
)
from windlass.engine.model.feed_forward.mlp import GatedMLPNames
from windlass.engine.model.feed_forward.moe import ExpertStacks, MoENames
from windlass.engine.model.mixers.state_space import StateSpaceSpec
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

GRANITE = Family(
    architecture="GraniteForCausalLM",
    title="Granite (dense)",
    model_type="granite",
    rules=ConfigRules(Sizes(context=2048)),
    biases=LLAMA_BIASES,
    multipliers=Multipliers(
        embedding=ConfigNumber("embedding_multiplier"),
        residual=ConfigNumber("residual_multiplier"),
        attention=ConfigNumber("attention_multiplier"),
        logits_divided_by=ConfigNumber("logits_scaling"),
    ),
)

_SHARED = GatedMLPNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")

_GRANITE_NAMES = MoENames(
    router="block_sparse_moe.router.layer",
    stacks=ExpertStacks("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)

GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    title="Granite MoE",
    model_type="granitemoe",
    biases=ATTENTION_BIASES,
    experts=MoERules(experts=8, top_k=2, width_keys=("intermediate_size",), names=_GRANITE_NAMES),
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    title="Granite MoE with a shared expert",
    model_type="granitemoeshared",
    experts=MoERules(
        experts=8,
        top_k=2,
        width_keys=("intermediate_size",),
        shared=SharedExpert(width_key="shared_intermediate_size", default=0),
        names=replace(_GRANITE_NAMES, shared=_SHARED),
    ),
)

STATE_SPACE = "linear_attention"
_KINDS = {"attention": FULL_ATTENTION, "mamba": STATE_SPACE}  # names in config.json, and in transformers 5
_POSITIONS = "position_embedding_type"
_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta")


def _rewrite(config: Config) -> dict[str, Any]:
    """Use the key names of Granite's other models. Raises LoadError for a model without position information."""
    result = dict(config)
    older, kinds = result.pop("layers_block_type", None), result.pop("layer_types", None)
    kinds = older if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != read_size(config, "num_hidden_layers"):
        raise LoadError("config.json: layer_types must be a list with one name per layer")
    result["layer_types"] = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not _rotates(config):
        if STATE_SPACE not in result["layer_types"]:
            raise LoadError(
                f"config.json: {_POSITIONS} {format_value(config.get(_POSITIONS))} is not supported: a model with attention in "
                'every layer needs "rope", its only source of position information'
            )
        result = {key: value for key, value in result.items() if key not in _ROTATION}
    if not _experts(config):
        result["intermediate_size"] = read_size(config, "shared_intermediate_size", 1024)
    return result


def _rotates(config: Config) -> bool:
    given = config.get(_POSITIONS)
    if given not in (None, "nope", "rope"):
        raise LoadError(f'config.json: {_POSITIONS} must be "rope" or "nope", got {format_value(given)}')
    return bool(given == "rope")


def _layer_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """Attention layers attend to everything, and either all of them rotate or none."""
    group = FULL_ATTENTION if _rotates(config) else None
    return check_layer_types(facts.given or [], STATE_SPACE), [group] * facts.count


def _experts(config: Config) -> int:
    return read_count(config, "num_local_experts", 8)


def _configured_variant(family: Family, config: Config) -> Family:
    """The family without experts, or without rotation, if config.json selects that."""
    if not _rotates(config):
        family = replace(family, positions="states")
    if _experts(config):
        return family
    return replace(family, experts=None, feed_forward_names=_SHARED, extra_keys=family.extra_keys | family.own_keys)


def _refine(spec: ModelSpec, config: Config) -> ModelSpec:
    """Put the state-space layers in place."""
    kinds = config["layer_types"]
    return with_recurrent_layers(spec, kinds, _state_space(config)) if STATE_SPACE in kinds else spec


def _state_space(config: Config) -> StateSpaceSpec:
    reject_unsupported_values(config, {"hidden_act": ("silu", "swish")})
    hidden, expand = read_size(config, "hidden_size"), read_size(config, "mamba_expand", 2, most=MAX_SIZE)
    return StateSpaceSpec(
        *read_mamba_shape(config, expand * hidden, f"mamba_expand {expand} times hidden_size {hidden}"),
        read_number(config, "rms_norm_eps") or GRANITE4.rules.rms_norm_eps,
        read_limits(config),
        read_flag(config, "mamba_proj_bias"),
        read_flag(config, "mamba_conv_bias", default=True),
    )


GRANITE4 = replace(
    GRANITE_MOE_SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    title="Granite 4",
    model_type="granitemoehybrid",
    rules=replace(GRANITE.rules, layer_pattern=_layer_pattern, other_layers=(STATE_SPACE,), rewrite=_rewrite),
    variant=_configured_variant,
    refine=_refine,
    extra_keys=MAMBA_KEYS | {_POSITIONS, "normalization_function", "init_method"},
)
