"""Names what is not a safetensors model: other weight formats, adapters, quantized checkpoints, other kinds of model.

Responsible for saying what the thing is and what to do, in one line fit for a person. It looks at file names, config.json
and the names of tensors only, opens nothing else, and imports no torch.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

_CONVERT = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "M.from_pretrained({source!r}, dtype='auto').save_pretrained({target!r}); "
    "T.from_pretrained({source!r}).save_pretrained({target!r})"
)
_MERGE = (
    "from peft import AutoPeftModelForCausalLM as P; from transformers import AutoTokenizer as T; "
    "P.from_pretrained({source!r}, dtype='auto').merge_and_unload().save_pretrained({target!r}); "
    "T.from_pretrained({base!r}).save_pretrained({target!r})"
)

# Patterns of file names, and what a directory with such a file and without safetensors is.
_OTHER_WEIGHTS = (
    (("*.onnx", "onnx/*.onnx"), "ONNX"),
    (("openvino_model.xml",), "OpenVINO"),
    (("tf_model*.h5",), "TensorFlow"),
    (("flax_model*.msgpack",), "Flax"),
)
_PICKLED = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)")

_SHELL_ACTS_ON = '"$`\\!'  # inside double quotes

_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
    "torchao": "torchao",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
}
# Ends of tensors' names that only quantized checkpoints have.
_QUANTIZED_TENSORS = (
    (".weight_scale_inv", "FP8"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale", "FP8 or compressed-tensors"),
    (".weight.absmax", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    (".qweight", "GPTQ or AWQ"),
    (".scales", "MLX"),
)


def describe_foreign(path: Path) -> str | None:
    """What a file, or a directory without safetensors weights, is and what to do about it; None where nothing is known."""
    if path.is_file():
        return _describe_file(path)
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return _describe_adapter(path, adapter)
    if (path / "model_index.json").is_file():
        return f"{path} holds a diffusers pipeline, which makes pictures or sound: give a language model"
    if found := _first(path, ("*.gguf",)):
        return _describe_file(found)
    if (path / "params.json").is_file() and (found := _first(path, ("consolidated*",))):
        return (
            f"{path} holds {found.name}, the original format of Meta or Mistral: give the Hugging Face version of the "
            "model (config.json, model*.safetensors), usually in the same repository or one named -hf"
        )
    if found := _first(path, _PICKLED):
        return (
            f"{path} holds {found.name}, pickled weights, which may run code when they are read: only safetensors are "
            f"read. Convert them once, if you trust them: {_command(_CONVERT, path)}"
        )
    for patterns, name in _OTHER_WEIGHTS:
        if found := _first(path, patterns):
            return f"{path} holds weights for {name} ({found.name}): give the model's safetensors version"
    return None


def describe_quantized(config: Mapping[str, Any], tensors: Iterable[str] = ()) -> str | None:
    """What to say of a quantized checkpoint; None for one that is not. tensors: names of the checkpoint's tensors."""
    method = _method(config)
    if method is None:
        ends = {name: end for name in tensors for end, _ in _QUANTIZED_TENSORS if name.endswith(end)}
        method = next((title for end, title in _QUANTIZED_TENSORS if end in ends.values()), None)
    if method is None:
        return None
    return (
        f"this checkpoint is quantized ({method}), and quantized checkpoints are not read: take the unquantized one of "
        "the same model and start it with --quantization int8 (or int4), which quantizes it while it loads"
    )


def describe_tensors(tensors: Collection[str]) -> str | None:
    """What a checkpoint holds whose tensors are named otherwise than those of a language model; None for one of those."""
    if not tensors or "model.embed_tokens.weight" in tensors:
        return None
    if "embed_tokens.weight" in tensors:
        return (
            "these are the weights of a model without its language-model head (an embedding model, for example), which "
            "writes no text: give the model for text generation that it was made from"
        )
    if any("vision" in name or name.startswith("language_model.") for name in tensors):
        return "these are the weights of a multimodal model, which is not supported: give a language model"
    return None


def describe_architecture(architecture: str, config: Mapping[str, Any]) -> str | None:
    """What kind of model an architecture is that is not supported, where name or config.json tell; None where not."""
    name = architecture.lower()
    if any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config", "thinker_config")):
        return "a multimodal model"
    experts = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(isinstance(count, int) and count > 1 for count in experts) or "moe" in name or "mixtral" in name:
        return "a mixture-of-experts model"
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
    return None


def _describe_file(path: Path) -> str | None:
    if path.suffix.lower() == ".gguf":
        return (
            f"{path} is a GGUF file, the format of llama.cpp, which is not read: give the original Hugging Face model "
            "(config.json and *.safetensors); --quantization int8 or int4 makes its weights as small"
        )
    if path.suffix == ".safetensors":
        return f"{path} is a file of a model: give its directory, {path.parent}, with config.json and tokenizer.json"
    return None


def _describe_adapter(path: Path, adapter: Path) -> str:
    try:
        config = json.loads(adapter.read_text(encoding="utf-8"))
        base, kind = str(config.get("base_model_name_or_path") or ""), str(config.get("peft_type") or "")
    except (OSError, ValueError, AttributeError):
        base, kind = "", ""
    of = f" of base model {base}" if base else ""
    tokenizer = str(path) if (path / "tokenizer.json").is_file() or not base else base
    kind = {"LORA": "a LoRA adapter", "": "an adapter"}.get(kind, f"an adapter ({kind})")
    return (
        f"{path} is {kind}{of}, not a whole model: merge the two once and serve the result: "
        f"{_command(_MERGE, path, 'merged', base=tokenizer)}"
    )


def _command(code: str, source: Path, suffix: str = "safetensors", **more: str) -> str:
    """A command for a POSIX shell; it writes to a directory of its own below the one where it is run."""
    target = f"{_model_name(source)}-{suffix}"
    filled = code.format(source=str(source), target=target, **more)
    return "python -c " + (shlex.quote(filled) if set(filled) & set(_SHELL_ACTS_ON) else f'"{filled}"')


def _model_name(directory: Path) -> str:
    """The directory's name, or in the hub's cache, where that is a hash, the model's."""
    storage = directory.parent.parent.name
    return storage.rsplit("--", 1)[-1] if storage.startswith("models--") else directory.name


def _first(directory: Path, patterns: Iterable[str]) -> Path | None:
    for pattern in patterns:
        for file in sorted(directory.glob(pattern)):
            if file.is_file() and not _NOT_WEIGHTS.match(file.name):
                return file
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
