"""Models in GGUF files with tensors of any types, the derived directory, and a reference model with the same values,
dequantized by the `gguf` package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

# All widths are multiples of 256, the block size of the K types.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "num_hidden_layers": 2}
QUANTIZED_BY_PACKAGE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# float16 scales of a block: their bytes, and their ratio to the scale of the values.
_RANDOM_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "IQ4_NL": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
    "TQ2_0": ((64, 1.0),),
}

TypeOf = Callable[[str], str]


@dataclass(frozen=True)
class GgufModel:
    """file: the GGUF file. derived: directory for an engine. plain: the same values in safetensors."""

    file: Path
    derived: Path
    plain: Path


def random_blocks(kind: str, rows: int, columns: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks of a type that the package cannot write, with scales for about this standard deviation."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for scale in (1.0, None):
        if scale is None:
            numbers = dequantize(blocks.reshape(rows, -1), GGMLQuantizationType[kind])
            scale = float(spread / numbers.std())
        for place, factor in _RANDOM_SCALES[kind]:
            # Scales differ between blocks.
            values = (scale * factor * rng.uniform(0.9, 1.1, len(blocks))).astype(np.float16)
            blocks[:, place : place + 2] = values[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def interleave(rows: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Permute q or k of Llama as in GGUF files: pair (j, j + d/2) of each head becomes (2j, 2j + 1)."""
    return rows.view(heads, 2, dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def undo_interleave(rows: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    return rows.view(heads, dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def make_gguf(
    source: Path, target: Path, type_of: TypeOf, *, interleaved: bool = False, norms_with_offset: bool = False
) -> GgufModel:
    """Write the model of a Hugging Face directory as a GGUF file with its own names.

    type_of: type of each matrix, by name. The file has no metadata: the derived files are written directly.
    """
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rng = np.random.default_rng(0)
    target.mkdir(parents=True)
    file = target / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    plain: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        paired = next((n for part, n in (("q_proj", heads), ("k_proj", kv_heads)) if part in name), None)
        stored = interleave(tensor, paired, dim) if interleaved and paired else tensor
        offset = 1.0 if norms_with_offset and name.endswith("norm.weight") else 0.0
        stored = (stored.float() + offset).numpy()
        kind = type_of(name) if stored.ndim > 1 else "F32"
        if kind == "F32":
            data, numbers = stored, stored
        elif kind in _RANDOM_SCALES:
            data = random_blocks(kind, *stored.shape, float(stored.std()), rng)
            numbers = dequantize(data, GGMLQuantizationType[kind])
        else:
            data = quantize(stored, GGMLQuantizationType[kind])
            numbers = data.astype(np.float32) if kind == "F16" else dequantize(data, GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
        shapes[name] = list(stored.shape)
        back = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
        plain[name] = (undo_interleave(back, paired, dim) if interleaved and paired else back) - offset
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for folder in ("derived", "plain"):
        (target / folder).mkdir()
        shutil.copy(source / "config.json", target / folder)
    save_file(plain, target / "plain" / "model.safetensors", metadata={"format": "pt"})
    write_index(target / "derived", file, shapes, interleaved=interleaved, norms_with_offset=norms_with_offset)
    return GgufModel(file, target / "derived", target / "plain")


def write_index(derived: Path, file: Path, shapes: dict[str, list[int]], **switches: bool) -> None:
    stat = file.stat()
    tensors = {
        tensor.name: {
            "file": 0,
            "type": tensor.tensor_type.name,
            "shape": shapes[tensor.name],
            "begin": int(tensor.data_offset),
            "end": int(tensor.data_offset + tensor.n_bytes),
        }
        for tensor in gguf.GGUFReader(file).tensors
    }
    files = [{"path": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}]
    index = {"version": 1, "files": files, "tensors": tensors, **switches}
    (derived / "gguf.json").write_text(json.dumps(index))
