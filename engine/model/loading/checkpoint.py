"""The files of a checkpoint: which there are, and what their headers tell without reading a weight.

Knows neither architectures nor torch, so that the API process can look before an engine is started. What a directory is
that holds no such checkpoint is the business of `formats`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.formats import describe_other_format
from windlass.engine.model.loading.gguf_index import INDEX as GGUF_INDEX
from windlass.engine.model.loading.gguf_index import read_index
from windlass.engine.model.loading.safetensors_header import TensorHeader, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, single or sharded, or the GGUF files it is derived from.

    LoadError when there are none or some are missing.
    """
    gguf = read_index(directory)
    if gguf is not None:
        return list(gguf.files)
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
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


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Every tensor of all files of a checkpoint by name. Raises LoadError."""
    gguf = read_index(directory)
    if gguf is not None:
        return dict(gguf.tensors)
    found: dict[str, TensorHeader] = {}
    for file in checkpoint_files(directory):
        here = read_header(file).tensors
        if twice := found.keys() & here.keys():
            raise LoadError(
                f"{directory}: tensor {min(twice)!r} appears in more than one file: download the checkpoint again"
            )
        found |= here
    return found


def matrix_types(headers: dict[str, TensorHeader]) -> set[str]:
    """The types in which a checkpoint stores its matrices."""
    return {tensor.dtype for tensor in headers.values() if len(tensor.shape) > 1}


def weight_files(directory: Path) -> list[Path]:
    """The files whose bytes are the weights, or say which of them are which tensor. Raises LoadError."""
    index = directory / GGUF_INDEX
    return checkpoint_files(directory) + ([index] if index.is_file() else [])


def weights_digest(directory: Path) -> bytes:
    """A digest that tells checkpoints apart without reading gigabytes: names, sizes and times of the weight files."""
    digest = hashlib.sha256()
    for file in checkpoint_files(directory):
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    if (directory / GGUF_INDEX).is_file():
        digest.update((directory / GGUF_INDEX).read_bytes())  # which bytes are which tensor
    return digest.digest()
