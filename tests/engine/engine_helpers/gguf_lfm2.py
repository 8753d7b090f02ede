"""LFM2 as GGUF files, as llama.cpp's converter writes them: names and keys written out.

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

ARCHITECTURES = {"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
}
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def convert(source: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the model of a directory. kind: the type of its matrices. changes: metadata in place of what belongs there."""
    config = json.loads((source / "config.json").read_text())
    tensors = tensors_of(source)
    metadata = metadata_of(config, len(tensors["blk.0.ffn_gate.weight"])) | changes
    write(file, metadata, {name: one.contiguous().numpy() for name, one in tensors.items()}, kind)
    return file


def metadata_of(config: Mapping[str, Any], width: int) -> Metadata:
    name = ARCHITECTURES[config["architectures"][0]]
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": width,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] if one else 0 for one in attends],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" in config:
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def tensors_of(source: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for full, tensor in load_file(source / "model.safetensors").items():
        layer, data = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full), tensor.float()
        if layer is None:
            name, suffix = full.rsplit(".", 1)
            found[f"{_NAMES[name]}.{suffix}"] = data
            continue
        prefix, name = f"blk.{layer[1]}.", layer[2]
        if expert := re.fullmatch(r"feed_forward\.experts\.(\d+)\.(\w+)\.weight", name):
            stacks[f"{prefix}ffn_{_PARTS[expert[2]]}_exps.weight"][int(expert[1])] = data
        elif name == "feed_forward.expert_bias":
            found[f"{prefix}exp_probs_b.bias"] = data
        else:
            name, suffix = name.rsplit(".", 1)
            found[f"{prefix}{_NAMES[name]}.{suffix}"] = data.squeeze(1) if data.dim() == 3 else data
    return found | {name: torch.stack([own[i] for i in range(len(own))]) for name, own in stacks.items()}
