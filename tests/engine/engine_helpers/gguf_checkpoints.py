"""Tiny Hugging Face models converted to GGUF as llama.cpp's converter does it, and engines that load the files.

Tensor names are those of the `gguf` package, llama.cpp's own map. Metadata and changed values are written out here. Both are
independent of the tables in engine/model/gguf. `helpers.gguf_conversion` converts the Llama-like families.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from helpers.engines import greedy, make_core, run
from helpers.gguf_conversion import Metadata, write
from helpers.gguf_models import interleave
from safetensors.torch import load_file
from torch import Tensor

from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.gguf.gguf_description import describe_gguf

PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(0)).tolist()
# A file has one value for both factors of YaRN, as the published models do.
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
ARCHITECTURES = {
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon-h1",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma4ForCausalLM": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4MoeForCausalLM": "glm4moe",
    "GPTNeoXForCausalLM": "gptneox",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "InternLM2ForCausalLM": "internlm2",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "MixtralForCausalLM": "llama",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "NemotronHForCausalLM with experts": "nemotron_h_moe",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "OlmoForCausalLM": "olmo",
    "PhiForCausalLM": "phi2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "SeedOssForCausalLM": "seed_oss",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "YoutuForCausalLM": "deepseek2",
}
_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_CENTERED = ("starcoder2", "phi2", "gptneox", "stablelm", "nemotron", "falcon", "olmo", "command-r", "cohere2")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
# Rows of q and k are permuted, from (j, j + d/2) to (2j, 2j + 1).
_REORDERED = ("llama", "olmo", "granite", "arcee", "granitemoe", "granitehybrid", *_NEMOTRON)
# Norms are stored with an offset of 1.
_NORM_OFFSET = ("gemma", "gemma2", "nemotron", *_DELTA)
_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
# Tensors that the package's map does not have.
_UNMAPPED = {
    "lm_head.weight": "output.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **{f"{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"shared_head.{name}.weight": f"nextn.shared_head_{name}.weight" for name in ("norm", "head")},
}
# Tensors of Qwen's MTP layer, by the names that the converter gives them first.
_QWEN_MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
# Nemotron's MTP layer is two layers of the checkpoint and one of the file.
_NEMOTRON_MTP = {
    **{f"0.{name}.weight": f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
    "1.final_layernorm.weight": "shared_head.norm.weight",
}

Config = Mapping[str, Any]


def architecture(config: Config) -> str:
    """Return the `general.architecture` of the file."""
    name = ARCHITECTURES[config["architectures"][0]]
    if name == "nemotron_h" and "moe" in config["layers_block_type"]:
        return "nemotron_h_moe"
    if name == "granitehybrid" and not config["num_local_experts"] and set(config["layer_types"]) == {"full_attention"}:
        return "granite"
    return name


def convert(
    source: Path,
    file: Path,
    *,
    kind: str = "F32",
    tensors: Mapping[str, np.ndarray] | None = None,
    more: Mapping[str, Any] | None = None,
    stacked: bool = True,
    joined: bool | None = None,
    latent_in_parts: bool = True,
    unused: bool = False,
    **changes: Any,
) -> Path:
    """Write the model of a directory as a GGUF file.

    kind: type of the matrices. tensors: all tensors, instead of the model's own. more: tensors to add or replace, None to omit
    one. stacked: the experts of a layer are one tensor. joined: their gate and up are one tensor or two; None: as in the
    checkpoint. latent_in_parts: latent attention has separate tensors for keys and values, as in newer files. unused: layers
    with KV sharing have their own keys and values all the same, as in published files. changes: metadata to replace, None to
    omit a key; the architecture may be omitted from keys.
    """
    config = json.loads((source / "config.json").read_text())
    name = architecture(config)
    found: dict[str, Any]
    if tensors is None:
        found = dict(tensors_of(source, stacked=stacked, latent_in_parts=latent_in_parts))
        if unused:
            found = {**_unused_keys_and_values(config, found), **found}
        for gate in [one for one in found if joined is True and one.endswith("ffn_gate_exps.weight")]:
            parts = found.pop(gate), found.pop(gate.replace("gate", "up"))
            found[gate.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
        for both in [one for one in found if joined is False and one.endswith("ffn_gate_up_exps.weight")]:
            halves = found.pop(both).chunk(2, dim=1)
            found |= {both.replace("gate_up", part): half for part, half in zip(("gate", "up"), halves, strict=True)}
    else:
        found = dict(tensors)
    found |= more or {}
    metadata = metadata_of(config, latent_in_parts)
    if any(".nextn." in one for one in found):
        metadata |= _mtp_metadata(config, metadata)
    whole = ("general.", "tokenizer.", f"{name}.")
    metadata |= {key if key.startswith(whole) else f"{name}.{key}": value for key, value in changes.items()}
    write(file, metadata, {one: np.ascontiguousarray(data) for one, data in found.items() if data is not None}, kind)
    return file


def derived(file: Path, directory: Path) -> Path:
    """Return the directory that the server derives from a GGUF file."""
    directory.mkdir(exist_ok=True)
    described = describe_gguf([file])
    assert not read_spec(described.config, described.generation).notices
    (directory / "config.json").write_text(json.dumps(described.config))
    (directory / "gguf.json").write_text(json.dumps(described.index))
    return directory


def converted(source: Path, directory: Path, **options: Any) -> Path:
    """Return the directory that the server derives from a GGUF file of the model in `source`."""
    directory.mkdir()
    return derived(convert(source, directory / "model.gguf", **options), directory)


def logits(directory: Path) -> Tensor:
    """Return the logits after PROMPT, as [3, vocabulary]."""
    return torch.stack(run(make_core(directory), [greedy("a", PROMPT, 3)])["a", 0].logits)


def _heads(config: Config) -> tuple[int, int, int]:
    """Return the number of query heads, of key heads, and their width."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if config["model_type"] == "falcon":
        old = 1 if config["multi_query"] else heads
        kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else old
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def _layers(config: Config) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


# -- metadata ----------------------------------------------------------------------------------------------------------


def metadata_of(config: Config, latent_in_parts: bool = True) -> Metadata:
    """Return the metadata that the converter writes for a config.json of transformers 5."""
    name = architecture(config)
    heads, kv_heads, dim = _heads(config)
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope = rope.get("full_attention", rope)
    kind = "layer_norm_epsilon" if name in _CENTERED else "layer_norm_rms_epsilon"
    found: Metadata = {
        "block_count": _layers(config),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or config.get("ffn_hidden_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        f"attention.{kind}": next(config[key] for key in _EPSILONS if key in config) if name != "olmo" else 1e-5,
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": dim, "attention.value_length": dim}
    if rope.get("partial_rotary_factor"):
        found["rope.dimension_count"] = int(dim * rope["partial_rotary_factor"])
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
        }
    if name == "deepseek2":
        found |= _latent_metadata(config, latent_in_parts)
    else:
        found |= _OWN_METADATA.get(name, lambda config: {})(config)
    return {
        "general.architecture": name,
        "general.type": "model",
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _cohere(config: Config) -> Metadata:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none", **_window(config)}


def _window(config: Config) -> Metadata:
    return {"attention.sliding_window": config.get("sliding_window")}


def _window_pattern(config: Config) -> Metadata:
    if not config.get("sliding_window"):
        return {}
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {**_window(config), "attention.sliding_window_pattern": local}


def _gemma2(config: Config) -> Metadata:
    return {**_window(config), **{key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}}


def _scales(config: Config) -> Metadata:
    """Return Granite's factors."""
    found = {
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "attention.scale": config["attention_multiplier"],
        "logit_scale": config["logits_scaling"],
    }
    if config["model_type"] == "granitemoehybrid":
        found |= {
            "attention.head_count_kv": [_heads(config)[1]] * config["num_hidden_layers"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            **dict.fromkeys(("ssm.conv_kernel", "ssm.state_size", "ssm.group_count"), 4),
            **dict.fromkeys(("ssm.inner_size", "ssm.time_step_rank"), 128),
        }
    return found


def _granite_experts(config: Config) -> Metadata:
    return {
        **_scales(config),
        **dict.fromkeys(("attention.key_length", "attention.value_length")),
        "rope.dimension_count": config["head_dim"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
    }


def _granite_hybrid(config: Config) -> Metadata:
    rotates, kv_heads = config["position_embedding_type"] == "rope", config["num_key_value_heads"]
    found = {
        **_scales(config),
        **dict.fromkeys(("attention.key_length", "attention.value_length")),
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in config["layer_types"]],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": rotates,
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }
    if not rotates:
        found["context_length"] = 2**20
    if config["num_local_experts"]:
        found |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return found


def _parallel_residual(config: Config) -> Metadata:
    """Return the key as older configs gave it."""
    return {"use_parallel_residual": config["model_type"] == "stablelm" or config["use_parallel_residual"]}


def _olmo(config: Config) -> Metadata:
    return {"attention.clamp_kqv": config["clip_qkv"] or None}


def _falcon(config: Config) -> Metadata:
    return {"tensor_data_layout": "jploski"}


def _experts(config: Config) -> Metadata:
    dim = _heads(config)[2]
    return {
        **{"attention.key_length": dim, "attention.value_length": dim},
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _gpt_oss(config: Config) -> Metadata:
    return {**_experts(config), **_window(config), "expert_feed_forward_length": config["intermediate_size"]}


def _grouped_experts(config: Config) -> Metadata:
    return {
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"] or 1,
        "expert_group_used_count": config["topk_group"] or 1,
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_gating_func": 2 if config["model_type"] in ("deepseek_v3", "glm4_moe") else None,
    }


def _latent_metadata(config: Config, in_parts: bool) -> Metadata:
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    rank, factor = config["kv_lora_rank"], config["rope_parameters"].get("mscale_all_dim")
    found: Metadata = {
        "vocab_size": config["vocab_size"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": plain + rotated,
        "attention.value_length": value,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": None if factor is None else 0.1 * factor,
    }
    if in_parts:
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
        }
    if "n_routed_experts" in config:
        return found | _grouped_experts(config)
    return found | {
        "leading_dense_block_count": config["num_hidden_layers"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
    }


def _delta(config: Config) -> Metadata:
    found: Metadata = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
    if config["model_type"] != "qwen3_next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    return found | (_experts(config) if "num_experts" in config else {})


def _gemma4_sizes(config: Config) -> tuple[list[bool], int, int]:
    """Return which layers have a window, and the head width and number of key heads of the others."""
    sizes = next(iter(config["per_layer_config"].values()))
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    return local, sizes["head_dim"], sizes.get("num_key_value_heads", config["num_key_value_heads"])


def _gemma4(config: Config) -> Metadata:
    local, width, kv_heads = _gemma4_sizes(config)
    head_dim, shared = config["head_dim"], config["num_kv_shared_layers"]
    count, intermediate, own = config["num_hidden_layers"], config["intermediate_size"], config["num_key_value_heads"]
    found: Metadata = {
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
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
    return found


def _lfm2(config: Config) -> Metadata:
    kv_heads, width = config["num_key_value_heads"], config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):  # as transformers adjusts it
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        steps = config["block_multiple_of"]
        width = steps * ((width + steps - 1) // steps)
    found: Metadata = {
        **dict.fromkeys(("attention.key_length", "attention.value_length")),
        "feed_forward_length": width,
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in config["layer_types"]],
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
    return found


def _falcon_h1(config: Config) -> Metadata:
    return {
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_d_ssm"],
        "ssm.time_step_rank": config["mamba_d_ssm"] // config["mamba_d_head"],
    }


def _nemotron_h(config: Config) -> Metadata:
    """The rotary width is not that of a head, and the context length is one that no model has, as llama.cpp writes them."""
    kinds, kv_heads = config["layers_block_type"], config["num_key_value_heads"]
    widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    found: Metadata = {
        "vocab_size": config["vocab_size"],
        "context_length": 2**20,
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
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
    }
    if "moe" in kinds:
        found |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
        }
    return found


_OWN_METADATA: dict[str, Callable[[Config], Metadata]] = {
    "cohere2": _cohere,
    "command-r": _cohere,
    "exaone4": _window_pattern,
    "falcon": _falcon,
    "falcon-h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma4": _gemma4,
    "glm4moe": _grouped_experts,
    "gpt-oss": _gpt_oss,
    "gptneox": _parallel_residual,
    "granite": _scales,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite_experts,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "llama": _experts,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "olmo": _olmo,
    "olmo2": _window_pattern,
    "olmoe": _experts,
    "qwen2moe": _experts,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen3moe": _experts,
    "qwen3next": _delta,
    "stablelm": _parallel_residual,
}


def _mtp_metadata(config: Config, metadata: Metadata) -> Metadata:
    """Return the keys that differ for a model with an MTP layer, which is one more block."""
    name = architecture(config)
    found: Metadata = {"block_count": _layers(config) + 1, "nextn_predict_layers": 1}
    if name in _DELTA:
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        found["attention.recurrent_layers"] = [*recurrent, False]
    if name in _NEMOTRON:  # the block attends and has experts
        own = {"attention.head_count_kv": "num_key_value_heads", "feed_forward_length": "moe_intermediate_size"}
        found |= {key: [*metadata[f"{name}.{key}"], config[size]] for key, size in own.items()}
    return {f"{name}.{key}": value for key, value in found.items()}


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensors_of(source: Path, *, stacked: bool = True, latent_in_parts: bool = True) -> dict[str, Tensor]:
    """Return every tensor by its name in the file."""
    config = json.loads((source / "config.json").read_text())
    name = architecture(config)
    number = next(number for number, known in MODEL_ARCH_NAMES.items() if known == name)
    known = gguf.get_tensor_name_map(number, _layers(config) + 1)
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    found: dict[str, Tensor] = {}
    for stored, tensor in load_file(source / "model.safetensors").items():
        full = _without_mtp(stored, _layers(config))
        layer = re.fullmatch(r"(?:model|backbone|transformer|gpt_neox)\.(?:layers|h)\.(\d+)\.(.+)", full)
        prefix, own = (f"blk.{layer[1]}.", layer[2]) if layer else ("", full)
        if expert := re.fullmatch(r"\w+\.experts\.(\d+)\.(\w+)\.weight", own):
            part = _PARTS[expert[2]]
            if stacked:
                stacks[f"{prefix}ffn_{part}_exps.weight"][int(expert[1])] = tensor.float()
            else:
                found[f"{prefix}ffn_{part}.{expert[1]}.weight"] = tensor.float()
            continue
        for new, data in _changed(own, tensor.float(), config, name, latent_in_parts):
            mapped = known.get_name(full.removesuffix(own) + new, try_suffixes=(".weight", ".bias"))
            mapped = mapped or prefix + _UNMAPPED.get(new, new)
            named = mapped.endswith((".weight", ".bias", ".scale", "ssm_a", "ssm_d"))
            found[mapped if named else f"{mapped}.weight"] = data
    if name == "gemma4":
        _, width, _ = _gemma4_sizes(config)
        rotated = int(width * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        found["rope_freqs.weight"] = torch.tensor([1.0] * rotated + [1e30] * (width // 2 - rotated))
    return found | {stack: torch.stack([each[i] for i in range(len(each))]) for stack, each in stacks.items()}


def _without_mtp(full: str, layers: int) -> str:
    """Return the name of an MTP layer's tensor as one of a layer after the others."""
    part, _, rest = full.removeprefix("mtp.").partition(".")
    if full == f"{part}.{rest}":
        return full
    if part != "layers":
        return f"model.layers.{layers}.{_QWEN_MTP[part]}.{rest}"
    if "mixer" in rest or rest in _NEMOTRON_MTP or rest == "1.norm.weight":
        own = "post_attention_norm.weight" if rest == "1.norm.weight" else rest.partition(".")[2]
        return f"backbone.layers.{layers}.{_NEMOTRON_MTP.get(rest, own)}"
    return f"model.layers.{layers}.{rest.partition('.')[2]}"


def _changed(own: str, data: Tensor, config: Config, name: str, latent_in_parts: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the file that one tensor of the checkpoint makes, by a name that the package's map knows, or by their
    own name in a block."""
    heads, kv_heads, dim = _heads(config)
    if name in _NORM_OFFSET and own.endswith("norm.weight") and not own.endswith("linear_attn.norm.weight"):
        data = data + 1
    if name in ("falcon", "gptneox") and "query_key_value" in own:
        data = _in_parts(data, heads, kv_heads, dim)
    if name in _REORDERED and (found := re.search(r"\b([qk])_proj\.", own)):
        data = interleave(data, heads if found[1] == "q" else kv_heads, dim)
    if name == "falcon-h1":
        data = _with_factors(own, data, config)
    if own.endswith("dt_bias"):
        own = own.replace("dt_bias", "dt_proj.bias")
    if own.endswith(("conv1d.weight", "conv.conv.weight")):
        data = data.squeeze(1)
    if own.endswith("feed_forward.expert_bias"):
        own = "exp_probs_b.bias"
    if own.startswith(("mamba.", "mixer.")):
        data = _state_space(own, data, config)
    if name in _DELTA:
        yield from _delta_net(own, data, config)
    elif "attention.wqkv" in own:
        end = own.rpartition(".")[2]
        q, k, v = _in_parts(data, heads, kv_heads, dim).split((heads * dim, kv_heads * dim, kv_heads * dim))
        yield f"attn_q.{end}", interleave(q, heads, dim)
        yield f"attn_k.{end}", interleave(k, kv_heads, dim)
        yield f"attn_v.{end}", v
    elif "shared_mlp." in own or "_linear." in own:
        suffix = "_exps" if own.startswith("block") else "_shexp" if config.get("num_local_experts") else ""
        if "input_linear" in own:
            gate, up = data.chunk(2, dim=data.dim() - 2)
            yield f"ffn_gate{suffix}.weight", gate
            yield f"ffn_up{suffix}.weight", up
        else:
            yield f"ffn_down{suffix}.weight", data
    elif name == "gpt-oss" and own.startswith("mlp.experts."):  # columns are outputs, gate and up alternate
        end = "bias" if own.endswith("_bias") else "weight"
        data = data if end == "bias" else data.transpose(1, 2)
        if "gate_up" in own:
            yield f"ffn_gate_exps.{end}", data[:, 0::2]
            yield f"ffn_up_exps.{end}", data[:, 1::2]
        else:
            yield f"ffn_down_exps.{end}", data
    elif own == "self_attn.kv_b_proj.weight" and latent_in_parts:
        by_head = data.view(heads, -1, config["kv_lora_rank"])
        keys, values = by_head.split((config["qk_nope_head_dim"], config["v_head_dim"]), dim=1)
        yield "attn_k_b.weight", keys.transpose(1, 2)
        yield "attn_v_b.weight", values
    else:
        yield own, data


def _in_parts(fused: Tensor, heads: int, kv_heads: int, dim: int) -> Tensor:
    """Return rows that are grouped by key head as all queries, all keys, all values."""
    grouped = fused.view(kv_heads, heads // kv_heads + 2, dim, *fused.shape[1:])
    parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])


def _state_space(own: str, data: Tensor, config: Config) -> Tensor:
    """Return a tensor of a Mamba 2 layer as files store it."""
    if own.endswith(".A_log"):
        return -data.exp()[:, None]
    if own.endswith(".D"):
        return data[:, None]
    if own in ("mamba.norm.weight", "mixer.norm.weight"):
        return data.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    return data


def _with_factors(own: str, data: Tensor, config: Config) -> Tensor:
    """Return a weight of Falcon H1 multiplied by the factors of its input or output."""
    gate, down = config["mlp_multipliers"]
    given = config["attention_in_multiplier"]
    factors = {
        "model.embed_tokens.weight": config["embedding_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
        "self_attn.q_proj.weight": given,
        "self_attn.k_proj.weight": given * config["key_multiplier"],
        "self_attn.v_proj.weight": given,
        "self_attn.o_proj.weight": config["attention_out_multiplier"],
        "mamba.in_proj.weight": config["ssm_in_multiplier"],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
    }
    data = data * factors.get(own, factors.get(own.replace(".bias", ".weight"), 1.0))
    if own.startswith("mamba.in_proj."):
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = data.split([inner, inner, keys, keys, config["mamba_n_heads"]])
        for part, factor in zip(parts, config["ssm_multipliers"], strict=True):
            part.mul_(factor)
    return data


def _delta_net(own: str, data: Tensor, config: Config) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of Qwen's Gated DeltaNet models."""
    if config["model_type"] != "qwen3_next":
        data = _value_heads_in_turns(own, data, config)
    if own.endswith("A_log"):
        yield own, -data.exp()
    elif own == "mlp.shared_expert_gate.weight":
        yield own, data.flatten()
    elif own == "mlp.experts.gate_up_proj":
        gate, up = data.chunk(2, dim=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif own == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", data
    elif "in_proj_qkvz" in own:  # grouped by key head in the checkpoint
        key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
        *qkv, z = data.view(key_heads, -1, data.shape[1]).split((key_dim, key_dim, values, values), dim=1)
        yield "attn_qkv.weight", torch.cat([part.reshape(-1, data.shape[1]) for part in qkv])
        yield "attn_gate.weight", z.reshape(-1, data.shape[1])
    else:
        yield own, data


def _value_heads_in_turns(own: str, data: Tensor, config: Config) -> Tensor:
    """Return value heads reordered so that neighbouring ones belong to neighbouring key heads."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def turned(rows: Tensor, dim: int) -> Tensor:
        return rows.view(key_heads, heads // key_heads, dim, -1).transpose(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in own or "conv1d" in own:
        keys = 2 * key_heads * key_dim
        return torch.cat((data[:keys], turned(data[keys:], value_dim)))
    if "in_proj_z" in own:
        return turned(data, value_dim)
    if re.search(r"in_proj_[ab]|A_log|dt_proj\.bias", own):
        return turned(data, 1)
    return turned(data.T, value_dim).T if "out_proj" in own else data


def _unused_keys_and_values(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return keys and values for Gemma 4's layers that read those of other layers."""
    local, width, kv_heads = _gemma4_sizes(config)
    found: dict[str, Tensor] = {}
    draw = torch.Generator().manual_seed(5)
    for layer in range(config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]):
        own = config["num_key_value_heads"] * config["head_dim"] if local[layer] else kv_heads * width
        for part in "kv":
            found[f"blk.{layer}.attn_{part}.weight"] = torch.randn(own, config["hidden_size"], generator=draw)
        found[f"blk.{layer}.attn_k_norm.weight"] = torch.ones_like(tensors[f"blk.{layer}.attn_q_norm.weight"])
    return found
