"""Mixtures of experts as GGUF files, as llama.cpp's converter writes them: names and keys written out.

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
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "OlmoeForCausalLM": "olmoe",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def convert(source: Path, file: Path, *, kind: str = "F32", stacked: bool = True, gate_beside_up: bool = False) -> Path:
    """Write the model of a directory.

    kind: the type of the matrices. stacked: experts are one tensor. gate_beside_up: their gates and what these gate are one.
    """
    config = json.loads((source / "config.json").read_text())
    found = tensors_of(source, config, stacked)
    for name in [name for name in found if gate_beside_up and name.endswith("ffn_gate_exps.weight")]:
        both = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate", "gate_up")] = torch.cat(both, dim=1)
    tensors = {name: tensor.contiguous().numpy() for name, tensor in found.items()}
    write(file, metadata_of(config), tensors, kind)
    return file


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    name, heads = ARCHITECTURES[config["architectures"][0]], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def tensors_of(source: Path, config: Mapping[str, Any], stacked: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for full, tensor in load_file(source / "model.safetensors").items():
        name, data = full.removeprefix("model.layers."), tensor.float()
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", full)
        if layer is None:
            name, suffix = full.rsplit(".", 1)
            found[f"{_NAMES[name]}.{suffix}"] = data
            continue
        prefix, name, suffix = f"blk.{layer[1]}.", layer[2], layer[3]
        if expert := re.fullmatch(r"\w+\.experts\.(\d+)\.(\w+)", name):
            part = _PARTS[expert[2]]
            if stacked:
                stacks[f"{prefix}ffn_{part}_exps.weight"][int(expert[1])] = data
            else:
                found[f"{prefix}ffn_{part}.{expert[1]}.weight"] = data
            continue
        if config["model_type"] == "mixtral" and name in ("self_attn.q_proj", "self_attn.k_proj"):
            count = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            data = interleave(data, count, len(data) // count)
        found[f"{prefix}{_NAMES[name]}.{suffix}"] = data
    return found | {name: torch.stack([own[i] for i in range(len(own))]) for name, own in stacks.items()}
