"""The files of a safetensors checkpoint: which there are, and what their headers tell without reading a weight.

Knows neither architectures nor torch, so that the API process can look before an engine is started. What a directory is
that holds no such checkpoint is the business of `formats`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.formats import describe_foreign

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file. dtype: the format's name, such as "BF16". begin, end: bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, single or sharded; LoadError when there are none or some are missing."""
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
    foreign = describe_foreign(directory)
    if foreign is not None:
        raise LoadError(foreign)
    advice = "use --load-format dummy for random weights"
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        advice = f"{others[0]} is not named like one; several files need their {_INDEX}"
    raise LoadError(
        f"{directory} has no {_SINGLE} (nor an index of shards): only safetensors checkpoints are read; {advice}"
    )


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Every tensor of a safetensors file by name. LoadError for a file that is damaged or cut off, without reading it."""
    try:
        return _header(file)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = f"{error}" if type(error) is ValueError else "its header is damaged"
    raise LoadError(f"cannot read {file}: {reason}: download or copy the file again") from None


def _header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start.startswith(b"version "):
            raise ValueError("it is a pointer of Git LFS, not the file itself (run git lfs pull)")
        if len(start) < 8:
            raise ValueError("it is empty or cut off")
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER:
            raise ValueError("its header is too large for a safetensors file")
        content = json.loads(opened.read(length))
    content.pop("__metadata__", None)
    data = 8 + length
    found = {
        name: TensorHeader(item["dtype"], tuple(item["shape"]), *(data + int(end) for end in item["data_offsets"]))
        for name, item in content.items()
    }
    wanted = max((tensor.end for tensor in found.values()), default=data)
    if wanted != size:
        raise ValueError(f"it has {size} bytes where its header tells of {wanted}")
    return found


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """The same of all files of a checkpoint. Raises LoadError."""
    return {name: tensor for file in checkpoint_files(directory) for name, tensor in read_header(file).items()}


def matrix_types(headers: dict[str, TensorHeader]) -> set[str]:
    """The types in which a checkpoint stores its matrices."""
    return {tensor.dtype for tensor in headers.values() if len(tensor.shape) > 1}


def weights_digest(directory: Path) -> bytes:
    """A digest that tells checkpoints apart without reading gigabytes: names, sizes and times of the weight files."""
    digest = hashlib.sha256()
    for file in checkpoint_files(directory):
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.digest()
