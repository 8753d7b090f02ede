"""Models with layers that carry a state as GGUF files, as llama.cpp's converter writes them: names and keys written out.

Independent of the tables in engine/model/gguf.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.gguf_conversion import Metadata, write
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{hf}_proj": f"attn_{name}" for hf, name in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm": "nextn.shared_head_norm",
}
# What stands around a layer that predicts further tokens, by the names that the converter gives it first.
_AROUND = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def convert(
    source: Path,
    file: Path,
    *,
    kind: str = "F32",
    more: Mapping[str, Tensor | None] | None = None,
    **changes: Any,
) -> Path:
    """Write the model of a directory. kind: the type of the matrices. more: tensors in place of what belongs there, None to leave
    one out. changes: the same of metadata."""
    config = json.loads((source / "config.json").read_text())
    tensors = {**tensors_of(source, config), **(more or {})}
    found = {name: tensor.contiguous().numpy() for name, tensor in tensors.items() if tensor is not None}
    further = _of_further_block(config) if any(".nextn." in name for name in tensors) else {}
    write(file, {**metadata_of(config), **further, **changes}, found, kind)
    return file


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    name, rope = ARCHITECTURES[config["architectures"][0]], config["rope_parameters"]
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
    if name != "qwen3next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if name != "qwen35":
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _of_further_block(config: Mapping[str, Any]) -> Metadata:
    """What is said of a model with a block that predicts further tokens."""
    name, layers = ARCHITECTURES[config["architectures"][0]], config["num_hidden_layers"]
    carries = [*(kind == "linear_attention" for kind in config["layer_types"]), False]
    found = {"block_count": layers + 1, "nextn_predict_layers": 1, "attention.recurrent_layers": carries}
    return {f"{name}.{key}": value for key, value in found.items()}


def _as_a_layer(name: str, layers: int) -> str:
    """Of a layer that predicts further tokens: as one behind the others."""
    part, _, rest = name.removeprefix("mtp.").partition(".")
    if name == f"{part}.{rest}":
        return name
    return f"model.layers.{layers}.{rest.partition('.')[2] if part == 'layers' else f'{_AROUND[part]}.{rest}'}"


def tensors_of(source: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the file, by its name there."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = defaultdict(list)
    stored = load_file(source / "model.safetensors")
    for key in sorted(stored):  # experts in their order
        full, data = _as_a_layer(key, config["num_hidden_layers"]), stored[key].float()
        if full.endswith("norm.weight") and not full.endswith("linear_attn.norm.weight"):
            data = data + 1
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        if layer is None:
            found[_OUTER[full]] = data
            continue
        prefix, name = f"blk.{layer[1]}.", layer[2]
        if expert := re.fullmatch(r"mlp\.experts\.\d\.(\w+)_proj\.weight", name):
            stacks[f"{prefix}ffn_{expert[1]}_exps.weight"].append(data)
            continue
        if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):  # of all
            parts = dict(zip(("gate", "up"), data.chunk(2, dim=1), strict=True)) if "gate" in name else {"down": data}
            found |= {f"{prefix}ffn_{part}_exps.weight": one for part, one in parts.items()}
            continue
        if config["model_type"] != "qwen3_next":
            data = _values_by_turns(name, data, config)
        if name.endswith("A_log"):
            found[f"{prefix}ssm_a"] = -data.exp()
        elif name.endswith("dt_bias"):
            found[f"{prefix}ssm_dt.bias"] = data
        elif "in_proj_qkvz" in name:
            qkv, gate = _taken_apart(data, config)
            found |= {f"{prefix}attn_qkv.weight": qkv, f"{prefix}attn_gate.weight": gate}
        else:
            begin, _, suffix = name.rpartition(".")
            found[f"{prefix}{_NAMES[begin]}.{suffix}"] = data.squeeze(1) if "conv1d" in name else data
    found = {name: data.flatten() if "gate_inp_shexp" in name else data for name, data in found.items()}
    return found | {name: torch.stack(each) for name, each in stacks.items()}


def _values_by_turns(name: str, data: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Heads of values so that neighbours meet neighbouring heads of keys, where there are several to each."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def turned(rows: Tensor, dim: int) -> Tensor:
        return rows.view(key_heads, heads // key_heads, dim, -1).transpose(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        keys = 2 * key_heads * key_dim
        return torch.cat((data[:keys], turned(data[keys:], value_dim)))
    if "in_proj_z" in name:
        return turned(data, value_dim)
    if re.search("in_proj_[ab]|A_log|dt_bias", name):
        return turned(data, 1)
    return turned(data.T, value_dim).T if "out_proj" in name else data


def _taken_apart(data: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, and gates, of what a file has head of keys by head of keys."""
    key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    q, k, v, z = data.view(key_heads, -1, data.shape[1]).split((key_dim, key_dim, values, values), dim=1)
    return torch.cat([part.reshape(-1, data.shape[1]) for part in (q, k, v)]), z.reshape(-1, data.shape[1])
