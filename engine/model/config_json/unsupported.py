"""Says what a model is that cannot be run, where config.json or the names of its tensors tell.

Responsible for one line fit for a person: the kind of architecture, the method of a quantized checkpoint, the keys that
would change the mathematics. It opens no file and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from windlass.engine.model.config_json.quantization import read_quantization_config

_METHODS = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
}
# Ends of tensors' names that only quantized checkpoints have.
_ENDS = {
    ".weight_scale_inv": "FP8",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".scales": "MLX",
    "_proj_blocks": "MXFP4",
}
# Those of them that are read where config.json tells of them.
_NEEDS_CONFIG = ("FP8", "compressed-tensors", "FP8 or compressed-tensors", "GPTQ or AWQ", "MXFP4")

# By the name of the class in front of "For…", in small letters.
_KINDS = {
    "a hybrid of attention and recurrent layers, whose state is no cache of keys and values,": frozenset(
        "bamba jamba kimilinear minimax olmohybrid recurrentgemma zamba zamba2".split()
    ),
    "a model whose attention looks at chosen keys only (sparse attention)": frozenset(
        {"deepseekv32", "deepseekv4", "glmmoedsa"}
    ),
    "a model whose layers share keys and have embeddings of their own (Gemma 3n)": frozenset({"gemma3n"}),
    "a model without rotary attention (ALiBi)": frozenset({"mpt"}),
    "a model without rotary attention (learned or sinusoidal positions)": frozenset(
        "biogpt ctrl gptbigcode gptneo openaigpt openai opt xglm".split()
    ),
}
# Layers that are attention, as `layer_types` calls them.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def _describe_kind(name: str, config: Mapping[str, Any]) -> str | None:
    """What the name of a class in small letters or the kinds of its layers tell."""
    stem = re.sub("for(causallm|conditionalgeneration|sequenceclassification)$|lmheadmodel$", "", name)
    for kind, names in _KINDS.items():
        if stem in names:
            return kind
    types = config.get("layer_types")
    others = (
        {str(kind)[:40] for kind in types if str(kind) not in _ATTENTION_LAYERS} if isinstance(types, list) else set()
    )
    return f"a model with layers that are not attention ({min(others)})" if others else None


def describe_architecture(architecture: str, config: Mapping[str, Any]) -> str | None:
    """What kind of model an architecture is that is not supported, where name or config.json tell; None where not."""
    name = architecture.lower()
    if (kind := _describe_kind(name, config)) is not None:
        return kind
    if any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config", "thinker_config")):
        return "a multimodal model"
    experts = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(isinstance(count, int) and count > 1 for count in experts) or "moe" in name or "mixtral" in name:
        return "a mixture of experts of another kind than those that are supported,"
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder model"
    if name.endswith("formaskedlm"):
        return "an encoder, which writes no text"
    if name.endswith(("forsequenceclassification", "fortokenclassification", "forquestionanswering")):
        return "a classifier, which writes no text"
    if name.endswith("model"):
        return "an embedding model or one without its language-model head, which writes no text"
    if name.startswith(("mamba", "rwkv", "falconmamba")):
        return "a model without attention"
    code = config.get("auto_map")
    if isinstance(code, Mapping) and (found := [str(name)[:80] for key, name in code.items() if "Model" in str(key)]):
        return f"a program of the checkpoint's own ({found[0]}), which is not run,"
    return None


def describe_quantized(config: Mapping[str, Any], tensors: Iterable[str] = ()) -> str | None:
    """What to say of a checkpoint that is quantized in a way that is not read; None for any other.

    tensors: names of the checkpoint's tensors.
    """
    told = read_quantization_config(config)
    if told is not None:
        return _unread(f"{told.method}, {told.unsupported_reason}") if told.unsupported_reason is not None else None
    if (method := _method(config)) is not None:
        return _unread(method)
    ends = {end for name in tensors for end in _ENDS if name.endswith(end)}
    if (method := next((_ENDS[end] for end in _ENDS if end in ends), None)) is None:
        return None
    if method not in _NEEDS_CONFIG:
        return _unread(method)
    return (
        f"this checkpoint is quantized ({method}), but its config.json has no quantization_config that says how: download "
        "config.json again from where the weights are from"
    )


def _unread(method: str) -> str:
    return (
        f"this checkpoint is quantized ({method}), which is not read: take the unquantized one of the same model and start it "
        "with `compute.quantization=int8` (or int4), which quantizes it while it loads"
    )


def describe_tensors(tensors: Collection[str]) -> str | None:
    """What a checkpoint holds whose tensors are named otherwise than those of a language model; None for one of those."""
    if not tensors or "model.embed_tokens.weight" in tensors:
        return None
    if any("vision" in name or name.startswith("language_model.") for name in tensors):
        return (
            "these are the weights of a multimodal model, and config.json describes one of text alone: take the config.json that "
            "belongs to them"
        )
    return None


def _method(config: Mapping[str, Any]) -> str | None:
    """The quantization that config.json tells of."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, Mapping) and found.get("quant_method"):
            method = str(found["quant_method"])
            bits = found.get("bits") or next((n for n in (4, 8) if found.get(f"load_in_{n}bit")), None)
            title = _METHODS.get(method.lower(), method)
            return f"{title}, {bits} bits" if isinstance(bits, int) else title
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and "group_size" in mlx:
        return f"MLX, {mlx['bits']} bits" if isinstance(mlx.get("bits"), int) else "MLX"
    return "quantization_config in config.json" if config.get("quantization_config") else None
