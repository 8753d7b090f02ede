"""MTP layers (multi-token prediction) in a model's files, by family.

Such a layer combines the model's hidden state of a token, after the final norm, with the embedding of the next token,
and predicts the token after that. Embedding and head are the model's. Its output, after its own norm, replaces the
hidden state for the next step. This matches vLLM 0.33, SGLang 0.5.23 and llama.cpp (2026-10), except that vLLM takes
the output of GLM's layers before that norm. If there are several layers, the first one predicts every token.

vLLM sets the embedding in a text's first row to zero for many of them, SGLang for ERNIE 4.5; llama.cpp, FastDeploy and
this code do not.

Some files hold copies of the embedding and the head for the layer. They are ignored: if they differ from the model's,
as after finetuning only the model, proposals get worse and answers stay the same.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.families.moe_rules import read_count
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.model_spec import LayerSpec, ModelSpec, OuterNames
from windlass.engine.model.mtp_input import MTPInputSpec


def mtp_spec(
    spec: ModelSpec, layer: LayerSpec, names: OuterNames, mtp_input: MTPInputSpec, own: tuple[str, ...]
) -> ModelSpec:
    """Specification of the MTP layer of a model with this spec.

    layer: an attention layer of the model that it resembles. names: of the tensors around it. own: name prefixes of its
    tensors.
    """
    (group,) = spec.kv_groups
    return replace(
        spec,
        layers=(layer,),
        kv_groups=(replace(group, layers=(0,)),),
        state_group=None,
        tied_embeddings=False,
        names=names,
        unused_tensors=(),
        notices=(),
        mtp_input=mtp_input,
        own_tensors=own,
    )


def _reference_layer(spec: ModelSpec) -> LayerSpec:
    """The last attention layer, with experts if the model has any."""
    attending = [spec.layers[index] for index in spec.attention]
    of_experts = (layer for layer in reversed(spec.layers) if isinstance(layer.feed_forward, MoESpec))
    last = next(of_experts, attending[-1])
    return replace(attending[-1], feed_forward=last.feed_forward)


def qwen_mtp(spec: ModelSpec) -> ModelSpec:
    """MTP layer of Qwen 3.5 and Qwen3-Next: an attention layer under its own names."""
    own = "mtp."
    mtp_input = MTPInputSpec(f"{own}pre_fc_norm_embedding", f"{own}pre_fc_norm_hidden", f"{own}fc")
    names = replace(spec.names, layers=f"{own}layers", final_norm=f"{own}norm")
    layer = _reference_layer(spec)
    return mtp_spec(
        spec, layer, names, mtp_input, (f"{own}layers.0.", f"{own}norm.", f"{own}fc.", f"{own}pre_fc_norm_")
    )


def with_appended_mtp_layer(spec: ModelSpec, config: Config) -> ModelSpec:
    """Add the MTP layer of DeepSeek V3 and similar models: one more layer after the last one, with experts."""
    if not _has_mtp_layer(config):
        return spec
    first = spec.names.layer(len(spec.layers))
    mtp_input = MTPInputSpec(f"{first}enorm", f"{first}hnorm", f"{first}eh_proj")
    names = replace(spec.names, final_norm=f"{first}shared_head.norm", first_layer=len(spec.layers))
    layer = mtp_spec(spec, _reference_layer(spec), names, mtp_input, (first,))
    return replace(spec, mtp=replace(layer, unused_tensors=(f"{first}embed_tokens.", f"{first}shared_head.head.")))


def with_dense_mtp_layer(spec: ModelSpec, config: Config) -> ModelSpec:
    """Add the MTP layer of ERNIE 4.5 MoE: a dense layer before the model's final norm.

    This follows FastDeploy, the server of its publisher (ernie4_5_mtp.py); vLLM and SGLang have no norm there.
    """
    dense = next((layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, GatedMLPSpec)), None)
    if not _has_mtp_layer(config) or dense is None:
        return spec
    block, *mtp_input = (f"model.mtp_{name}.0" for name in ("block", "emb_norm", "hidden_norm", "linear_proj"))
    names = replace(spec.names, layers="model.mtp_block")
    own = tuple(f"{name}." for name in (block, *mtp_input, spec.names.final_norm))
    layer = replace(_reference_layer(spec), feed_forward=dense)
    return replace(spec, mtp=mtp_spec(spec, layer, names, MTPInputSpec(*mtp_input), own))


def nemotron_mtp(spec: ModelSpec) -> ModelSpec | None:
    """MTP layers of Nemotron 3: one of attention only and one of experts only, under their own names; None if the model
    lacks either kind."""
    experts = next((layer for layer in reversed(spec.layers) if isinstance(layer.feed_forward, MoESpec)), None)
    if experts is None or not spec.attention:
        return None
    attends, first, last = spec.layers[max(spec.attention)], "mtp.layers.0.", "mtp.layers.1."
    mtp_input = MTPInputSpec(f"{first}enorm", f"{first}hnorm", f"{first}eh_proj")
    names = replace(spec.names, layers="mtp.layers", final_norm=f"{last}final_layernorm")
    return replace(mtp_spec(spec, attends, names, mtp_input, (first, last)), layers=(attends, experts))


def _has_mtp_layer(config: Config) -> bool:
    """Whether config.json declares MTP layers."""
    return read_count(config, "num_nextn_predict_layers", 0) > 0
