"""Mapping of GGUF tensors to the names and shapes of a Hugging Face checkpoint.

Checks that the tensors are exactly those of the model's spec. Fused tensors that the family stores separately are cut into
rows. The MTP block behind the layers (llama.cpp's `NEXTN_*` tensors) is a layer with additional tensors; whether it is complete
is checked when it is loaded, since the model works without it. Reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.families.family import Family
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.gguf.gguf_rope import FACTOR_TENSORS
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.gated_delta_net import GatedDeltaNetNames
from windlass.engine.model.mixers.latent_attention import LatentNames, LatentSpec
from windlass.engine.model.mixers.short_convolution import ShortConvolutionNames
from windlass.engine.model.mixers.state_space import StateSpaceNames
from windlass.engine.model.model_spec import LayerSpec, ModelSpec
from windlass.engine.rotary.scaling_fields import format_key

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LAYER_TABLE = "per_layer_token_embd.weight"
_MISNAMED = "model.embedding_norm"  # the final norm of LFM2 is named so in its checkpoints, and similarly in GGUF files

# Inputs of the layers (per-layer embeddings): GGUF names, and names of weights in a spec.
_LAYER_INPUTS = {
    LAYER_TABLE: "layer_inputs_table",
    "per_layer_model_proj.weight": "layer_inputs",
    "per_layer_proj_norm.weight": "layer_inputs_norm",
}

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([\w.]+)\.(weight|bias|scale)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)(?:\.(\d{1,4})|_(exps|shexp))|ffn_(gate_up)_exps")

# Tensors whose checkpoint names have no ".weight".
_BARE = (
    *("attn_sinks", "exp_probs_b", "layer_output_scale", "ffn_gate_inp.scale", "ffn_down_exps.scale"),
    *("ssm_a", "ssm_d", "ssm_dt"),
)

# Those without ".weight" in GGUF files too, ssm_dt in those of some writers.
_WITHOUT_ENDING = (".ssm_a", ".ssm_d", ".ssm_dt")

_OF_HEADS = ("attn_k_b", "attn_v_b")  # of latent attention: all heads in one tensor
_UNUSED = ("attn_rot_embd", "rope_freqs")  # unscaled frequencies, in each layer of old files


def first_layer_has_bias(tensors: Mapping[str, TensorLocation], *names: str) -> bool:
    return any(f"blk.0.{name}.bias" in tensors for name in names)


def map_tensors(
    tensors: Mapping[str, TensorLocation], family: Family, spec: ModelSpec, aliases: Mapping[str, str]
) -> dict[str, TensorLocation]:
    """The tensors of the spec by their names in a checkpoint.

    tensors: of all files, by GGUF name. aliases: see `Architecture`; they apply if a layer has all of them. Raises LoadError
    for a tensor that is missing or has another shape, and for one that the decoder does not use, since the file would then
    describe another model.
    """
    found: dict[str, TensorLocation] = {}
    names = spec.names
    outer = {"token_embd": names.embedding, "output_norm": names.final_norm or "", "output": names.head}
    if names.final_norm == _MISNAMED:
        outer["token_embd_norm"] = names.final_norm
    outer = {f"{name}.{suffix}": f"{known}.{suffix}" for name, known in outer.items() for suffix in ("weight", "bias")}
    stored = {weight.name: weight.stored[0].name for weight in spec.outer_weights()}
    outer |= {name: stored[own] for name, own in _LAYER_INPUTS.items() if own in stored}
    layer_names = layer_tensor_names(tensors, family, spec, aliases)
    for name, tensor in tensors.items():
        if name in FACTOR_TENSORS:
            continue
        renamed: Iterable[tuple[str, TensorLocation]]
        if name in outer:
            renamed = [(outer[name], tensor)]
        elif (index := _in_block(name)[0]) < len(spec.layers):
            renamed = map_layer_tensor(tensor, spec, index, layer_names, family)
        else:  # the MTP head, see `map_mtp_block`
            continue
        for new, part in renamed:
            if new.startswith(spec.unused_tensors):
                continue
            if new in found:
                raise LoadError(f"tensor {format_key(name)} appears under another name as well")
            found[new] = part
    return _in_spec_order(found, spec)


def layer_tensor_names(
    tensors: Mapping[str, TensorLocation], family: Family, spec: ModelSpec, aliases: Mapping[str, str]
) -> dict[str, str]:
    """Names of the tensors of a layer: llama.cpp's to this model's. tensors, aliases: as in `map_tensors`."""
    names = _layer_names(family, spec)
    if aliases and all(f"blk.0.{name}.weight" in tensors for name in aliases):
        names |= {name: names[known] for name, known in aliases.items()}
    return names


def _layer_names(family: Family, spec: ModelSpec) -> dict[str, str]:
    attention, norms = family.attention_names, spec.layers[0].norms
    dense = (layer.feed_forward for layer in spec.layers if not isinstance(layer.feed_forward, MoESpec))
    first = next(dense, None)
    feed_forward = family.feed_forward_names if first is None else first.names
    names: dict[str, str | None] = {
        "attn_norm": norms.mixer,
        "ffn_norm": norms.feed_forward,
        "post_attention_norm": norms.mixer_output,
        "post_ffw_norm": norms.feed_forward_output,
        "attn_q": attention.q,
        "attn_k": attention.k,
        "attn_v": attention.v,
        "attn_output": attention.out,
        "ffn_up": feed_forward.up,
        "ffn_down": feed_forward.down,
    }
    if isinstance(feed_forward, GatedMLPNames):
        names |= {"ffn_gate": feed_forward.gate, "ffn_up": feed_forward.gate_up or feed_forward.up}
    mixer = next(iter(spec.attention.values()))
    if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None:
        names |= {"attn_q_norm": attention.q_norm, "attn_k_norm": attention.k_norm}
    if isinstance(mixer, AttentionSpec) and mixer.sinks:
        names["attn_sinks"] = attention.sinks
    names["attn_qkv"] = attention.qkv
    for layer in spec.layers:
        parallel = layer.parallel_state_space
        for part in (layer.mixer, None if parallel is None else parallel.state_space):
            names |= {} if part is None else _mixer_names(part.names)
    names |= _family_part_names(spec.layers[0])
    return {name: known for name, known in names.items() if known is not None}


def _family_part_names(layer: LayerSpec) -> dict[str, str]:
    """Names of parts that only some families have."""
    names: dict[str, str] = {}
    if layer.per_layer_projection is not None:
        names |= {
            "inp_gate": layer.per_layer_projection.gate,
            "proj": layer.per_layer_projection.out,
            "post_norm": layer.per_layer_projection.norm,
        }
    if layer.parallel_experts is not None:
        names |= {
            "post_ffw_norm_1": layer.parallel_experts.dense_norm,
            "pre_ffw_norm_2": layer.parallel_experts.norm,
            "post_ffw_norm_2": layer.parallel_experts.output_norm,
            "ffn_gate_inp.scale": layer.parallel_experts.router_scale,
            "ffn_down_exps.scale": layer.parallel_experts.expert_scale,
        }
    return names if layer.output_scale is None else {**names, "layer_output_scale": layer.output_scale}


def _mixer_names(own: object) -> dict[str, str | None]:
    """Names of the tensors of a mixer that is not attention. own: the mixer's names in a checkpoint."""
    if isinstance(own, LatentNames):
        return {
            "attn_q": own.q,
            "attn_q_a": own.q_down,
            "attn_q_a_norm": own.q_norm,
            "attn_q_b": own.q_up,
            "attn_kv_a_mqa": own.kv_down,
            "attn_kv_a_norm": own.kv_norm,
            "attn_kv_b": own.kv_up,
            "attn_k_b": own.k_up,
            "attn_v_b": own.v_up,
            "attn_output": own.out,
        }
    if isinstance(own, GatedDeltaNetNames):
        joined: dict[str, str | None] = (
            {"ssm_beta": own.strength, "ssm_alpha": own.decay} if own.ba is None else {"ssm_ba": own.ba}
        )
        return joined | {
            "attn_qkv": own.qkv,
            "attn_gate": own.gate,
            "ssm_conv1d": own.convolution,
            "ssm_a": own.rate,
            "ssm_dt": own.decay_bias,
            "ssm_norm": own.norm,
            "ssm_out": own.out,
        }
    if isinstance(own, ShortConvolutionNames):
        return {"shortconv.in_proj": own.projections, "shortconv.conv": own.convolution, "shortconv.out_proj": own.out}
    if isinstance(own, StateSpaceNames):
        return {
            "ssm_in": own.projections,
            "ssm_conv1d": own.convolution,
            "ssm_a": own.rate,
            "ssm_dt": own.step_bias,
            "ssm_d": own.skip,
            "ssm_norm": own.norm,
            "ssm_out": own.out,
        }
    return {}


def _in_block(name: str) -> tuple[int, str, str]:
    """Index of the block of a tensor, the name within the block, and its ending. Raises LoadError for other names."""
    matched = _LAYER.fullmatch(f"{name}.weight" if name.endswith(_WITHOUT_ENDING) else name)
    if matched is None:
        raise _unknown(name)
    index, what, suffix = matched.groups()
    return int(index), f"{what}.{suffix}" if suffix == "scale" else what, suffix


def map_layer_tensor(
    tensor: TensorLocation, spec: ModelSpec, index: int, names: Mapping[str, str], family: Family
) -> Iterator[tuple[str, TensorLocation]]:
    """Checkpoint names and tensors for one tensor of the layer with this index; none if it is not used.

    names: see `layer_tensor_names`. Raises LoadError.
    """
    name, prefix, layer = tensor.name, spec.names.layer(index), spec.layers[index]
    _, what, suffix = _in_block(name)
    mixer = layer.mixer
    if what in _UNUSED:
        return
    experts = _experts_of(layer)
    if experts is not None and (found := _of_experts(experts, what, tensor)) is not None:
        for new, one in found:
            yield f"{prefix}{new}" if what in _BARE else f"{prefix}{new}.{suffix}", one
    elif what in _OF_HEADS and isinstance(mixer, LatentSpec):
        if mixer.in_parts:  # else the file repeats the tensor of both
            if tensor.shape[:1] != (mixer.num_heads,):
                raise LoadError(
                    f"tensor {format_key(name)} has the shape {list(tensor.shape)} for {mixer.num_heads} heads"
                )
            for head, one in enumerate(tensor.unstack()):
                yield f"{prefix}{names[what]}[{head}].{suffix}", one
    elif what in _BARE and what in names:
        yield f"{prefix}{names[what]}", tensor
    elif what in names:
        yield f"{prefix}{names[what]}.{suffix}", tensor
    elif what == "attn_qkv":
        attention, first = family.attention_names, 0
        assert isinstance(mixer, AttentionSpec)
        q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        if tensor.shape[0] != q + 2 * kv:
            raise LoadError(f"tensor {format_key(name)} has {tensor.shape[0]} rows, {q + 2 * kv} are expected")
        for part, rows in ((attention.q, q), (attention.k, kv), (attention.v, kv)):
            yield f"{prefix}{part}.{suffix}", tensor.narrow(first, rows)
            first += rows
    else:
        raise _unknown(name)


def _unknown(name: str) -> LoadError:
    return LoadError(f"tensor {format_key(name)} does not belong to the model: it may be another kind of model")


def _experts_of(layer: LayerSpec) -> MoESpec | None:
    if layer.parallel_experts is not None:
        return layer.parallel_experts.experts
    return layer.feed_forward if isinstance(layer.feed_forward, MoESpec) else None


def _of_experts(spec: MoESpec, what: str, tensor: TensorLocation) -> list[tuple[str, TensorLocation]] | None:
    """Names and tensors of a router, of experts or of the shared expert; None for other tensors."""
    names, shared = spec.names, spec.names.shared
    if what == "ffn_gate_inp":
        return [(names.router, tensor)]
    if what == "exp_probs_b" and names.choice_bias is not None:
        return [(names.choice_bias, tensor)]
    if what == "ffn_gate_inp_shexp" and names.shared_gate is not None:
        return [(names.shared_gate, replace(tensor, shape=(1, *tensor.shape[-1:])))]
    matched = _EXPERTS.fullmatch(what)
    if matched is None:
        return None
    part, index, kind, both = matched.groups()
    if kind == "shexp":
        own = None if shared is None else _parts(shared).get(part)
        return None if own is None else [(own, tensor)]
    if kind == "exps" or both:  # all experts in one tensor
        wide = spec.intermediate_size
        if tensor.shape[:1] != (spec.experts,) or (both and tensor.shape[1:2] != (2 * wide,)):
            raise LoadError(f"tensor {what} has the shape {list(tensor.shape)} for {spec.experts} experts")
    parts = _parts(names.expert)
    if both and "gate" in parts:
        return [
            (f"{names.experts}.{i}.{own}", one.narrow(first, wide))
            for i, one in enumerate(tensor.unstack())
            for own, first in ((parts["gate"], 0), (parts["up"], wide))
        ]
    own = parts.get(part)
    if own is None:
        return None
    if kind == "exps":
        return [(f"{names.experts}.{i}.{own}", one) for i, one in enumerate(tensor.unstack())]
    return [(f"{names.experts}.{int(index)}.{own}", tensor)]  # older files have a tensor for each expert


def _parts(names: GatedMLPNames | PlainMLPNames) -> dict[str, str]:
    gate = {"gate": names.gate} if isinstance(names, GatedMLPNames) else {}
    return {**gate, "up": names.up, "down": names.down}


def _in_spec_order(found: dict[str, TensorLocation], spec: ModelSpec) -> dict[str, TensorLocation]:
    """The tensors in the order of the spec. Raises LoadError for one that is missing, surplus or of another shape."""
    result = {}
    for weight in spec.weights():
        for stored in weight.stored:
            tensor, shape = found.pop(stored.name, None), stored.shape(weight)
            if tensor is None:
                raise LoadError(f"tensor {stored.name} (Hugging Face's name) is missing: download the file again")
            if tensor.shape != shape:
                raise LoadError(f"tensor {stored.name} has the shape {list(tensor.shape)}, {list(shape)} is expected")
            result[stored.name] = tensor
    if found:
        raise LoadError(f"tensor {next(iter(found))} (Hugging Face's name) does not belong to this model")
    return result


# Copies of the model's embedding and head in some files.
_COPIES = ("embed_tokens.weight", "shared_head_head.weight")


def has_mtp_block(block: int, tensors: Collection[str]) -> bool:
    """Whether the block with this index is an MTP head. tensors: names of all tensors in the files."""
    return f"blk.{block}.nextn.eh_proj.weight" in tensors


def map_mtp_block(
    tensors: Mapping[str, TensorLocation], family: Family, spec: ModelSpec, block: int, aliases: Mapping[str, str]
) -> dict[str, TensorLocation]:
    """The tensors of this block by the names of the spec. Unknown tensors keep their names, after the layer's prefix.

    tensors: of all files, by GGUF name. spec: of the MTP head, with the tensors that GGUF files have. aliases: as in
    `map_tensors`.
    """
    assert spec.mtp_input is not None and spec.names.final_norm is not None
    begin, prefix = f"blk.{block}.", spec.names.layer(0)
    around = {
        "eh_proj.weight": spec.mtp_input.matrix,
        "enorm.weight": spec.mtp_input.embedding_norm,
        "hnorm.weight": spec.mtp_input.state_norm,
        "shared_head_norm.weight": spec.names.final_norm,
    }
    names = layer_tensor_names(tensors, family, spec, aliases)
    last = len(spec.layers) - 1
    if last and (norm := spec.layers[last].norms.mixer) is not None:
        names["post_attention_norm"] = norm

    def renamed(name: str, tensor: TensorLocation) -> Iterator[tuple[str, TensorLocation]]:
        what = name.removeprefix(begin)
        own = what.removeprefix("nextn.")
        if what == own:
            yield from map_layer_tensor(tensor, spec, 0 if what.startswith("attn_") else last, names, family)
        elif own in around:
            yield f"{around[own]}.weight", tensor
        elif own not in _COPIES:
            yield f"{prefix}{what}", tensor

    found: dict[str, TensorLocation] = {}
    for name, tensor in tensors.items():
        if not name.startswith(begin):
            continue
        try:
            found |= renamed(name, tensor)
        except LoadError:
            found[prefix + name.removeprefix(begin)] = tensor
    return found
