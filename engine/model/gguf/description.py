"""What is derived from the GGUF files of a model: config.json, generation_config.json and gguf.json, as values.

Responsible for putting together what the other modules here find out, over all files of a split model. It writes nothing.
Importing it imports gguf and numpy: only a start that has to read a GGUF does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from windlass.engine.errors import LoadError
from windlass.engine.model.families.reading import read_spec
from windlass.engine.model.gguf.metadata import read_gguf_config
from windlass.engine.model.gguf.prediction import map_mtp_block
from windlass.engine.model.gguf.reader import GGUFHeader, read_floats, read_header
from windlass.engine.model.gguf.rope import FACTOR_TENSORS
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation, map_tensors
from windlass.engine.model.loading.gguf_index import as_gguf_holds

VERSION = 1  # of gguf.json: whoever reads it checks it
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's numbers, in the words of sentence-transformers

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GGUFDescription:
    """metadata: of the first file. config, generation, index: the contents of the three files; generation may be empty.

    pooling: how embeddings are pooled where the file says so, as sentence-transformers calls it.
    """

    metadata: dict[str, Any] = field(repr=False)
    config: dict[str, Any]
    generation: dict[str, Any]
    index: dict[str, Any] = field(repr=False)
    pooling: str | None = None


def describe_gguf(paths: Sequence[Path]) -> GGUFDescription:
    """Read the files of one model, all its parts in order. Raises LoadError, one line that names the file and the fault."""
    stats = [path.stat() for path in paths]
    headers = [read_header(path) for path in paths]
    first = paths[0]
    _check_split(headers)
    placed: dict[str, GGUFTensorLocation] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in placed:
                raise LoadError(f"{header.path}: tensor {name} stands in an earlier part too: download the files again")
            placed[name] = GGUFTensorLocation(number, tensor.type, tensor.shape, tensor.begin, tensor.end)
    factors = {
        name: read_floats(header.path, header.tensors[name], name)
        for header in headers
        for name in FACTOR_TENSORS
        if name in header.tensors
    }
    facts = _with_path(first, lambda: read_gguf_config(headers[0].metadata, placed, factors))
    spec = _with_path(first, lambda: read_spec(facts.config, facts.generation))
    in_parts = "blk.0.attn_k_b.weight" in placed and "blk.0.attn_kv_b.weight" not in placed
    held = as_gguf_holds(spec, latent_in_parts=in_parts, gates_apart=facts.architecture.gates_apart)
    tensors = _with_path(first, lambda: map_tensors(placed, facts.family, held, facts.architecture.aliases))
    if spec.mtp is not None:
        layer = as_gguf_holds(spec.mtp, latent_in_parts=in_parts, gates_apart=facts.architecture.gates_apart)
        tensors |= map_mtp_block(placed, facts.family, layer, len(spec.layers), facts.architecture.aliases)
    index = {
        "version": VERSION,
        "files": [
            {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            for path, stat in zip(paths, stats, strict=True)
        ],
        "tensors": {
            name: {
                "file": tensor.file,
                "type": tensor.type,
                "shape": list(tensor.shape),
                "begin": tensor.begin,
                "end": tensor.end,
            }
            for name, tensor in tensors.items()
        },
        "interleaved": facts.architecture.interleaved,
        "norms_with_offset": facts.architecture.norms_with_offset,
        "fused_in_parts": facts.architecture.fused_in_parts,
        "latent_in_parts": in_parts,
        "values_in_turns": facts.architecture.values_in_turns,
        "gates_apart": facts.architecture.gates_apart,
        "factored": facts.architecture.factored,
    }
    metadata = headers[0].metadata
    told = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
    pooling = _POOLING.get(told) if isinstance(told, int) else None
    return GGUFDescription(metadata, facts.config, facts.generation, index, pooling)


def _with_path(path: Path, read: Callable[[], _T]) -> _T:
    """Name the file in the error."""
    try:
        return read()
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from None


def _check_split(headers: Sequence[GGUFHeader]) -> None:
    """Whether the files are the parts that their names say."""
    for number, header in enumerate(headers):
        count = header.metadata.get("split.count", 0) or 1
        if count != len(headers) or (len(headers) > 1 and header.metadata.get("split.no") != number):
            raise LoadError(
                f"{header.path} says it is part {header.metadata.get('split.no')} (from 0) of {count}, its name says part "
                f"{number} of {len(headers)}: keep the names the files were published under"
            )
    total, found = headers[0].metadata.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and total is not None and total != found:
        raise LoadError(
            f"{headers[0].path} announces {total} tensors, its parts hold {found}: download the files again"
        )
