"""GGUF architectures with recurrent layers: Qwen 3.5 and Qwen3-Next, Granite, Falcon H1, LFM2, Nemotron H.

Translates their metadata to config.json keys. A layer without KV heads is recurrent. llama.cpp stores the sizes of recurrent
layers under Mamba's keys: group count = key heads, time-step rank = value heads, inner size = total size of the value heads.
Falcon H1: llama.cpp's converter multiplies the weights by the family's factors and does not store the factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.granite import GRANITE_MOE_SHARED, STATE_SPACE
from windlass.engine.model.families.lfm2 import CONVOLUTION
from windlass.engine.model.families.nemotron_h import EXPERTS, FEED_FORWARD
from windlass.engine.model.families.qwen import LINEAR_ATTENTION
from windlass.engine.model.gguf.gguf_rope import Factors
from windlass.engine.model.gguf.metadata_keys import ArchitectureKeys
from windlass.engine.model.gguf.tensor_mapping import GGUFTensorLocation, first_layer_has_bias
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

KV_HEADS = "attention.head_count_kv"

_SSM_CONV, _SSM_STATE, _SSM_GROUPS, _SSM_HEADS, _SSM_INNER = SIZE_KEYS = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """heads: of values, each of head_dim numbers. groups: heads of keys, each of state_dim. width: of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int

    @property
    def values(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim


def read_recurrent_sizes(keys: ArchitectureKeys) -> RecurrentSizes:
    """Raises LoadError where one is missing, or heads do not share the values."""
    heads, inner = keys.size(_SSM_HEADS), keys.size(_SSM_INNER)
    if inner % heads:
        raise LoadError(f"{keys.key(_SSM_INNER)} {inner} is not a multiple of {keys.key(_SSM_HEADS)} {heads}")
    return RecurrentSizes(heads, inner // heads, keys.size(_SSM_GROUPS), keys.size(_SSM_STATE), keys.size(_SSM_CONV))


def attention_layers_only(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend."""
    return drop_zero_layers(keys, KV_HEADS, count)


def drop_zero_layers(keys: ArchitectureKeys, name: str, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers have what this one counts. Raises LoadError unless all `count` layers are told."""
    values = keys.raw(name)
    if not isinstance(values, list):
        return keys
    if len(values) != count:
        raise LoadError(f"{keys.key(name)} has {len(values)} entries for {count} layers: get another conversion")
    return keys.replaced({name: [one for one in values if one != 0] or None})


def layer_types_of(keys: ArchitectureKeys, count: int, other: str) -> list[str]:
    """What `layer_types` says of each layer. other: what those are called that carry a state."""
    heads = keys.raw(KV_HEADS)
    found = [other if one == 0 else FULL_ATTENTION for one in heads] if isinstance(heads, list) else None
    return found or [FULL_ATTENTION] * count


def any_layer_has_bias(tensors: Mapping[str, GGUFTensorLocation], name: str) -> bool:
    """Whether any layer has this bias: the first may be of another kind."""
    return any(one.endswith(f".{name}.bias") for one in tensors)


_INTERVAL, _DENSE_WIDTH = "full_attention_interval", "feed_forward_length"

_RECURRENT = "attention.recurrent_layers"  # in files from 2026 on, beside the interval

_DELTA_COUNT, _DELTA_USED = "expert_count", "expert_used_count"

_DELTA_EXPERT_WIDTH, _DELTA_SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"

# Sections of a rotation tell apart how images lie, on text all positions are equal.
_DELTA_KEYS = (*SIZE_KEYS, _INTERVAL, _RECURRENT, "rope.dimension_sections")


def gated_delta(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes, and which layers attend: every n-th, unless the file says it layer by layer."""
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
    """What `layer_types` says, where the file tells of every block whether it carries a state; the last may predict further."""
    carries = keys.raw(_RECURRENT)
    if carries is None:
        return {}
    blocks = keys.size("block_count")
    if not isinstance(carries, list) or len(carries) != blocks or any(one not in (0, 1) for one in carries):
        raise LoadError(
            f"{keys.key(_RECURRENT)} must have true or false for each of {blocks} blocks, got {format_value(carries)}"
        )
    return {"layer_types": [LINEAR_ATTENTION if one else FULL_ATTENTION for one in carries[:layers]]}


def delta_with_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same and the sizes of experts, whose weights llama.cpp divides by their sum."""
    return {
        **gated_delta(keys, config),
        "num_experts": keys.size(_DELTA_COUNT),
        "num_experts_per_tok": keys.size(_DELTA_USED),
        "moe_intermediate_size": keys.size(_DELTA_EXPERT_WIDTH),
        "shared_expert_intermediate_size": keys.count(_DELTA_SHARED_WIDTH),
        "norm_topk_prob": True,
    }


def without_dense_layers(keys: ArchitectureKeys, layers: int) -> ArchitectureKeys:
    """The keys with a width of a feed-forward that no layer has, where the file has none."""
    return keys.replaced({_DENSE_WIDTH: keys.raw(_DENSE_WIDTH) or keys.size(_DELTA_EXPERT_WIDTH)})


# Fields of `Architecture`.
GATED_DELTA_FIELDS: dict[str, Any] = {
    "more": gated_delta,
    "reads": _DELTA_KEYS,
    "norms_with_offset": True,
    "aliases": {"post_attention_norm": "ffn_norm"},
}

GATED_DELTA_MOE_FIELDS = GATED_DELTA_FIELDS | {
    "more": delta_with_experts,
    "reads": (*_DELTA_KEYS, _DELTA_COUNT, _DELTA_USED, _DELTA_EXPERT_WIDTH, _DELTA_SHARED_WIDTH),
    "plain": without_dense_layers,
}

_COUNT, _USED = "expert_count", "expert_used_count"

_EXPERT_WIDTH, _SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"

_SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")

_ROTATES = "rope.scaling.finetuned"  # llama.cpp's switch, of these architectures alone

# Granite 4's files have sizes of layers with states whether or not there are any: tensors of theirs are refused as unknown.
_GRANITE_KEYS = (*_SCALES, _SHARED_WIDTH, *SIZE_KEYS)

_GRANITE_MOE_KEYS = (*_GRANITE_KEYS, _COUNT, _USED, _EXPERT_WIDTH)


def _multipliers(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "logits_scaling": keys.number("logit_scale"),
    }


def _granite(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Granite 4's have a feed-forward under a shared expert's name."""
    width = keys.count(_SHARED_WIDTH) or config["intermediate_size"]
    return {**_multipliers(keys, config), "intermediate_size": width}


def _with_shared_experts(keys: ArchitectureKeys) -> Family | None:
    return GRANITE_MOE_SHARED if keys.count(_SHARED_WIDTH) else None


def _granite_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_multipliers(keys, config),
        "num_local_experts": keys.size(_COUNT),
        "num_experts_per_tok": keys.size(_USED),
        "shared_intermediate_size": keys.count(_SHARED_WIDTH) or None,
    }


def _granite_hybrid(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys carry a state."""
    sizes, hidden = read_recurrent_sizes(keys), config["hidden_size"]
    if sizes.values % hidden:
        raise LoadError(f"layers with a state have {sizes.values} values, which is no multiple of the model's {hidden}")
    of_experts = (
        _granite_moe(keys, config) if keys.count(_COUNT) else {**_multipliers(keys, config), "num_local_experts": 0}
    )
    return {
        **of_experts,
        "intermediate_size": keys.count(_EXPERT_WIDTH) or config["intermediate_size"],
        "shared_intermediate_size": keys.count(_SHARED_WIDTH) or config["intermediate_size"],
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], STATE_SPACE),
        "position_embedding_type": "nope" if keys.raw(_ROTATES) is False else "rope",
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_expand": sizes.values // hidden,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.width,
    }


def _granite_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "attention_bias": any_layer_has_bias(tensors, "attn_q"),
        "mamba_proj_bias": any_layer_has_bias(tensors, "ssm_in"),
        "mamba_conv_bias": any_layer_has_bias(tensors, "ssm_conv1d"),
    }


def _granite_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """All layers attend. Raises LoadError where llama.cpp would rotate none of them."""
    if keys.raw(_ROTATES) is False:
        raise LoadError(
            f"sets {keys.key(_ROTATES)}=false, by which no layer rotates and nothing tells positions apart: that is not "
            "supported, get another conversion"
        )
    return dict(rope)


# Fields of `Architecture`.
GRANITE_FIELDS: dict[str, Any] = {"more": _granite, "reads": _GRANITE_KEYS, "rope": _granite_rope}

GRANITE_MOE_FIELDS: dict[str, Any] = {
    "more": _granite_moe,
    "reads": _GRANITE_MOE_KEYS,
    "choose": _with_shared_experts,
    "rope": _granite_rope,
}

GRANITE_HYBRID_FIELDS: dict[str, Any] = {
    "more": _granite_hybrid,
    "reads": _GRANITE_MOE_KEYS,
    "plain": attention_layers_only,
    "told_by": _granite_by_tensors,
}


def _falcon_h1(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises LoadError for a file whose weights may not have been multiplied."""
    if factors := sorted(name for name in keys.names() if name.endswith(("multiplier", "multipliers"))):
        raise LoadError(
            f"names {keys.key(factors[0])} and does not tell whether its weights have been multiplied by that: get a conversion "
            "by llama.cpp of July 2025 or later"
        )
    sizes = read_recurrent_sizes(keys)
    return {
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_ssm": sizes.values,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.width,
        "mamba_norm_before_gate": False,
    }


def _falcon_h1_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_conv_bias": first_layer_has_bias(tensors, "ssm_conv1d"),
    }


# Fields of `Architecture`.
FALCON_H1_FIELDS: dict[str, Any] = {"more": _falcon_h1, "reads": SIZE_KEYS, "told_by": _falcon_h1_by_tensors}

_CONV_WIDTH = "shortconv.l_cache"

_LFM2_EXPERTS, _LFM2_USED, _LFM2_EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"

_LFM2_DENSE, _LFM2_SCORES = "leading_dense_block_count", "expert_gating_func"

_LFM2_SIGMOID = 2  # llama.cpp's number

LFM2_KEYS = (_CONV_WIDTH,)

LFM2_MOE_KEYS = (_CONV_WIDTH, _LFM2_EXPERTS, _LFM2_USED, _LFM2_EXPERT_WIDTH, _LFM2_DENSE, _LFM2_SCORES)


def lfm2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_types_of(keys, config["num_hidden_layers"], CONVOLUTION),
        "conv_L_cache": keys.size(_CONV_WIDTH),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say that weights are divided by their sum and not multiplied; so llama.cpp does it."""
    scores = keys.raw(_LFM2_SCORES)
    if scores not in (None, _LFM2_SIGMOID):
        raise LoadError(
            f"{keys.key(_LFM2_SCORES)} is {format_value(scores)}: experts of LFM2 are chosen by sigmoids ({_LFM2_SIGMOID})"
        )
    found = lfm2(keys, config)
    del found["block_auto_adjust_ff_dim"]
    return {
        **found,
        "num_experts": keys.size(_LFM2_EXPERTS),
        "num_experts_per_tok": keys.size(_LFM2_USED),
        "moe_intermediate_size": keys.size(_LFM2_EXPERT_WIDTH),
        "num_dense_layers": keys.count(_LFM2_DENSE),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def lfm2_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """Whether projections and convolutions have biases."""
    return {"conv_bias": any_layer_has_bias(tensors, "shortconv.in_proj")}


def lfm2_moe_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """And whether experts are chosen by a bias beside their scores."""
    return {**lfm2_by_tensors(tensors), "use_expert_bias": any_layer_has_bias(tensors, "exp_probs_b")}


_FEED_FORWARD_WIDTH = "feed_forward_length"

_NEMOTRON_H_COUNT, _NEMOTRON_H_USED, _GATING = "expert_count", "expert_used_count", "expert_gating_func"

_NEMOTRON_H_EXPERT_WIDTH, _NEMOTRON_H_SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"

_NORMED, _SCALE = "expert_weights_norm", "expert_weights_scale"

_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"

_LATENT = "moe_latent_size"

_NEMOTRON_H_SIGMOID = 2  # llama.cpp's number, and what it takes where a file has none


def _with_both(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend and have a feed-forward."""
    return drop_zero_layers(attention_layers_only(_of_layers(keys, count), count), _FEED_FORWARD_WIDTH, count)


def _of_layers(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys without what is said of blocks behind the layers."""
    further = keys.count("nextn_predict_layers")
    lists = {name: value for name in (KV_HEADS, _FEED_FORWARD_WIDTH) if isinstance(value := keys.raw(name), list)}
    return keys.replaced({name: value[:count] for name, value in lists.items() if len(value) == count + further})


def _nemotron_h(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _nemotron_h_sizes(keys, config, FEED_FORWARD)


def _nemotron_h_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    scores, groups = keys.raw(_GATING), keys.count(_GROUPS) or 1
    if scores not in (None, _NEMOTRON_H_SIGMOID):
        raise LoadError(
            f"{keys.key(_GATING)} is {format_value(scores)}: these experts are chosen by sigmoids ({_NEMOTRON_H_SIGMOID})"
        )
    if latent := keys.count(_LATENT):
        raise LoadError(
            f"{keys.key(_LATENT)} is {latent}: experts that see less than the model's width (Nemotron 3 Super and Ultra) are not "
            "supported"
        )
    normed = keys.raw(_NORMED)
    return {
        **_nemotron_h_sizes(keys, config, EXPERTS),
        "n_routed_experts": keys.size(_NEMOTRON_H_COUNT),
        "num_experts_per_tok": keys.size(_NEMOTRON_H_USED),
        "moe_intermediate_size": keys.size(_NEMOTRON_H_EXPERT_WIDTH),
        "moe_shared_expert_intermediate_size": keys.size(_NEMOTRON_H_SHARED_WIDTH),
        "norm_topk_prob": False if normed is None else normed,
        "routed_scaling_factor": keys.number(_SCALE) or 1.0,
        "n_group": groups,
        "topk_group": keys.size(_USED_GROUPS, 1 if groups == 1 else None),
    }


def _nemotron_h_sizes(keys: ArchitectureKeys, config: Mapping[str, Any], feed_forward: str) -> dict[str, Any]:
    """The kinds of layers, and sizes of states. feed_forward: what those are called that have a width."""
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
    keys = _of_layers(keys, count)
    values = [keys.raw(name) for name in (KV_HEADS, _FEED_FORWARD_WIDTH)]
    of_layers = zip(*(one if isinstance(one, list) else [one] * count for one in values), strict=True)
    found = []
    for index, (heads, width) in enumerate(of_layers):
        if heads and width:
            raise LoadError(
                f"layer {index} has {keys.key(KV_HEADS)} and {keys.key(_FEED_FORWARD_WIDTH)}, and layers of this architecture are one part "
                "each: get another conversion"
            )
        found.append(FULL_ATTENTION if heads else feed_forward if width else STATE_SPACE)
    return found


def _nemotron_h_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {
        "mlp_bias": any_layer_has_bias(tensors, "ffn_up"),
        "use_bias": any_layer_has_bias(tensors, "ssm_in"),
        "use_conv_bias": any_layer_has_bias(tensors, "ssm_conv1d"),
    }


def _no_rotation(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    return {}


# Fields of `Architecture`.
NEMOTRON_H_FIELDS: dict[str, Any] = {
    "more": _nemotron_h,
    "reads": SIZE_KEYS,
    "told_by": _nemotron_h_by_tensors,
    "rotation": _no_rotation,
    "plain": _with_both,
}

NEMOTRON_H_MOE_FIELDS: dict[str, Any] = NEMOTRON_H_FIELDS | {
    "more": _nemotron_h_moe,
    "reads": (
        *SIZE_KEYS,
        *(
            _NEMOTRON_H_COUNT,
            _NEMOTRON_H_USED,
            _GATING,
            _NEMOTRON_H_EXPERT_WIDTH,
            _NEMOTRON_H_SHARED_WIDTH,
            _NORMED,
            _SCALE,
            _GROUPS,
            _USED_GROUPS,
        ),
        "expert_shared_count",  # how many make the width that is told
    ),
}
