"""Granite 4 H as GGUF files, as llama.cpp's converter writes them: names and keys written out.

Independent of the tables in engine/model/gguf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_helpers.gguf_state_spaces import of_state
from helpers.gguf_conversion import Metadata, write
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {"GraniteMoeHybridForCausalLM": "granitehybrid"}
_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}


def convert(source: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the model of a directory. kind: the type of its matrices. changes: metadata in place of what belongs there."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor.contiguous().numpy() for name, tensor in tensors_of(source, config)}
    write(file, metadata_of(config) | changes, tensors, kind)
    return file


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    name = ARCHITECTURES[config["architectures"][0]]
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    rotates = config["position_embedding_type"] == "rope"
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"] if rotates else 2**20,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] if one else 0 for one in attends],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": rotates,
        "vocab_size": config["vocab_size"],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }
    if config["num_local_experts"]:
        found |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def tensors_of(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    suffix = "_shexp" if config["num_local_experts"] else ""
    for full, tensor in load_file(source / "model.safetensors").items():
        layer, data = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full), tensor.float()
        if layer is None:
            yield _OUTER.get(full, "output.weight"), data
            continue
        prefix, own = f"blk.{layer[1]}.", layer[2]
        name, end = own.rsplit(".", 1)
        if name == "shared_mlp.input_linear":
            gate, up = data.chunk(2)
            yield f"{prefix}ffn_gate{suffix}.weight", gate
            yield f"{prefix}ffn_up{suffix}.weight", up
        elif name == "shared_mlp.output_linear":
            yield f"{prefix}ffn_down{suffix}.weight", data
        elif name == "block_sparse_moe.input_linear":
            gate, up = data.chunk(2, dim=1)
            yield f"{prefix}ffn_gate_exps.weight", gate
            yield f"{prefix}ffn_up_exps.weight", up
        elif own.startswith("mamba."):
            state, data = of_state(own.removeprefix("mamba."), data, config["mamba_n_groups"])
            yield f"{prefix}{state}", data
        else:
            if re.fullmatch(r"self_attn\.[qk]_proj", name):
                count = config["num_attention_heads"] if ".q_" in name else config["num_key_value_heads"]
                data = interleave(data, count, len(data) // count)
            yield f"{prefix}{_NAMES[name]}.{end}", data
