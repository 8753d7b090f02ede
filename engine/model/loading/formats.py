"""Names what is not a safetensors model: other weight formats, adapters, pipelines.

Responsible for saying what the thing is and what to do, in one line fit for a person. It looks at file names and an
adapter's configuration only, opens nothing else, and imports no torch. What config.json tells of a model that cannot be
run is the business of `config_json.unsupported`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

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


def describe_other_format(path: Path) -> str | None:
    """What a file, or a directory without safetensors weights, is and what to do about it; None where nothing is known."""
    if path.is_file():
        return _describe_file(path)
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return _describe_adapter(path, adapter)
    if (path / "model_index.json").is_file():
        return f"{path} holds a diffusers pipeline, which makes pictures or sound: give a language model"
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


def _describe_file(path: Path) -> str | None:
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
