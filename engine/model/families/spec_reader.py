"""Reader from config.json to the ModelSpec of its family. It rejects what it does not understand.

It finds the family and assembles the specification. It contains no family-specific code, opens no file and imports no
torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.classification_head import ClassificationHeadSpec, HeadActivation
from windlass.engine.model.config_json.classifier_head import has_classifier_tokens, read_classifier
from windlass.engine.model.config_json.config_rules import Config, read_flag, read_number, read_size
from windlass.engine.model.config_json.rotary_layout import RotaryLayout, read_rotary_layout, scaled_length_notices
from windlass.engine.model.config_json.unsupported import (
    check_unsupported_keys,
    describe_architecture,
    describe_draft_head,
    describe_quantized,
    unknown_key_notices,
)
from windlass.engine.model.families.family import (
    ConfigNumber,
    Family,
    LatentSizes,
    Multipliers,
    is_set,
    reject_unsupported_values,
)
from windlass.engine.model.families.moe_rules import read_count, read_experts
from windlass.engine.model.families.multimodal import text_config_of
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.feed_forward.mlp import Activation, MLPSpec, mlp_spec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.latent_attention import LatentSpec
from windlass.engine.model.model_spec import FeedForwardSpec, LayerSpec, ModelSpec
from windlass.engine.rotary.rope_scaling import RotaryGroup
from windlass.engine.rotary.scaling_fields import format_value

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}

_WITHOUT_HEAD = (
    "this model was saved without its language-model head: it makes vectors and does not generate text; set "
    '"tie_word_embeddings": true in config.json if its head is the embedding'
)

# Source of position information in models that do not rotate.
_UNROTATED = {
    "learned": "its positions are rows of a table that was learned",
    "alibi": "its scores lose by the distance of their keys (ALiBi)",
    "states": "its recurrent layers encode positions",
}


def read_spec(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """Spec of the model that config.json describes. Raises LoadError with one line that names what is not supported."""
    family, architecture = _family_of_architecture(config)
    if config.get("model_type", family.model_type) not in (family.model_type, *family.other_model_types):
        raise LoadError(
            f"config.json names architecture {family.architecture} and model_type {format_value(config['model_type'])}, which "
            f"do not belong together: {family.architecture} is {family.model_type!r}"
        )
    config = family.rules.rewrite(config)
    family = _adapted_family(family, config)
    quantized = describe_quantized(config)
    if quantized is not None:
        raise LoadError(quantized)
    multipliers = family.multipliers
    check_unsupported_keys(config, family.own_keys | (frozenset() if family.causal else {"is_causal"}))
    layout = read_rotary_layout({**config, "model_type": family.model_type}, family.rules)
    if not family.causal:
        layout = layout.with_own_distances("whose tokens see those behind them too")
    if (unrotated := _UNROTATED.get(family.positions)) is not None:
        layout = layout.without_rotation(unrotated)
    if family.qk_norm == "after" and family.qk_norm_form.weight:
        layout = layout.with_own_distances("whose queries and keys are normed after the rotation")
    layers, kv_groups = _layers(config, family, layout)
    hidden = read_size(config, "hidden_size")
    # Instead of scaling the outputs of parts by r, the hidden state is scaled by 1 / r, which the norms remove.
    residual = _residual(config, multipliers, len(layers))
    embedding_scale = float(hidden) ** 0.5 if family.scaled_embeddings else _multiplier(config, multipliers.embedding)
    caps, head = family.soft_caps, _head(config, family, architecture)
    vocab_size = read_size(config, "vocab_size")
    ends, unknown_ends = _eos(config, generation_config or {}, family, vocab_size)
    generates = family.causal and architecture in family.names
    without_head = (_WITHOUT_HEAD,) if family.causal and head is None and not generates else ()
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        rotary_groups=layout.groups,
        kv_groups=kv_groups,
        trained_len=layout.groups[0].base.trained_len,
        norm_eps=_norm_eps(config, family) / residual**2,
        norm_offset=family.norm_offset,
        embedding_scale=embedding_scale / residual,
        tied_embeddings=read_flag(config, "tie_word_embeddings", family.rules.tie_word_embeddings),
        head_copies_embedding=read_flag(config, "head_copies_embedding"),
        logit_soft_cap=None if caps is None else _soft_cap(config, "final_logit_softcapping", caps.logits),
        logit_scale=_multiplier(config, multipliers.logits)
        / _multiplier(config, multipliers.logits_divided_by)
        * _base_width(config, multipliers, hidden)
        / hidden,
        norm=family.norms.form,
        head_bias=is_set(config, family.head_bias),
        embedding_norm=family.embedding_norm,
        positions=layout.groups[0].base.trained_len if family.positions == "learned" else 0,
        token_types=read_size(config, "type_vocab_size", 2) if family.token_types else 0,
        unit_head=family.unit_head,
        names=family.outer_names,
        eos_token_ids=ends,
        temperature=layout.temperature,
        unrotated_temperature=None if family.unrotated_temperature is None else family.unrotated_temperature(config),
        head=head,
        generates=generates,
        unused_tensors=_unused_tensors(config, family, len(layers)) + (family.unused_heads if head is None else ()),
        notices=without_head
        + unknown_ends
        + unknown_key_notices(config, family.own_keys)
        + scaled_length_notices(layout),
    )
    return spec if family.refine is None else family.refine(spec, config)


def read_rotary_groups(config: Config) -> tuple[RotaryGroup, ...]:
    """Rotary groups of a config.json that needs to contain only its `model_type`. Raises LoadError."""
    return read_layout(config).groups


def read_layout(config: Config) -> RotaryLayout:
    """Rotary groups and pattern of layers. Raises LoadError."""
    config = text_config_of(config).config
    family = _family_of_model_type(config)
    config = family.rules.rewrite(config)
    family = _adapted_family(family, config)
    if (unrotated := _UNROTATED.get(family.positions)) is not None:
        raise LoadError(f"config.json: this model of model_type {family.model_type!r} does not rotate: {unrotated}")
    return read_rotary_layout(config, family.rules)


def _family_of_architecture(config: Config) -> tuple[Family, str]:
    """The family, and its name for the model's architecture."""
    if (draft_head := describe_draft_head(config)) is not None:
        raise LoadError(draft_head)
    named = config.get("architectures")
    found = named[0] if isinstance(named, list) and named else named
    if found is None:
        raise LoadError('config.json names no architecture: add a line such as "architectures": ["LlamaForCausalLM"]')
    architecture = str(found)
    family = next((one for one in FAMILIES if architecture in (*one.names, one.classifier, one.token_classifier)), None)
    if family is not None and family.causal and architecture == family.classifier and has_classifier_tokens(config):
        return family, family.architecture  # its head consists of two rows of the language-model head
    headless = next((family for family in FAMILIES if architecture == family.headless), None)
    if family is None and headless is not None:
        tied = read_flag(config, "tie_word_embeddings", headless.rules.tie_word_embeddings)
        return headless, headless.architecture if tied else headless.headless  # a tied head needs no tensor
    if family is None:
        kind = describe_architecture(architecture, config)
        what = f"{kind}, which" if kind is not None and "," not in kind else f"{kind} and" if kind else ""
        raise LoadError(
            f"architecture {format_value(architecture)} in config.json is {f'{what} is ' if what else ''}not supported: "
            f"use one of {', '.join(sorted(family.architecture for family in FAMILIES))}"
        )
    return family, architecture if architecture in (family.classifier, family.token_classifier) else family.architecture


def _adapted_family(family: Family, config: Config) -> Family:
    """The family adapted to config.json. Raises LoadError for values that would make it another model."""
    reject_unsupported_values(config, family.fixed_values)
    if family.qk_norm_flag is not None and not is_set(config, family.qk_norm_flag):
        family = replace(family, qk_norm=None)
    return family if family.variant is None else family.variant(family, config)


def _head(config: Config, family: Family, architecture: str) -> ClassificationHeadSpec | None:
    """Classification head, if the architecture has one. Raises LoadError."""
    if architecture not in (family.classifier, family.token_classifier):
        return None
    per_token = architecture == family.token_classifier
    own = family.token_head if per_token else family.text_head
    pooling = own.pooling
    if own.pooling_key is not None and config.get(own.pooling_key) is not None:
        given = config[own.pooling_key]
        if given not in own.poolings:
            known = ", ".join(own.poolings)
            raise LoadError(
                f"config.json: {own.pooling_key} {format_value(given)} is not supported: use one of {known}"
            )
        pooling = own.poolings[given]
    name = (None if own.activation_key is None else config.get(own.activation_key)) or own.activation
    activation = name if name in ("relu", "tanh") else _ACTIVATIONS.get(name)
    if activation is None or activation in ("relu2", "xielu"):
        raise LoadError(f"config.json: activation {format_value(name)} of the classification head is not supported")
    return ClassificationHeadSpec(
        classes=read_classifier(config, per_token=per_token),
        names=own.names,
        pooling=pooling,
        out_bias=is_set(config, own.out_bias),
        dense_bias=is_set(config, own.dense_bias),
        activation=cast(HeadActivation, activation),
        norm_form=family.norms.form,
    )


def _family_of_model_type(config: Config) -> Family:
    model_type = config.get("model_type")
    family = next((family for family in FAMILIES if model_type in (family.model_type, *family.other_model_types)), None)
    if family is None:
        raise LoadError(
            f"config.json: model_type {format_value(model_type)} is not supported: use one of "
            f"{', '.join(family.model_type for family in FAMILIES)}"
        )
    return family


def _layers(
    config: Config, family: Family, layout: RotaryLayout
) -> tuple[tuple[LayerSpec, ...], tuple[KVGroupSpec, ...]]:
    hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    read_size(config, "num_hidden_layers")  # required, although the rotation has a default
    kv_heads = read_size(config, "num_key_value_heads", family.rules.sizes.kv_heads or heads)
    dim = layout.groups[0].base.head_dim
    if heads % kv_heads:
        raise LoadError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and dim == hidden // heads and hidden % heads and family.latent is None:
        raise LoadError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim"
        )
    latent = None if family.latent is None else read_latent(config, family, family.latent, layout)
    scaled_by: float = dim
    if family.query_pre_attn_scalar is not None:
        scaled_by = read_number(config, "query_pre_attn_scalar") or family.query_pre_attn_scalar
    scale = scaled_by**-0.5
    if family.multipliers.attention is not None:
        scale = family.multipliers.attention.read(config)
    caps, norms = family.soft_caps, family.norms
    if family.parallel is not None and family.parallel_norms is not None and is_set(config, family.parallel):
        norms = family.parallel_norms
    windows = list(dict.fromkeys(layer.window for layer in layout.layers))
    layers = tuple(
        LayerSpec(
            mixer=replace(latent, rotary_group=group)
            if latent is not None
            else AttentionSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                scale=scale,
                rotary_group=group,
                kv_group=windows.index(layer.window) if family.causal else 0,
                window=layer.window,
                soft_cap=None if caps is None else _soft_cap(config, "attn_logit_softcapping", caps.attention),
                qkv_bias=is_set(config, family.biases.qkv),
                out_bias=is_set(config, family.biases.out),
                qk_norm=None if family.norms_rotated and group is None else family.qk_norm,
                qk_norm_form=family.qk_norm_form,
                clip=None if family.clip_key is None else read_number(config, family.clip_key),
                interleaved_dims=layout.groups[group].base.rotary_dim
                if is_set(config, family.interleaved) and group is not None
                else 0,
                swapped_dims=layout.groups[group].base.rotary_dim if family.swapped and group is not None else 0,
                names=family.attention_names,
                sinks=family.sinks,
                causal=family.causal,
                alibi=0.0 if family.positions != "alibi" else scale if family.scaled_alibi else 1.0,
                chunked=family.chunked and layer.window is not None,
            ),
            feed_forward=feed_forward,
            norms=norms if index or family.first_norms is None else family.first_norms,
        )
        for index, (layer, group, feed_forward) in enumerate(
            zip(layout.layers, layout.layer_groups, _feed_forwards(config, family, len(layout.layers)), strict=True)
        )
    )
    if latent is not None:
        return layers, (KVGroupSpec(tuple(range(len(layers))), 1, latent.cached_dim, None, value_dim=0),)
    if not family.causal:  # keys of a text exist for one step only, so windows save no memory
        return layers, (KVGroupSpec(tuple(range(len(layers))), kv_heads, dim, None),)
    kv_groups = tuple(
        KVGroupSpec(tuple(i for i, layer in enumerate(layout.layers) if layer.window == window), kv_heads, dim, window)
        for window in windows
    )
    return layers, kv_groups


def _feed_forwards(config: Config, family: Family, count: int) -> list[FeedForwardSpec]:
    """Feed-forward of each layer."""
    activation, bias = _activation(config, family), is_set(config, family.biases.feed_forward)
    rules = family.experts
    if rules is None:
        return [_dense(config, family, activation, bias)] * count
    dense = [rules.dense(config, index) for index in range(count)]
    experts = read_experts(config, rules, activation, bias)
    other = _dense(config, family, activation, bias) if any(dense) else experts
    return [other if one else experts for one in dense]


def _dense(config: Config, family: Family, activation: Activation, bias: bool) -> MLPSpec:
    factor, names = family.rules.intermediate_factor, family.feed_forward_names
    hidden = read_size(config, "hidden_size")
    width = read_size(config, "intermediate_size", None if factor is None else factor * hidden)
    return mlp_spec(width, activation, bias, names)


def _unused_tensors(config: Config, family: Family, layers: int) -> tuple[str, ...]:
    further = read_count(config, "num_nextn_predict_layers", 0)
    return family.unused_tensors + tuple(f"{family.outer_names.layers}.{layers + i}." for i in range(min(further, 64)))


def _norm_eps(config: Config, family: Family) -> float:
    given = None if family.norm_eps_key is None else read_number(config, family.norm_eps_key)
    return given or family.rules.rms_norm_eps


def _multiplier(config: Config, number: ConfigNumber | None) -> float:
    return 1.0 if number is None else number.read(config)


def _is_ignored(config: Config, number: ConfigNumber) -> bool:
    return number.key in config and config[number.key] is None


def _residual(config: Config, multipliers: Multipliers, layers: int) -> float:
    """Factor of the outputs of a layer's parts."""
    found, depth = _multiplier(config, multipliers.residual), multipliers.depth
    return found if depth is None or _is_ignored(config, depth) else found * depth.read(config) / math.sqrt(layers)


def _base_width(config: Config, multipliers: Multipliers, hidden: int) -> float:
    """Width at which the logits are not scaled."""
    width = multipliers.base_width
    return float(hidden) if width is None or _is_ignored(config, width) else width.read(config)


def _soft_cap(config: Config, key: str, default: float | None) -> float | None:
    """None: no soft cap, also if config.json has null."""
    return read_number(config, key) if key in config else default


def _activation(config: Config, family: Family) -> Activation:
    name = config.get(family.activation_key) or family.activation
    if name == "gelu" and family.gelu_by_tanh:
        name = "gelu_pytorch_tanh"
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise LoadError(
            f"config.json: activation {format_value(name)} is not supported: use one of {', '.join(_ACTIVATIONS)}"
        )
    return activation


def _eos(
    config: Config, generation_config: Config, family: Family, vocab_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids that end an answer, and notices about ids outside the vocabulary."""
    value = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise LoadError(
            f"config.json or generation_config.json: eos_token_id must be token ids, got {format_value(value)}"
        )
    known = tuple(i for i in ids if 0 <= i < vocab_size)
    notices = (f"eos_token_id {format_value(value)}: ids outside the vocabulary of {vocab_size} tokens are ignored",)
    usual = tuple(i for i in family.rules.eos_token_id if i < vocab_size)
    return known or usual, notices if len(known) < len(ids) else ()


def read_latent(config: Config, family: Family, sizes: LatentSizes, layout: RotaryLayout) -> LatentSpec:
    """Latent attention of the first rotary group, the same for all layers. Raises LoadError."""
    base = layout.groups[0].base
    heads, hidden = read_size(config, "num_attention_heads"), read_size(config, "hidden_size")
    if read_size(config, "num_key_value_heads", heads) != heads:
        raise LoadError(
            "config.json: num_key_value_heads differs from num_attention_heads; with latent attention they must be equal"
        )
    if base.rotary_dim != base.head_dim:
        raise LoadError(
            "config.json: partial_rotary_factor must be 1 with latent attention: qk_rope_head_dim sets the rotated dimensions"
        )
    if len(layout.groups) > 1 or any(layer.window is not None for layer in layout.layers):
        raise LoadError(
            "config.json: windows and layers that rotate in several ways are not supported with latent attention"
        )
    plain = read_size(config, "qk_nope_head_dim", sizes.qk_nope_head_dim)
    without_rank = sizes.q_lora_rank is None or ("q_lora_rank" in config and config["q_lora_rank"] is None)
    return LatentSpec(
        num_heads=heads,
        latent_dim=read_size(config, "kv_lora_rank", sizes.kv_lora_rank),
        rotary_dim=base.rotary_dim,
        plain_dim=plain,
        value_dim=read_size(config, "v_head_dim", sizes.v_head_dim or hidden // heads),
        scale=float(plain + base.rotary_dim) ** -0.5,
        query_rank=None if without_rank else read_size(config, "q_lora_rank", sizes.q_lora_rank),
        bias=is_set(config, family.biases.out),
        interleaved=is_set(config, family.interleaved),
    )
