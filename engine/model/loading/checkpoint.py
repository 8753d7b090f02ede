"""Checkpoint files of a model directory, their headers, and a digest that identifies them.

A directory in another format (ONNX, pickled weights, an adapter, a diffusers pipeline) is described in one line with advice.
Reads no weights and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from windlass.engine.bounded_files import read_json_text
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.gguf_index import INDEX as GGUF_INDEX
from windlass.engine.model.loading.gguf_index import read_index
from windlass.engine.model.loading.safetensors_header import TensorLocation, read_header

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

# Patterns of file names, and the format of a directory with such a file and without safetensors.
_OTHER_WEIGHTS = (
    (("*.onnx", "onnx/*.onnx"), "ONNX"),
    (("openvino_model.xml",), "OpenVINO"),
    (("tf_model*.h5",), "TensorFlow"),
    (("flax_model*.msgpack",), "Flax"),
)

_PICKLED = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)")
_SHELL_SPECIAL = '"$`\\!'  # inside double quotes


def describe_other_format(path: Path) -> str | None:
    """Format of a file, or of a directory without safetensors weights, with advice; None if it is unknown."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return (
                f"{path} is a file of a model: give its directory, {path.parent}, with config.json and tokenizer.json"
            )
        return None
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


def _describe_adapter(path: Path, adapter: Path) -> str:
    try:
        config = json.loads(read_json_text(adapter))
        base, kind = str(config.get("base_model_name_or_path") or ""), str(config.get("peft_type") or "")
    except (LoadError, OSError, ValueError, AttributeError):
        base, kind = "", ""
    of = f" of base model {base}" if base else ""
    tokenizer = str(path) if (path / "tokenizer.json").is_file() or not base else base
    kind = {"LORA": "a LoRA adapter", "": "an adapter"}.get(kind, f"an adapter ({kind})")
    return (
        f"{path} is {kind}{of}, not a whole model: merge the two once and serve the result: "
        f"{_command(_MERGE, path, 'merged', base=tokenizer)}"
    )


def _command(code: str, source: Path, suffix: str = "safetensors", **more: str) -> str:
    """A command for a POSIX shell, which writes to a new directory below the current one."""
    target = f"{_model_name(source)}-{suffix}"
    filled = code.format(source=str(source), target=target, **more)
    return "python -c " + (shlex.quote(filled) if set(filled) & set(_SHELL_SPECIAL) else f'"{filled}"')


def _model_name(directory: Path) -> str:
    """The directory's name; in the hub's cache, where that is a hash, the model's name."""
    storage = directory.parent.parent.name
    return storage.rsplit("--", 1)[-1] if storage.startswith("models--") else directory.name


def _first(directory: Path, patterns: Iterable[str]) -> Path | None:
    for pattern in patterns:
        for file in sorted(directory.glob(pattern)):
            if file.is_file() and not _NOT_WEIGHTS.match(file.name):
                return file
    return None


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, single or sharded, or the GGUF files it is derived from.

    Raises LoadError if there are none or some are missing.
    """
    gguf = read_index(directory)
    if gguf is not None:
        return list(gguf.files)
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_json_text(index))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise LoadError(f"{index} is not a safetensors index: download it again") from None
        if any(not isinstance(n, str) or Path(n).name != n for n in names):
            raise LoadError(f"{index} names files outside its directory")
        files = [directory / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise LoadError(f"{directory}: shards are missing: {', '.join(missing[:3])}{more}: download them")
        return files
    single = directory / _SINGLE
    if single.is_file():
        return [single]
    foreign = describe_other_format(directory)
    if foreign is not None:
        raise LoadError(foreign)
    advice = "use `loading.format=dummy` for random weights"
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        advice = f"{others[0]} is not named like one; several files need their {_INDEX}"
    raise LoadError(
        f"{directory} has no {_SINGLE} (nor an index of shards): only safetensors checkpoints are read; {advice}"
    )


def read_headers(directory: Path) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint by name. Raises LoadError."""
    gguf = read_index(directory)
    if gguf is not None:
        return dict(gguf.tensors)
    found: dict[str, TensorLocation] = {}
    for file in checkpoint_files(directory):
        here = read_header(file).tensors
        if twice := found.keys() & here.keys():
            raise LoadError(
                f"{directory}: tensor {min(twice)!r} appears in more than one file: download the checkpoint again"
            )
        found |= here
    return found


def weight_files(directory: Path) -> list[Path]:
    """The files with the weights, and gguf.json, which maps GGUF files to tensors. Raises LoadError."""
    index = directory / GGUF_INDEX
    return checkpoint_files(directory) + ([index] if index.is_file() else [])


def weights_digest(directory: Path) -> bytes:
    """A digest of a checkpoint that does not read gigabytes: of names, sizes and times of the weight files."""
    digest = hashlib.sha256()
    for file in checkpoint_files(directory):
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    if (directory / GGUF_INDEX).is_file():
        digest.update((directory / GGUF_INDEX).read_bytes())  # maps bytes to tensors
    return digest.digest()
