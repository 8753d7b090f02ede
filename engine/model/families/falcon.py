"""Falcon and Falcon H1.

Falcon has fused projections, LayerNorm, and three placements of the norms, chosen by config.json. Falcon-RW does not
rotate: ALiBi is added to its scores before they are divided by the square root of the head size, so that the slopes are
divided, too. transformers rounds the ALiBi bias to bfloat16; here it is not rounded. Falcon H1 has a state-space layer
(Mamba 2) in parallel with attention in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    Sizes,
    nope_layers,
    read_flag,
    read_number,
    read_size,
    renamed,
)
from windlass.engine.model.families.family import (
    CLASSIFIER_HEAD,
    LLAMA_BIASES,
    Biases,
    ConfigFlag,
    ConfigNumber,
    Family,
    Multipliers,
)
from windlass.engine.model.families.recurrent_layers import MAMBA_KEYS, MAX_SIZE, read_limits, read_mamba_shape
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, GatedMLPSpec, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames, AttentionSpec
from windlass.engine.model.mixers.state_space import ParallelStateSpaceSpec, StateSpaceSpec
from windlass.engine.model.model_spec import LayerNorms, ModelSpec, OuterNames
from windlass.engine.model.norm import LAYER_NORM
from windlass.engine.rotary.scaling_fields import format_value

_ONE_NORM = LayerNorms(feed_forward=None, form=LAYER_NORM, parallel=True)
_TWO_NORMS = LayerNorms(mixer="ln_attn", feed_forward="ln_mlp", form=LAYER_NORM, parallel=True)
_SEQUENTIAL = LayerNorms(form=LAYER_NORM)
_FUSED = AttentionNames(qkv="self_attention.query_key_value", out="self_attention.dense")

_rename_keys = renamed({"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"})


def _rewrite(config: Config) -> dict[str, Any]:
    """Only the newer form has a number of key heads; the older form has one key head, or one per query head."""
    result = _rename_keys(config)
    if not read_flag(config, "new_decoder_architecture"):
        one = read_flag(config, "multi_query", default=True)
        result["num_key_value_heads"] = 1 if one else config.get("num_attention_heads")
    return result


def _variant(family: Family, config: Config) -> Family:
    if read_flag(config, "alibi"):
        rules = replace(family.rules, layer_pattern=nope_layers)
        family = replace(family, positions="alibi", scaled_alibi=True, rules=rules)
    grouped = read_flag(config, "new_decoder_architecture")
    if grouped:
        norms = _ONE_NORM if read_size(config, "num_ln_in_parallel_attn", 2) == 1 else _TWO_NORMS
    else:
        norms = _ONE_NORM if read_flag(config, "parallel_attn", default=True) else _SEQUENTIAL
        grouped = not read_flag(config, "multi_query", default=True)
    return replace(family, attention_names=replace(_FUSED, qkv_order="groups" if grouped else "parts"), norms=norms)


FALCON = Family(
    architecture="FalconForCausalLM",
    title="Falcon, Falcon-RW",
    model_type="falcon",
    rules=ConfigRules(
        sizes=Sizes(context=2048, hidden=4544, heads=71),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        intermediate_factor=4,
        rewrite=_rewrite,
    ),
    biases=Biases.everywhere(ConfigFlag("bias")),
    activation="gelu",
    activation_key="activation",
    attention_names=_FUSED,
    feed_forward_names=PlainMLPNames(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=_ONE_NORM,
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("transformer.word_embeddings", "transformer.h", "transformer.ln_f"),
    token_head=CLASSIFIER_HEAD,
    variant=_variant,
    extra_keys=frozenset(
        {"new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "alibi"}
    ),
)

_IN, _STATE_IN, _BIASES = "attention_in_multiplier", "ssm_in_multiplier", ("mamba_proj_bias", "projectors_bias")
_MAX_FACTOR = 1e6  # far above any model's; products stay finite

_READ = MAMBA_KEYS | frozenset(
    "attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers ssm_in_multiplier ssm_multipliers "
    "ssm_out_multiplier mamba_d_ssm mamba_norm_before_gate mamba_rms_norm projectors_bias time_step_floor time_step_min "
    "time_step_max time_step_rank num_logits_to_keep layers_block_type".split()
)


def _refine(spec: ModelSpec, config: Config) -> ModelSpec:
    attention_in, key = (_factor(config, name) for name in (_IN, "key_multiplier"))
    if attention_in != 1 and read_flag(config, "attention_bias"):
        raise LoadError(f"config.json: {_IN} {attention_in} together with attention_bias is not supported")
    state = _falcon_h1_state_space(config)
    parallel_state_space = ParallelStateSpaceSpec(
        state,
        attention_factor=attention_in * _factor(config, "attention_out_multiplier"),
        state_factor=_factor(config, "ssm_out_multiplier"),
    )
    gate, down = _factors(config, "mlp_multipliers", 2)
    factors = None if gate == down == 1 else (gate, down)
    layers = []
    for layer in spec.layers:
        attention, feed_forward = layer.mixer, layer.feed_forward
        assert isinstance(attention, AttentionSpec) and isinstance(feed_forward, GatedMLPSpec)
        mixer = replace(attention, scale=attention.scale * attention_in**2 * key)
        feed_forward = replace(feed_forward, factors=factors)
        layers.append(replace(layer, mixer=mixer, feed_forward=feed_forward, parallel_state_space=parallel_state_space))
    return replace(spec, layers=tuple(layers), state_group=state.state_group(tuple(range(len(layers)))))


def _falcon_h1_state_space(config: Config) -> StateSpaceSpec:
    inner = read_size(config, "mamba_d_ssm", 1024) if "mamba_d_ssm" not in config or config["mamba_d_ssm"] else None
    if inner is None:
        inner = read_size(config, "mamba_expand", 2, most=MAX_SIZE) * read_size(config, "hidden_size")
    shape = read_mamba_shape(config, inner, f"the {inner} of mamba_d_ssm or of mamba_expand times hidden_size")
    state_in = _factor(config, _STATE_IN)
    bias, out_bias = (read_flag(config, name) for name in _BIASES)
    if bias != out_bias or (bias and state_in != 1):
        raise LoadError(
            f"config.json: {' and '.join(_BIASES)} must be equal, and false where {_STATE_IN} is not 1: other values are "
            "not supported"
        )
    gates, values, keys, queries, steps = (state_in * one for one in _factors(config, "ssm_multipliers", 5))
    normed: Literal["gated", "before the gate"] | None = None
    if read_flag(config, "mamba_rms_norm"):
        normed = "before the gate" if read_flag(config, "mamba_norm_before_gate", default=True) else "gated"
    return StateSpaceSpec(
        *shape,
        read_number(config, "rms_norm_eps") or FALCON_H1.rules.rms_norm_eps,
        read_limits(config),
        bias,
        read_flag(config, "mamba_conv_bias", default=True),
        normed=normed,
        factors=None if {gates, values, keys, queries, steps} == {1.0} else (gates, values, keys, queries, steps),
    )


def _factor(config: Config, key: str) -> float:
    """Default 1."""
    factor = read_number(config, key) or 1.0
    if factor > _MAX_FACTOR:
        raise LoadError(
            f"config.json: {key} must be a positive number up to {_MAX_FACTOR:g}, got {format_value(factor)}"
        )
    return factor


def _factors(config: Config, key: str, count: int) -> tuple[float, ...]:
    """Default 1 each."""
    given = config.get(key)
    if given is None:
        return (1.0,) * count
    numbers = given if isinstance(given, list) else []
    if len(numbers) != count or not all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 < one <= _MAX_FACTOR for one in numbers
    ):
        raise LoadError(
            f"config.json: {key} must be a list of {count} positive numbers up to {_MAX_FACTOR:g}, got {format_value(given)}"
        )
    return tuple(map(float, numbers))


FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    title="Falcon H1",
    model_type="falcon_h1",
    rules=ConfigRules(Sizes(context=8192, kv_heads=8), rms_norm_eps=1e-5, eos_token_id=(2,)),
    biases=LLAMA_BIASES,
    multipliers=Multipliers(embedding=ConfigNumber("embedding_multiplier"), logits=ConfigNumber("lm_head_multiplier")),
    feed_forward_names=GatedMLPNames.under("feed_forward"),
    norms=LayerNorms(feed_forward="pre_ff_layernorm"),
    outer_names=OuterNames(final_norm="model.final_layernorm"),
    fixed_values={"hidden_act": ("silu", "swish"), "mamba_use_mlp": (True,), "attn_layer_indices": ([],)},
    refine=_refine,
    extra_keys=_READ,
)
