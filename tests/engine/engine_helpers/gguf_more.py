"""Further families as GGUF files: names of tensors from the `gguf` package's own map, the rest as llama.cpp's converter does it.

Independent of the tables in engine/model/gguf. `gguf_conversion` has the others, with everything written out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import MODEL_ARCH_NAMES
from helpers.gguf_conversion import Metadata, write
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Starcoder2ForCausalLM": "starcoder2",
    "PhiForCausalLM": "phi2",
    "GPTNeoXForCausalLM": "gptneox",
    "StableLmForCausalLM": "stablelm",
    "NemotronForCausalLM": "nemotron",
    "FalconForCausalLM": "falcon",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",  # without experts and recurrent layers
    "Exaone4ForCausalLM": "exaone4",
    "InternLM2ForCausalLM": "internlm2",
    "SeedOssForCausalLM": "seed_oss",
    "ArceeForCausalLM": "arcee",
}
_REORDERED = ("olmo", "granite", "arcee", "internlm2")  # rows of q and k, from (j, j + d/2) to (2j, 2j + 1)


def convert(source: Path, file: Path, **changes: Any) -> Path:
    """Write the model of a directory as a GGUF file. changes: metadata in place of what belongs there; None leaves a key out."""
    config = json.loads((source / "config.json").read_text())
    metadata = {**metadata_of(config), **changes}
    write(file, metadata, {name: tensor.contiguous().numpy() for name, tensor in tensors_of(source, config)})
    return file


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads of queries and of keys, and their width."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if config["model_type"] == "falcon":
        old = 1 if config["multi_query"] else heads
        kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else old
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    name = ARCHITECTURES[config["architectures"][0]]
    heads, kv_heads, dim = _heads(config)
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    full = rope.get("full_attention", rope)
    eps = next(config[key] for key in _EPSILONS if key in config) if name != "olmo" else 1e-5
    kind = "layer_norm_epsilon" if name in _CENTERED else "layer_norm_rms_epsilon"
    found: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or config["ffn_hidden_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        f"attention.{kind}": eps,
        "rope.freq_base": float(full["rope_theta"]),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": dim, "attention.value_length": dim}
    if full.get("partial_rotary_factor"):
        found["rope.dimension_count"] = int(dim * full["partial_rotary_factor"])
    if full.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(full["factor"]),
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": float(full["attention_factor"]),
        }
    if name in ("command-r", "cohere2"):
        found |= {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if name in ("gemma2", "cohere2", "olmo2", "exaone4") and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if name in ("olmo2", "exaone4") and config.get("sliding_window"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if name == "gemma2":
        found |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if name == "granite":
        found |= {
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "attention.scale": config["attention_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if config["model_type"] == "granitemoehybrid":
        found |= {
            "attention.head_count_kv": [kv_heads] * config["num_hidden_layers"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            **dict.fromkeys(("ssm.conv_kernel", "ssm.state_size", "ssm.group_count"), 4),
            **dict.fromkeys(("ssm.inner_size", "ssm.time_step_rank"), 128),
        }
    if name in ("gptneox", "stablelm"):
        found["use_parallel_residual"] = (
            name == "stablelm" or config["use_parallel_residual"]
        )  # as older configs made it
    if name == "olmo" and config["clip_qkv"]:
        found["attention.clamp_kqv"] = config["clip_qkv"]
    if name == "falcon":
        found["tensor_data_layout"] = "jploski"
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
_CENTERED = ("starcoder2", "phi2", "gptneox", "stablelm", "nemotron", "falcon", "olmo", "command-r", "cohere2")


def _in_parts(fused: Tensor, heads: int, kv_heads: int, dim: int) -> Tensor:
    """Rows of one key head after another as all queries, all keys, all values."""
    grouped = fused.view(kv_heads, heads // kv_heads + 2, dim, *fused.shape[1:])
    parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])


def tensors_of(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, and what its name is there."""
    name = ARCHITECTURES[config["architectures"][0]]
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    known = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    named: Callable[[str], str] = lambda full: known.get_name(full, try_suffixes=(".weight", ".bias"))  # noqa: E731
    heads, kv_heads, dim = _heads(config)
    for full, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float()
        if name in ("gemma", "gemma2", "nemotron") and full.endswith("norm.weight"):
            data = data + 1
        if name in ("falcon", "gptneox") and "query_key_value" in full:
            data = _in_parts(data, heads, kv_heads, dim)
        if name == "internlm2" and "attention.wqkv" in full:
            begin, _, kind = full.rpartition("attention.wqkv.")
            layer = begin.split(".")[2]
            sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
            q, k, v = _in_parts(data, heads, kv_heads, dim).split(sizes)
            yield f"blk.{layer}.attn_q.{kind}", interleave(q, heads, dim)
            yield f"blk.{layer}.attn_k.{kind}", interleave(k, kv_heads, dim)
            yield f"blk.{layer}.attn_v.{kind}", v
            continue
        if "shared_mlp." in full:
            block = f"blk.{full.split('.')[2]}.ffn"
            parts = data.chunk(2) if "input_linear" in full else (data,)
            for kind, part in zip(("gate", "up") if len(parts) > 1 else ("down",), parts, strict=True):
                yield f"{block}_{kind}.weight", part
            continue
        if name in _REORDERED and ("q_proj" in full or "k_proj" in full):
            data = interleave(data, heads if "q_proj" in full else kv_heads, dim)
        yield named(full), data
