"""Conversion of a Hugging Face model to GGUF, as llama.cpp's convert_hf_to_gguf.py does it, with explicit names and keys.

Independent of the tables in engine/model/gguf, which must restore what transformers saved.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "SmolLM3ForCausalLM": "smollm3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Phi3ForCausalLM": "phi3",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
}
_REORDERED = ("llama", "mistral3", "smollm3")  # rows of q and k, from (j, j + d/2) to (2j, 2j + 1)

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA = {"post_attention_layernorm": "post_attention_norm"}

Metadata = dict[str, Any]


def convert(
    source: Path,
    file: Path,
    *,
    kind: str = "F32",
    changes: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model of a directory as a GGUF file.

    kind: type of the matrices; norms and biases are F32. changes: metadata to replace, None to omit a key.
    tokenizer: its keys. more: further tensors by GGUF name, None to omit one.
    """
    config = json.loads((source / "config.json").read_text())
    metadata = {**metadata_of(config), **(tokenizer or {}), **(changes or {})}
    tensors = dict(tensors_of(source, config)) | dict(more or {})
    write(file, metadata, {name: data for name, data in tensors.items() if data is not None}, kind)
    return file


def write(file: Path, metadata: Metadata, tensors: Mapping[str, np.ndarray], kind: str = "F32") -> None:
    """Write a GGUF file. Integers become uint32, floats float32. Matrices whose rows are complete blocks are quantized,
    except norms of groups."""
    writer = gguf.GGUFWriter(file, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in tensors.items():
        chosen = GGMLQuantizationType[kind]
        block = gguf.GGML_QUANT_SIZES[chosen][0]
        if kind == "F32" or data.ndim < 2 or data.shape[-1] % block or name.endswith("_norm.weight"):
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, quantize(data, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    """Return the metadata that the converter writes for a config.json of transformers 5."""
    name = ARCHITECTURES[config["architectures"][0]]
    rope = config["rope_parameters"]
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found: Metadata = {
        "general.architecture": name,
        "general.type": "model",
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.rope.freq_base": float(full.get("rope_theta", 10_000.0)),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
    }
    kind = full.get("rope_type")
    if kind in ("linear", "yarn"):
        found |= {f"{name}.rope.scaling.type": kind, f"{name}.rope.scaling.factor": float(full["factor"])}
    if kind == "yarn":
        found[f"{name}.rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if full.get(key) is not None:
                found[f"{name}.rope.scaling.yarn_{key}"] = float(full[key])
        if full.get("attention_factor") is not None:
            found[f"{name}.rope.scaling.yarn_attn_factor"] = full["attention_factor"]
    if name in ("llama", "mistral3", "smollm3"):
        found |= {f"{name}.vocab_size": config["vocab_size"], f"{name}.rope.dimension_count": head_dim}
    if name == "mistral3":
        found[f"{name}.rope.scaling.yarn_log_multiplier"] = full["mscale_all_dim"]
        found[f"{name}.attention.temperature_scale"] = full["llama_4_scaling_beta"]
    if name in ("chatglm", "glm4"):
        found[f"{name}.rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 0.5))
    if name == "phi3":
        original = full.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        found[f"{name}.rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1.0))
        found[f"{name}.rope.scaling.original_context_length"] = original
        found[f"{name}.attention.sliding_window"] = config.get("sliding_window") or 0
        if full.get("long_factor"):
            scale = config["max_position_embeddings"] / original
            own = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            found[f"{name}.rope.scaling.attn_factor"] = own
    if name == "gemma3":
        found[f"{name}.attention.sliding_window"] = config["sliding_window"]
        found[f"{name}.rope.freq_base_swa"] = float(local["rope_theta"])
        if config.get("final_logit_softcapping"):
            found[f"{name}.final_logit_softcapping"] = config["final_logit_softcapping"]
    if name == "hunyuan-dense" and kind == "dynamic":
        base, dim = full["rope_theta"], head_dim
        found[f"{name}.rope.freq_base"] = base * full["alpha"] ** (dim / (dim - 2))
        found |= {f"{name}.rope.scaling.type": "none", f"{name}.rope.scaling.factor": 1.0}
    return found


def tensors_of(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Return every tensor by its name in the file."""
    name = ARCHITECTURES[config["architectures"][0]]
    names = {**_NAMES, **(_GEMMA if name == "gemma3" else {})}
    for full, tensor in load_file(source / "model.safetensors").items():
        data = tensor.float()
        if name == "gemma3" and full.endswith("norm.weight"):
            data = data + 1.0
        if name in _REORDERED and (found := re.search(r"\.([qk])_proj\.", full)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            data = (
                data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            )
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", full)
        if layer:
            yield f"blk.{layer[1]}.{names[layer[2]]}.{layer[3]}", data.contiguous().numpy()
            continue
        outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        yield f"{outer[full.removesuffix('.weight')]}.weight", data.numpy()
    yield from _factors(config)


def _factors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Return factors per rotated pair, of longrope and of Llama 3's scaling (computed in float32 by the converter)."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    for key, name in (("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")):
        if rope.get(key):
            yield f"{name}.weight", np.array(rope[key], dtype=np.float32)
    if rope.get("rope_type") != "llama3":
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for one in frequencies:
        wavelength = 2 * math.pi / one
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    yield "rope_freqs.weight", np.array(factors, dtype=np.float32)


def byte_vocabulary(words: tuple[str, ...] = ("▁a", "▁b")) -> Metadata:
    """Return the keys of a SentencePiece tokenizer with three special tokens, every byte and a few words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
