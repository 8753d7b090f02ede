"""GGUF architectures with recurrent layers: Qwen 3.5 and Qwen3-Next, Granite, Falcon H1, LFM2, Nemotron H.

Translates their metadata to config.json keys. A layer without KV heads is recurrent. llama.cpp stores the sizes of recurrent
layers under Mamba's keys: group count = key heads, time-step rank = value heads, inner size = total size of the value heads.
Falcon H1: llama.cpp's converter multiplies the weights by the family's factors and does not store the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.falcon import FALCON_H1
from windlass.engine.model.families.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED, STATE_SPACE
from windlass.engine.model.families.lfm2 import CONVOLUTION, LFM2, LFM2_MOE
from windlass.engine.model.families.nemotron_h import EXPERTS, FEED_FORWARD, NEMOTRON_H
from windlass.engine.model.families.qwen import LINEAR_ATTENTION, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from windlass.engine.model.gguf.architecture import (
    DENSE_BLOCKS,
    DENSE_WIDTH,
    EXPERT_COUNT,
    EXPERT_KEYS,
    EXPERT_WIDTH,
    EXPERTS_USED,
    GATING,
    SHARED_WIDTH,
    Architecture,
    ArchitectureKeys,
    check_sigmoid_gating,
    moe_config,
)
from windlass.engine.model.gguf.tensor_mapping import first_layer_has_bias
from windlass.engine.model.loading.gguf_index import GGUFLayout
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

KV_HEADS = "attention.head_count_kv"

_SSM_CONV, _SSM_STATE, _SSM_GROUPS, _SSM_HEADS, _SSM_INNER = SIZE_KEYS = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)

_INTERLEAVED = GGUFLayout(interleaved=True)


# -- Sizes and types of layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """heads: value heads of head_dim numbers. groups: key heads of state_dim numbers. width: of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int

    @property
    def values(self) -> int:
        """Total size of the value heads."""
        return self.heads * self.head_dim


def read_recurrent_sizes(keys: ArchitectureKeys) -> RecurrentSizes:
    """Raises LoadError if one is missing or the value heads do not divide their total size."""
    heads, inner = keys.size(_SSM_HEADS), keys.size(_SSM_INNER)
    if inner % heads:
        raise LoadError(f"{keys.key(_SSM_INNER)} {inner} is not a multiple of {keys.key(_SSM_HEADS)} {heads}")
    return RecurrentSizes(heads, inner // heads, keys.size(_SSM_GROUPS), keys.size(_SSM_STATE), keys.size(_SSM_CONV))


def mamba_keys(sizes: RecurrentSizes) -> dict[str, int]:
    """The sizes under the names of Granite 4 and Falcon H1."""
    return {
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.width,
    }


def attention_layers_only(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of the attention layers. count: number of layers."""
    return drop_zero_layers(keys, KV_HEADS, count)


def drop_zero_layers(keys: ArchitectureKeys, name: str, count: int) -> ArchitectureKeys:
    """The keys with only the positive entries of this one. Raises LoadError unless the list has `count` entries."""
    values = keys.raw(name)
    if not isinstance(values, list):
        return keys
    if len(values) != count:
        raise LoadError(f"{keys.key(name)} has {len(values)} entries for {count} layers: get another conversion")
    return keys.replaced({name: [one for one in values if one != 0] or None})


def layer_types_of(keys: ArchitectureKeys, count: int, recurrent: str) -> list[str]:
    """`layer_types` of config.json. recurrent: the family's name of recurrent layers."""
    heads = keys.raw(KV_HEADS)
    found = [recurrent if one == 0 else FULL_ATTENTION for one in heads] if isinstance(heads, list) else None
    return found or [FULL_ATTENTION] * count


def bias_flags(**names: str) -> Callable[[Mapping[str, TensorLocation]], dict[str, Any]]:
    """A reader of flags of config.json: whether any layer has the bias with this name. The first may be of another type."""
    return lambda tensors: {
        flag: any(tensor.endswith(f".{name}.bias") for tensor in tensors) for flag, name in names.items()
    }


# -- Qwen 3.5 and Qwen3-Next (Gated DeltaNet) -------------------------------------------------------------------------

_INTERVAL = "full_attention_interval"
_RECURRENT = "attention.recurrent_layers"  # in files from 2026 on, in addition to the interval

# rope.dimension_sections are positions of images; on text all sections have equal positions.
_DELTA_KEYS = (*SIZE_KEYS, _INTERVAL, _RECURRENT, "rope.dimension_sections")


def _gated_delta(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and layer types: full attention in every n-th layer, unless the file lists the layers."""
    sizes = read_recurrent_sizes(keys)
    return {
        "linear_conv_kernel_dim": sizes.width,
        "linear_key_head_dim": sizes.state_dim,
        "linear_num_key_heads": sizes.groups,
        "linear_num_value_heads": sizes.heads,
        "linear_value_head_dim": sizes.head_dim,
        "full_attention_interval": keys.size(_INTERVAL, 4),
        **_delta_layer_types(keys, config["num_hidden_layers"]),
    }


def _delta_layer_types(keys: ArchitectureKeys, layers: int) -> dict[str, list[str]]:
    """`layer_types` if the file has a flag for every block; the blocks after the layers are MTP heads."""
    recurrent = keys.raw(_RECURRENT)
    if recurrent is None:
        return {}
    blocks = keys.size("block_count")
    if not isinstance(recurrent, list) or len(recurrent) != blocks or any(one not in (0, 1) for one in recurrent):
        raise LoadError(
            f"{keys.key(_RECURRENT)} must have true or false for each of {blocks} blocks, got {format_value(recurrent)}"
        )
    return {"layer_types": [LINEAR_ATTENTION if one else FULL_ATTENTION for one in recurrent[:layers]]}


def _gated_delta_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp divides the experts' weights by their sum."""
    return {
        **_gated_delta(keys, config),
        **moe_config(keys),
        "shared_expert_intermediate_size": keys.count(SHARED_WIDTH),
        "norm_topk_prob": True,
    }


def _with_dense_width(keys: ArchitectureKeys, layers: int) -> ArchitectureKeys:
    """The keys with a width of dense feed-forwards, which no layer has, in case the file has none."""
    return keys.replaced({DENSE_WIDTH: keys.raw(DENSE_WIDTH) or keys.size(EXPERT_WIDTH)})


_GATED_DELTA = Architecture(
    QWEN3_5,
    GGUFLayout(norms_with_offset=True, values_in_turns=True),
    config_keys=_gated_delta,
    understood_keys=_DELTA_KEYS,
    aliases={"post_attention_norm": "ffn_norm"},
)

_GATED_DELTA_MOE = replace(
    _GATED_DELTA,
    family=QWEN3_5_MOE,
    config_keys=_gated_delta_moe,
    understood_keys=(*_DELTA_KEYS, *EXPERT_KEYS, SHARED_WIDTH),
    uniform_keys=_with_dense_width,
)


# -- Granite ----------------------------------------------------------------------------------------------------------

_SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_ROTATES = "rope.scaling.finetuned"  # llama.cpp's switch, of these architectures alone

# Files of Granite 4 have the sizes of recurrent layers even without such layers; their tensors are refused as unknown.
_GRANITE_KEYS = (*_SCALES, SHARED_WIDTH, *SIZE_KEYS)


def _multipliers(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "logits_scaling": keys.number("logit_scale"),
    }


def _granite(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """In Granite 4 the feed-forward has the width of a shared expert."""
    width = keys.count(SHARED_WIDTH) or config["intermediate_size"]
    return {**_multipliers(keys, config), "intermediate_size": width}


def _granite_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_multipliers(keys, config),
        "num_local_experts": keys.size(EXPERT_COUNT),
        "num_experts_per_tok": keys.size(EXPERTS_USED),
        "shared_intermediate_size": keys.count(SHARED_WIDTH) or None,
    }


def _granite_hybrid(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are recurrent."""
    sizes, hidden = read_recurrent_sizes(keys), config["hidden_size"]
    if sizes.values % hidden:
        raise LoadError(f"recurrent layers have {sizes.values} values, which is not a multiple of the model's {hidden}")
    dense = {**_multipliers(keys, config), "num_local_experts": 0}
    return {
        **(_granite_moe(keys, config) if keys.count(EXPERT_COUNT) else dense),
        "intermediate_size": keys.count(EXPERT_WIDTH) or config["intermediate_size"],
        "shared_intermediate_size": keys.count(SHARED_WIDTH) or config["intermediate_size"],
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], STATE_SPACE),
        "position_embedding_type": "nope" if keys.raw(_ROTATES) is False else "rope",
        "mamba_expand": sizes.values // hidden,
        **mamba_keys(sizes),
    }


def _granite_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """All layers have attention. Raises LoadError if llama.cpp would rotate none of them."""
    if keys.raw(_ROTATES) is False:
        raise LoadError(
            f"sets {keys.key(_ROTATES)}=false: no layer would rotate, and positions could not be distinguished, which is not "
            "supported: get another conversion"
        )
    return dict(rope)


_GRANITE = Architecture(GRANITE, _INTERLEAVED, config_keys=_granite, understood_keys=_GRANITE_KEYS, rope=_granite_rope)

_GRANITE_MOE = replace(
    _GRANITE,
    family=GRANITE_MOE,
    select_family=lambda keys: GRANITE_MOE_SHARED if keys.count(SHARED_WIDTH) else None,
    other_families=(GRANITE_MOE_SHARED,),
    config_keys=_granite_moe,
    understood_keys=(*_GRANITE_KEYS, *EXPERT_KEYS),
)

_GRANITE_HYBRID = Architecture(
    GRANITE4,
    replace(_INTERLEAVED, gates_apart=True),
    config_keys=_granite_hybrid,
    understood_keys=_GRANITE_MOE.understood_keys,
    from_tensors=bias_flags(attention_bias="attn_q", mamba_proj_bias="ssm_in", mamba_conv_bias="ssm_conv1d"),
    uniform_keys=attention_layers_only,
)


# -- Falcon H1 --------------------------------------------------------------------------------------------------------


def _falcon_h1(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises LoadError for a file whose weights may not have been multiplied."""
    if factors := sorted(name for name in keys.names() if name.endswith(("multiplier", "multipliers"))):
        raise LoadError(
            f"has {keys.key(factors[0])}, which does not show whether its weights have been multiplied by that: get a conversion "
            "by llama.cpp of July 2025 or later"
        )
    sizes = read_recurrent_sizes(keys)
    return {**mamba_keys(sizes), "mamba_d_ssm": sizes.values, "mamba_norm_before_gate": False}


def _falcon_h1_from_tensors(tensors: Mapping[str, TensorLocation]) -> dict[str, Any]:
    return {
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_conv_bias": first_layer_has_bias(tensors, "ssm_conv1d"),
    }


_FALCON_H1 = Architecture(
    FALCON_H1,
    GGUFLayout(factored=True),
    config_keys=_falcon_h1,
    understood_keys=SIZE_KEYS,
    from_tensors=_falcon_h1_from_tensors,
)


# -- LFM2 (short convolutions) ----------------------------------------------------------------------------------------

_CONV_WIDTH = "shortconv.l_cache"


def _lfm2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], CONVOLUTION),
        "conv_L_cache": keys.size(_CONV_WIDTH),
    }


def _lfm2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not contain that weights are divided by their sum and not multiplied; llama.cpp does so."""
    check_sigmoid_gating(keys)
    return {
        **_lfm2(keys, config),
        **moe_config(keys),
        "num_dense_layers": keys.count(DENSE_BLOCKS),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_LFM2 = Architecture(
    LFM2,
    config_keys=lambda keys, config: {**_lfm2(keys, config), "block_auto_adjust_ff_dim": False},
    understood_keys=(_CONV_WIDTH,),
    from_tensors=bias_flags(conv_bias="shortconv.in_proj"),
    uniform_keys=attention_layers_only,
)

_LFM2_MOE = replace(
    _LFM2,
    family=LFM2_MOE,
    config_keys=_lfm2_moe,
    understood_keys=(*EXPERT_KEYS, _CONV_WIDTH, DENSE_BLOCKS, GATING),
    from_tensors=bias_flags(conv_bias="shortconv.in_proj", use_expert_bias="exp_probs_b"),
)


# -- Nemotron H -------------------------------------------------------------------------------------------------------

_NORMED, _SCALE = "expert_weights_norm", "expert_weights_scale"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_LATENT = "moe_latent_size"


def _attention_and_feed_forward_layers(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of the attention layers and of the feed-forward layers. count: number of layers."""
    return drop_zero_layers(attention_layers_only(_without_mtp(keys, count), count), DENSE_WIDTH, count)


def _without_mtp(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys without the entries of blocks after the layers."""
    further = keys.count("nextn_predict_layers")
    lists = {name: value for name in (KV_HEADS, DENSE_WIDTH) if isinstance(value := keys.raw(name), list)}
    return keys.replaced({name: value[:count] for name, value in lists.items() if len(value) == count + further})


def _nemotron_h_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_sigmoid_gating(keys)
    if latent := keys.count(_LATENT):
        raise LoadError(
            f"{keys.key(_LATENT)} is {latent}: experts whose input is narrower than the model (Nemotron 3 Super and Ultra) are "
            "not supported"
        )
    normed, groups = keys.raw(_NORMED), keys.count(_GROUPS) or 1
    return {
        **_nemotron_h_layers(keys, config, EXPERTS),
        **moe_config(keys, experts="n_routed_experts"),
        "moe_shared_expert_intermediate_size": keys.size(SHARED_WIDTH),
        "norm_topk_prob": False if normed is None else normed,
        "routed_scaling_factor": keys.number(_SCALE) or 1.0,
        "n_group": groups,
        "topk_group": keys.size(_USED_GROUPS, 1 if groups == 1 else None),
    }


def _nemotron_h_layers(keys: ArchitectureKeys, config: Mapping[str, Any], feed_forward: str) -> dict[str, Any]:
    """Layer types and sizes of states. feed_forward: the name of layers that have a feed-forward width."""
    sizes = read_recurrent_sizes(keys)
    return {
        "layer_types": _nemotron_h_layer_types(keys, config["num_hidden_layers"], feed_forward),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_dim,
        "conv_kernel": sizes.width,
    }


def _nemotron_h_layer_types(keys: ArchitectureKeys, count: int, feed_forward: str) -> list[str]:
    keys = _without_mtp(keys, count)
    values = [keys.raw(name) for name in (KV_HEADS, DENSE_WIDTH)]
    by_layer = zip(*(one if isinstance(one, list) else [one] * count for one in values), strict=True)
    found = []
    for index, (heads, width) in enumerate(by_layer):
        if heads and width:
            raise LoadError(
                f"layer {index} has {keys.key(KV_HEADS)} and {keys.key(DENSE_WIDTH)}, but a layer of this architecture is either "
                "attention or feed-forward: get another conversion"
            )
        found.append(FULL_ATTENTION if heads else feed_forward if width else STATE_SPACE)
    return found


_NEMOTRON_H = Architecture(
    NEMOTRON_H,
    _INTERLEAVED,
    config_keys=lambda keys, config: _nemotron_h_layers(keys, config, FEED_FORWARD),
    understood_keys=SIZE_KEYS,
    from_tensors=bias_flags(mlp_bias="ffn_up", use_bias="ssm_in", use_conv_bias="ssm_conv1d"),
    rope_parameters=lambda keys, config, factors: {},
    uniform_keys=_attention_and_feed_forward_layers,
)

_NEMOTRON_H_MOE = replace(
    _NEMOTRON_H,
    config_keys=_nemotron_h_moe,
    understood_keys=(
        *(*SIZE_KEYS, *EXPERT_KEYS, GATING, SHARED_WIDTH, _NORMED, _SCALE, _GROUPS, _USED_GROUPS),
        "expert_shared_count",  # the number of shared experts, which are given as one width
    ),
)


HYBRID_ARCHITECTURES: dict[str, Architecture] = {
    "qwen35": _GATED_DELTA,
    "qwen35moe": _GATED_DELTA_MOE,
    "qwen3next": replace(_GATED_DELTA_MOE, family=QWEN3_NEXT, layout=GGUFLayout(norms_with_offset=True)),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": _GRANITE_HYBRID,
    "falcon-h1": _FALCON_H1,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H_MOE,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2_MOE,
}
