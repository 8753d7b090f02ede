"""Reads the tensors of a quantized checkpoint weight by weight.

Responsible for having all that a weight is made of in memory at once, and of the others only what is read ahead: files keep
tensors of one type together, so that in their order the codes of all weights would come before the first scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.quantized.plan import QuantizedCheckpoint, QuantizedTensor
from windlass.engine.model.loading.safetensors_file import read_layout
from windlass.engine.model.loading.tensor_stream import TensorEntry, read_entries


def read_quantized(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[QuantizedTensor, dict[str, Tensor]]]:
    """Each quantized tensor with what it is made of, by what that is. Raises LoadError."""
    files = list(dict.fromkeys(located.file for located in checkpoint.sources.values()))
    owners = {
        source: (tensor, role) for tensor in checkpoint.tensors.values() for role, source in tensor.sources.items()
    }
    found: dict[str, dict[str, Tensor]] = {name: {} for name in checkpoint.tensors}
    for file in files:
        try:
            for part in read_entries(
                file, _entries(checkpoint, file), lambda _, dtype, shape: torch.empty(shape, dtype=dtype)
            ):
                if not part.finite:
                    raise LoadError(
                        f"{file}: tensor {part.name!r} holds numbers that are NaN or infinite: the checkpoint is damaged: "
                        "download or copy it again, or take another"
                    )
                tensor, role = owners[part.name]
                found[tensor.name][role] = part.tensor
                if len(found[tensor.name]) == len(tensor.sources):
                    yield tensor, found.pop(tensor.name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read {file}: {error}: download or copy the file again") from None


def _entries(checkpoint: QuantizedCheckpoint, file: Path) -> Iterator[TensorEntry]:
    """What lies in this file, weight by weight in the order of their codes."""
    layout, _ = read_layout(file)
    in_order = sorted(checkpoint.tensors.values(), key=lambda t: checkpoint.sources[t.sources["codes"]].header.begin)
    for tensor in in_order:
        for source in tensor.sources.values():
            located = checkpoint.sources[source]
            if located.file == file:
                dtype = layout[source.partition("[")[0]][0]  # "name[3]": one of those that a tensor holds
                yield TensorEntry(source, dtype, list(located.shape), located.header.begin)
