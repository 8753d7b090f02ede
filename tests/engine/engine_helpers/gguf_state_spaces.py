"""Falcon H1, Nemotron H and Nemotron 3 as GGUF files, as llama.cpp's converter writes them: names, keys and factors written out.

Independent of the tables in engine/model/gguf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.gguf_conversion import Metadata, write
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

_FALCON, _NEMOTRON, _EXPERTS = "falcon-h1", "nemotron_h", "nemotron_h_moe"
ARCHITECTURES = {"FalconH1ForCausalLM": _FALCON, "NemotronHForCausalLM": _NEMOTRON, "with layers of experts": _EXPERTS}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.final_layernorm": "output_norm",
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
}
_NAMES = {
    "norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_EXPERT_NAMES = {
    "gate.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_STATE_NAMES = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}

# Of a block that predicts further tokens, which is two layers of the checkpoint.
_FURTHER = {
    **{f"mtp.layers.0.{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
    "mtp.layers.1.norm.weight": "post_attention_norm.weight",
    "mtp.layers.1.final_layernorm.weight": "nextn.shared_head_norm.weight",
}


def architecture(config: Mapping[str, Any]) -> str:
    """What the file of a model says it is."""
    return _EXPERTS if "moe" in config.get("layers_block_type", ()) else ARCHITECTURES[config["architectures"][0]]


def of_state(name: str, data: Tensor, groups: int) -> tuple[str, Tensor]:
    """A tensor of a memory that fades (Mamba 2), by its name within that: how a file calls and holds it."""
    if name == "A_log":
        return "ssm_a", -data.exp()[:, None]
    if name == "D":
        return "ssm_d", data[:, None]
    if name == "dt_bias":
        return "ssm_dt.bias", data
    if name == "conv1d.weight":
        data = data.squeeze(1)
    elif name == "norm.weight":
        data = data.view(groups, -1)
    stem, end = name.rsplit(".", 1)
    return f"{_STATE_NAMES[stem]}.{end}", data


def convert(
    source: Path, file: Path, kind: str = "F32", tensors: Mapping[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """Write the model of a directory. kind: the type of its matrices. tensors: in place of its own, by their names in the file.

    changes: metadata in place of what belongs there, None to leave a key out.
    """
    config = json.loads((source / "config.json").read_text())
    falcon = architecture(config) == _FALCON
    metadata = (falcon_metadata if falcon else nemotron_metadata)(config)
    if tensors is None:
        loaded = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
        if not falcon:
            loaded = _stacked(loaded, config)
        if any(name.startswith("mtp.") for name in loaded):
            metadata |= _of_further_block(metadata, config)
        renamed = ((_of_falcon if falcon else _of_nemotron)(name, data, config) for name, data in loaded.items())
        tensors = {name: data.contiguous().numpy() for name, data in renamed}
    write(file, metadata | changes, tensors, kind)
    return file


def falcon_metadata(config: Mapping[str, Any]) -> Metadata:
    return _as_written(
        config,
        {
            "context_length": config["max_position_embeddings"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.inner_size": config["mamba_d_ssm"],
            "ssm.time_step_rank": config["mamba_d_ssm"] // config["mamba_d_head"],
        },
    )


def nemotron_metadata(config: Mapping[str, Any]) -> Metadata:
    """The width of what would rotate is not that of a head, and the length is one that no model has."""
    kinds, experts = config["layers_block_type"], {}
    widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    if "moe" in kinds:
        experts = {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
        }
    return _as_written(
        config,
        {
            **experts,
            "context_length": 2**20,
            "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
            "attention.head_count_kv": [
                config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds
            ],
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "rope.freq_base": 10_000.0,
            "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config["conv_kernel"],
            "ssm.state_size": config["ssm_state_size"],
            "ssm.group_count": config["n_groups"],
            "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
            "ssm.time_step_rank": config["mamba_num_heads"],
        },
    )


def _of_further_block(metadata: Metadata, config: Mapping[str, Any]) -> Metadata:
    """What is said of a model with a block that predicts further tokens, which attends and has experts."""
    count, heads, width = (
        f"{_EXPERTS}.{key}" for key in ("block_count", "attention.head_count_kv", "feed_forward_length")
    )
    return {
        count: metadata[count] + 1,
        heads: [*metadata[heads], config["num_key_value_heads"]],
        width: [*metadata[width], config["moe_intermediate_size"]],
        f"{_EXPERTS}.nextn_predict_layers": 1,
    }


def _as_written(config: Mapping[str, Any], own: Metadata) -> Metadata:
    name = architecture(config)
    shared = {
        "vocab_size": config["vocab_size"],
        "block_count": config.get("num_hidden_layers") or len(config["layers_block_type"]),
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in (shared | own).items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _of_falcon(full: str, data: Tensor, config: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Weights are multiplied by the factors of what goes into them, or of what they make."""
    gate, down = config["mlp_multipliers"]
    given = config["attention_in_multiplier"]
    factors = {
        "model.embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
        "self_attn.q_proj": given,
        "self_attn.k_proj": given * config["key_multiplier"],
        "self_attn.v_proj": given,
        "self_attn.o_proj": config["attention_out_multiplier"],
        "mamba.in_proj": config["ssm_in_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
    }
    own = re.sub(r"^model\.layers\.\d+\.", "", full).rsplit(".", 1)[0]
    data = data * factors.get(own, 1.0)
    if own == "mamba.in_proj":
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = data.split([inner, inner, keys, keys, config["mamba_n_heads"]])
        for part, factor in zip(parts, config["ssm_multipliers"], strict=True):
            part.mul_(factor)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(?:(mamba|self_attn|feed_forward)\.)?(.+)", full)
    if layer is None:
        return _outer(full), data
    if layer[2] == "mamba":
        name, data = of_state(layer[3], data, config["mamba_n_groups"])
        return f"blk.{layer[1]}.{name}", data
    return _inner(layer[1], layer[3]), data


def _of_nemotron(full: str, data: Tensor, config: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Rows of q and k are reordered as a Llama's are, although they do not rotate."""
    kinds = config["layers_block_type"]
    if full in _FURTHER:
        return f"blk.{len(kinds)}.{_FURTHER[full]}", data
    full = re.sub(r"^mtp\.layers\.[01]", f"backbone.layers.{len(kinds)}", full)
    layer = re.fullmatch(r"backbone\.layers\.(\d+)\.(mixer\.)?(.+)", full)
    if layer is None:
        return _outer(full), data
    index, name = layer[1], layer[3]
    if layer[2] and [*kinds, "further"][int(index)] == "linear_attention":
        name, data = of_state(name, data, config["n_groups"])
        return f"blk.{index}.{name}", data
    if name in _EXPERT_NAMES:
        return f"blk.{index}.{_EXPERT_NAMES[name]}", data
    if stack := re.fullmatch(r"experts\.(up|down)_proj", name):
        return f"blk.{index}.ffn_{stack[1]}_exps.weight", data
    if name in ("q_proj.weight", "k_proj.weight"):
        heads = config["num_attention_heads" if name[0] == "q" else "num_key_value_heads"]
        data = interleave(data, heads, config["head_dim"])
    return _inner(index, name), data


def _stacked(loaded: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor."""
    found = {name: data for name, data in loaded.items() if ".experts." not in name}
    stacks = {
        (match[1], match[2]) for name in loaded if (match := re.fullmatch(r"(.+\.experts)\.\d+\.(.+)\.weight", name))
    }
    for prefix, part in stacks:
        each = [loaded[f"{prefix}.{index}.{part}.weight"] for index in range(config["n_routed_experts"])]
        found[f"{prefix}.{part}"] = torch.stack(each)
    return found


def _outer(full: str) -> str:
    stem, end = full.rsplit(".", 1)
    return f"{_OUTER[stem]}.{end}"


def _inner(index: str, name: str) -> str:
    stem, end = name.rsplit(".", 1)
    return f"blk.{index}.{_NAMES[stem]}.{end}"
