"""gpt-oss, Granite's mixtures and DeepSeek's models as GGUF files, as llama.cpp's converter writes them:
names and keys written out.

Independent of the tables in engine/model/gguf.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.gguf_conversion import Metadata, write
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "GptOssForCausalLM": "gpt-oss",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "YoutuForCausalLM": "deepseek2",
    "Glm4MoeForCausalLM": "glm4moe",
}
_OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{hf}_proj.{end}": f"attn_{name}.{end}" for hf, name in zip("qkvo", ("q", "k", "v", "output"), strict=True)
       for end in ("weight", "bias")},
    **{f"self_attn.{one}_norm.weight": f"attn_{one}_norm.weight" for one in "qk"},
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    **{f"{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{name}.weight": f"nextn.shared_head_{name}.weight" for name in ("norm", "head")},
}  # fmt: skip

# A file has one number for both factors of YaRN's, as the published models do.
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
}


def convert(source: Path, file: Path, *, kind: str = "F32", in_parts: bool = True, **changes: Any) -> Path:
    """Write the model of a directory. kind: the type of the matrices. in_parts: of latent attention, what makes keys and what
    makes values are two tensors, as newer files have them. changes: metadata in place of what belongs there."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor.contiguous().numpy() for name, tensor in tensors_of(source, config, in_parts)}
    metadata = metadata_of(config, in_parts)
    if any(".nextn." in name for name in tensors):  # the layer behind the others counts as one of them
        of = metadata["general.architecture"]
        metadata |= {f"{of}.block_count": config["num_hidden_layers"] + 1, f"{of}.nextn_predict_layers": 1}
    write(file, {**metadata, **changes}, tensors, kind)
    return file


def metadata_of(config: Mapping[str, Any], in_parts: bool) -> Metadata:
    name, heads = ARCHITECTURES[config["architectures"][0]], config["num_attention_heads"]
    rope = config["rope_parameters"]
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if name == "deepseek2":
        found |= _latent(config, in_parts)
    else:
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if name == "glm4moe":
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        found |= _grouped_experts(config)
    elif name != "deepseek2":
        found |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    if name == "gpt-oss":
        found |= {
            "attention.sliding_window": config["sliding_window"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
    if name == "granitemoe":
        del found["attention.key_length"], found["attention.value_length"]
        found |= {
            "rope.dimension_count": config["head_dim"],
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
        if "shared_intermediate_size" in config:
            found["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _latent(config: Mapping[str, Any], in_parts: bool) -> Metadata:
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    rank, rope = config["kv_lora_rank"], config["rope_parameters"]
    found: Metadata = {
        "vocab_size": config["vocab_size"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
    }
    if in_parts:
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
        }
    else:
        found |= {"attention.key_length": plain + rotated, "attention.value_length": value}
    if config["q_lora_rank"] is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if "n_routed_experts" in config:
        found |= _grouped_experts(config)
    else:
        found |= {
            "leading_dense_block_count": config["num_hidden_layers"],
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 0,
        }
    if rope.get("mscale_all_dim") is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _grouped_experts(config: Mapping[str, Any]) -> Metadata:
    found: Metadata = {
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"] or 1,
        "expert_group_used_count": config["topk_group"] or 1,
    }
    if config.get("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if config["model_type"] in ("deepseek_v3", "glm4_moe"):
        found["expert_gating_func"] = 2
    return found


def tensors_of(source: Path, config: Mapping[str, Any], in_parts: bool) -> Iterator[tuple[str, Tensor]]:
    name, heads = ARCHITECTURES[config["architectures"][0]], config["num_attention_heads"]
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for full, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float()
        if full in _OUTER:
            yield f"{_OUTER[full]}.weight", data
            continue
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        assert layer is not None, full
        prefix, own = f"blk.{layer[1]}.", layer[2]
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", own):
            stacks[f"{prefix}ffn_{expert[2]}_exps.weight"][int(expert[1])] = data
        elif own.startswith("mlp.experts."):  # gpt-oss: columns are outputs, gate and up by turns
            end = "bias" if own.endswith("_bias") else "weight"
            data = data if end == "bias" else data.transpose(1, 2)
            if "gate_up" in own:
                yield f"{prefix}ffn_gate_exps.{end}", data[:, 0::2]
                yield f"{prefix}ffn_up_exps.{end}", data[:, 1::2]
            else:
                yield f"{prefix}ffn_down_exps.{end}", data
        elif own.endswith("input_linear.weight"):
            kind, gate_up = (
                ("exps", data.chunk(2, dim=1)) if own.startswith("block") else ("shexp", data.chunk(2, dim=0))
            )
            yield f"{prefix}ffn_gate_{kind}.weight", gate_up[0]
            yield f"{prefix}ffn_up_{kind}.weight", gate_up[1]
        elif own == "self_attn.kv_b_proj.weight" and in_parts:
            by_head = data.view(heads, -1, config["kv_lora_rank"])
            keys, values = by_head.split((config["qk_nope_head_dim"], config["v_head_dim"]), dim=1)
            yield f"{prefix}attn_k_b.weight", keys.transpose(1, 2)
            yield f"{prefix}attn_v_b.weight", values
        elif name in ("gpt-oss", "glm4moe") and own == "post_attention_layernorm.weight":
            yield f"{prefix}post_attention_norm.weight", data
        else:
            if name == "granitemoe" and re.fullmatch(r"self_attn\.[qk]_proj\.weight", own):
                count = heads if "q_proj" in own else config["num_key_value_heads"]
                data = interleave(data, count, len(data) // count)
            yield prefix + _NAMES[own], data
    for stack, each in stacks.items():
        yield stack, torch.stack([each[i] for i in range(len(each))])
