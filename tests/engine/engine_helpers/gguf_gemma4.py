"""Gemma 4 as GGUF files, as llama.cpp's converter writes them: names and keys written out.

Independent of the tables in engine/model/gguf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.gguf_conversion import Metadata, write
from safetensors.torch import load_file

ARCHITECTURES = {"Gemma4ForCausalLM": "gemma4"}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    **{f"self_attn.{hf}_proj.weight": f"attn_{name}.weight" for hf, name in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
    **{f"self_attn.{one}_norm.weight": f"attn_{one}_norm.weight" for one in "qk"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip

Tensors = dict[str, np.ndarray]


def convert(
    source: Path,
    file: Path,
    *,
    kind: str = "F32",
    apart: bool = False,
    unused: bool = False,
    more: Mapping[str, np.ndarray | None] | None = None,
    **changes: Any,
) -> Path:
    """Write the model of a directory.

    kind: the type of the matrices. apart: gate and up of the experts are two tensors. unused: layers that read the keys of
    others have tensors for their own all the same, as published models do. more: tensors in place of what belongs there, None
    to leave one out. changes: the same of metadata.
    """
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, np.ndarray | None] = {**dict(tensors_of(source, config, apart)), **(more or {})}
    if unused:
        tensors = {**_unused(config, tensors), **tensors}
    found = {name: data for name, data in tensors.items() if data is not None}
    write(file, {**metadata_of(config), **changes}, found, kind)
    return file


def _sizes(config: Mapping[str, Any]) -> tuple[list[bool], int, int]:
    """Which layers have a window, and of the others the width of a head and how many of keys there are."""
    of_layers = next(iter(config["per_layer_config"].values()))
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    return local, of_layers["head_dim"], of_layers.get("num_key_value_heads", config["num_key_value_heads"])


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    """What the converter writes of a config.json of transformers 5.24."""
    local, width, kv_heads = _sizes(config)
    rope, head_dim, shared = config["rope_parameters"], config["head_dim"], config["num_kv_shared_layers"]
    count, intermediate, own = config["num_hidden_layers"], config["intermediate_size"], config["num_key_value_heads"]
    found: Metadata = {
        "block_count": count,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": intermediate,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": own,
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": width,
        "attention.value_length": width,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": local,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "rope.dimension_count": width,
        "rope.dimension_count_swa": head_dim,
    }
    if config["num_experts"]:
        found |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = [intermediate * (1 + (i >= count - shared)) for i in range(count)]
    if kv_heads != own:
        found["attention.head_count_kv"] = [own if one else kv_heads for one in local]
    return {
        "general.architecture": "gemma4",
        "general.type": "model",
        **{f"gemma4.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def tensors_of(source: Path, config: Mapping[str, Any], apart: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file, and what its name is there."""
    for full, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float().numpy()
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        if layer is None:
            yield _OUTER[full], data
        elif apart and layer[2] == "experts.gate_up_proj":
            for part, rows in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                yield f"blk.{layer[1]}.ffn_{part}_exps.weight", np.ascontiguousarray(rows)
        else:
            yield f"blk.{layer[1]}.{_NAMES[layer[2]]}", data
    _, width, _ = _sizes(config)
    turning = int(width * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (width // 2 - turning)
    yield "rope_freqs.weight", np.array(factors, dtype=np.float32)


def _unused(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray | None]) -> Tensors:
    local, width, kv_heads = _sizes(config)
    found, draw = Tensors(), torch.Generator().manual_seed(5)
    for layer in range(config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]):
        own = config["num_key_value_heads"] * config["head_dim"] if local[layer] else kv_heads * width
        for part in "kv":
            rows = torch.randn(own, config["hidden_size"], generator=draw)
            found[f"blk.{layer}.attn_{part}.weight"] = rows.numpy()
        norm = tensors[f"blk.{layer}.attn_q_norm.weight"]
        assert norm is not None
        found[f"blk.{layer}.attn_k_norm.weight"] = np.ones_like(norm)
    return found
