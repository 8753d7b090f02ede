"""Blocks as GGUF files have them, repacked into panels: exact, in plain torch.

Where the bits lie in a file is ggml's (ggml-common.h: `block_q4_0` and so on). A row is consecutive blocks; each holds 32
elements, or 256 in the forms with super groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from windlass.kernels.layouts.blocks import BlockRows, store_block_rows
from windlass.kernels.layouts.forms import FORMS, BlockForm

# Codes [n, elements], scales [n, groups, parts] and supers [n, parts] of n blocks.
Parts: TypeAlias = tuple[Tensor, Tensor, Tensor | None]

_REPACK_ELEMENTS = 1 << 22  # of a weight, repacked at a time
_SCALE_BYTES = 12  # of a block with eight scales and eight minima of 6 bits


def block_elements(form: BlockForm) -> int:
    """Elements of a block in a file."""
    return form.group * max(form.super_groups, 1)


def row_bytes(form: BlockForm, columns: int) -> int:
    """Bytes of a row in a file. Raises ValueError for a form that is in no file, or columns that are not whole blocks."""
    elements = block_elements(form)
    if FORMS.get(form.name) != form:
        raise ValueError(f"no file has blocks of the form {form}")
    if columns % elements:
        raise ValueError(f"rows of {columns} elements are not whole {form.name} blocks of {elements}")
    scales = 2 * form.parts
    if form.super_groups:
        scales += _SCALE_BYTES if form.minimum else form.super_groups
    return columns // elements * (elements * form.bits // 8 + scales)


def check_blocks(target: BlockRows, blocks: Tensor) -> None:
    """Raises ValueError unless `blocks` are those of the target's rows."""
    shape = (target.count, row_bytes(target.weight.form, target.weight.columns))
    if blocks.dtype != torch.uint8 or blocks.shape != shape:
        raise ValueError(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}; {target.weight.form.name} wants uint8 {shape}"
        )


def repack_gguf_blocks(target: BlockRows, blocks: Tensor) -> None:
    """Put rows of blocks, uint8 [count, row bytes] as a file has them, into rows of a weight. Raises ValueError."""
    check_blocks(target, blocks)
    weight = target.weight
    read, step = _READERS[weight.form.name], max(1, _REPACK_ELEMENTS // weight.columns)
    for begin in range(0, target.count, step):
        part = blocks[begin : begin + step]
        rows = BlockRows(weight, target.first + begin, len(part))
        per_row = weight.columns // block_elements(weight.form)
        codes, scales, supers = read(part.reshape(len(part) * per_row, -1))
        store_block_rows(
            rows,
            codes.reshape(len(part), weight.columns),
            scales.reshape(len(part), -1, weight.form.parts),
            None if supers is None else supers.reshape(len(part), per_row, -1),
        )


def _halves(block: Tensor) -> Tensor:
    """Bytes as float16. [n, 2 * k] -> [n, k]."""
    return block.contiguous().view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Bytes in runs: the lower halves of a run are so many codes, its upper halves the next. [n, k] -> [n, 2 * k]."""
    runs = packed.view(len(packed), -1, run)
    return torch.stack((runs & 0x0F, runs >> 4), dim=2).flatten(1)


def _read_q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks[:, :2])[:, None], None


def _read_q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks[:, :4])[:, None], None


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes belongs to code i. [n, 4] -> [n, 32], as 16 or 0."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _read_q5_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _halves(blocks[:, :2])[:, None], None


def _read_q5_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), _halves(blocks[:, :4])[:, None], None


def _read_q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:], _halves(blocks[:, :2])[:, None], None


def _scales_of_six_bits(packed: Tensor) -> Tensor:
    """Eight scales and eight minima. [n, 12] -> [n, 8, 2].

    The first four of each are the lower six bits of bytes 0 .. 3 and 4 .. 7; the others have their lower four bits in the
    halves of bytes 8 .. 11 and their upper two at the top of the first eight bytes.
    """
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    first = torch.stack((scales & 0x3F, minima & 0x3F), dim=2)
    last = torch.stack(((rest & 0x0F) | (scales >> 6 << 4), (rest >> 4) | (minima >> 6 << 4)), dim=2)
    return torch.cat((first, last), dim=1)


def _read_q4_k(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 16:], 32), _scales_of_six_bits(blocks[:, 4:16]), _halves(blocks[:, :4])


def _read_q5_k(blocks: Tensor) -> Parts:
    # Bit i of byte j belongs to code j of group i.
    upper = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _nibbles(blocks[:, 48:], 32) | (upper << 4).flatten(1)
    return codes, _scales_of_six_bits(blocks[:, 4:16]), _halves(blocks[:, :4])


def _read_q6_k(blocks: Tensor) -> Parts:
    # Halves of a block, 128 codes each. Bits 2i and 2i + 1 of byte j belong to code 32i + j of a half.
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    codes = _nibbles(blocks[:, :128], 64) | ((upper & 3) << 4).flatten(1)
    return codes, blocks[:, 192:208].contiguous().view(torch.int8), _halves(blocks[:, 208:])


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "q4_0": _read_q4_0,
    "q4_1": _read_q4_1,
    "q5_0": _read_q5_0,
    "q5_1": _read_q5_1,
    "q8_0": _read_q8_0,
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
}
