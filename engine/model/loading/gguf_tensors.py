"""The tensors of GGUF files, streamed: plain numbers as they are, blocks as rows of bytes.

Responsible for how the bytes of a tensor are to be read, and for turning blocks into numbers where no kept form takes them;
that is done by the `gguf` package, which is imported only then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.fp4 import codes_of_fp4, scales_of_fp4
from windlass.engine.model.loading.gguf_index import PLAIN, GGUFIndex
from windlass.engine.model.loading.tensor_stream import (
    Destination,
    TensorChunk,
    TensorEntry,
    TensorSlice,
    apply_slices,
    read_entries,
)

_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Where the float16 scales of a block lie: its first bytes, or its last.
_SCALES = {
    "Q4_0": slice(0, 2),
    "Q4_1": slice(0, 4),
    "Q5_0": slice(0, 2),
    "Q5_1": slice(0, 4),
    "Q8_0": slice(0, 2),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
_MXFP4_BYTES = 17
_NO_EXPONENT = 255  # of MXFP4: its numbers are NaN
_NOT_FINITE = 0x7C00  # the exponent of a float16 that is NaN or infinite


def read_gguf_tensors(
    index: GGUFIndex, place: Destination, cuts: Mapping[str, TensorSlice] | None = None
) -> Iterator[TensorChunk]:
    """Every tensor of the index, file by file in the order of the data. One in blocks is uint8 [rows, bytes of a row].

    cuts: of the tensors that not all is wanted of.

    Raises LoadError.
    """
    for number, path in enumerate(index.files):
        here = [name for name in index.tensors if index.file_numbers[name] == number]
        entries = [_entry(name, index) for name in sorted(here, key=lambda name: index.tensors[name].begin)]
        try:
            yield from read_entries(path, apply_slices(entries, cuts or {}), place)
        except OSError as error:
            raise LoadError(f"cannot read {path}: {error}: download or copy the file again") from None


def _entry(name: str, index: GGUFIndex) -> TensorEntry:
    header = index.tensors[name]
    if header.dtype in PLAIN:
        return TensorEntry(name, _GGUF_DTYPES[header.dtype], list(header.shape), header.begin)
    rows = header.shape[:-1]
    row_bytes = (header.end - header.begin) // max(1, int(np.prod(rows)))
    return TensorEntry(name, torch.uint8, [*rows, row_bytes], header.begin)


def scales_are_finite(blocks: Tensor, kind: str) -> bool:
    """Whether no number of these rows, uint8 [count, bytes of a row] of this type, is NaN or infinite."""
    if kind == "MXFP4":
        return not bool((blocks.reshape(-1, _MXFP4_BYTES)[:, 0] == _NO_EXPONENT).any())
    scales = blocks.reshape(-1, _BLOCK_BYTES[kind])[:, _SCALES[kind]].contiguous().view(torch.int16)
    return not bool((scales & _NOT_FINITE == _NOT_FINITE).any())


def to_block_format(blocks: Tensor, kind: str, name: str) -> Tensor:
    """Rows of bytes of a type that is multiplied as it is, as a file of the form in which they are kept would have them.

    name: of the tensor, for the error. Raises LoadError for numbers that no weights have.
    """
    if kind != "MXFP4":
        return blocks
    each = blocks.reshape(-1, _MXFP4_BYTES)
    data = each[:, 1:]
    codes, scales = scales_of_fp4(codes_of_fp4(torch.cat((data & 0x0F, data >> 4), dim=1)), each[:, 0], name)
    fifth = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # [N, 4, 8]
    low = codes & 0x0F
    parts = (
        scales[:, None].view(torch.uint8),
        fifth.sum(2, dtype=torch.uint8),
        low[:, :16] | (low[:, 16:] << 4),
    )
    return torch.cat(parts, dim=1).view(*blocks.shape[:-1], -1)


def dequantize_gguf(blocks: Tensor, kind: str) -> Tensor:
    """Rows of bytes of any type that the `gguf` package knows, as numbers: float32 [..., columns]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(dequantize(blocks.numpy(), GGMLQuantizationType[kind])))
